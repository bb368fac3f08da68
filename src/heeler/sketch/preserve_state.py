"""Run a model for a look at it, and leave it as it was: random numbers, buffers, attributes and modes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heeler.torch_private import BATCH_NORM


@contextmanager
def preserve_state(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Batch norms use running statistics meanwhile, which mix no examples.

    Yields what is to be called before every run: then all have the same dropout and begin in the same state.
    """
    modules = list(model.modules())
    states = [_State(module) for module in modules]
    tensors = list({id(t): (t, t.detach().clone()) for state in states for t in state.tensors()}.values())
    rewind_numbers = rewinder(model.parameters())

    def restore() -> None:
        rewind_numbers()
        for state in states:
            state.restore()
        with torch.no_grad():
            for tensor, value in tensors:
                if not torch.equal(tensor, value):  # else it may be needed in a backward to come
                    tensor.copy_(value)

    def begin() -> None:
        restore()
        for module in modules:
            _still(module)

    try:
        yield begin
    finally:
        restore()


def _still(module: Any) -> None:
    """Have a norm over the batch use statistics of its own."""
    if isinstance(module, BATCH_NORM) and module.running_mean is None:
        like = next(iter(module.parameters()), torch.empty(0))
        module.running_mean = torch.zeros(module.num_features, device=like.device)
        module.running_var = torch.ones(module.num_features, device=like.device)
        module.training = False
    elif getattr(module, "track_running_stats", False) and module.training:
        module.training = False


def rewinder(parameters: Iterable[Tensor] = ()) -> Callable[[], None]:
    """What sets random numbers back to where they are now: Python's, NumPy's, PyTorch's here and on these devices."""
    devices = sorted({p.device.index or 0 for p in parameters if p.device.type == "cuda"})
    python, numpy, host = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002
    on_devices = [torch.cuda.get_rng_state(device) for device in devices]

    def rewind() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.random.set_rng_state(host)
        for device, state in zip(devices, on_devices, strict=True):
            torch.cuda.set_rng_state(state, device)

    return rewind


class _State:
    """What a module holds: its attributes, and what is in those that are containers."""

    def __init__(self, module: nn.Module) -> None:
        self.attributes = module.__dict__
        self.values = dict(module.__dict__)
        containers = [v for v in self.values.values() if isinstance(v, (list, dict, set, deque))]
        self.contents = [(c, c.copy()) for c in containers]

    def tensors(self) -> list[Tensor]:
        """Those that are no parameters: buffers, and what a forward keeps for the next one."""
        inside = [v for v in self.values.values() if isinstance(v, Tensor)]
        inside += [v for v in self.values.get("_buffers", {}).values() if v is not None]
        return [t for t in inside if not isinstance(t, nn.Parameter) and not t.is_inference()]

    def restore(self) -> None:
        """Only what has changed: hooks are being iterated over as this is called."""
        _put_back(self.attributes, self.values)
        for container, content in self.contents:
            _put_back(container, content)


def _put_back(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        same = list(container) == list(content) and all(container[k] is v for k, v in content.items())
    elif isinstance(container, set):
        same = container == content
    else:
        same = len(container) == len(content) and all(a is b for a, b in zip(container, content, strict=True))
    if not same:
        container.clear()
        (container.extend if isinstance(container, (list, deque)) else container.update)(content)
