"""The hooks on the model itself: its forward begins, and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch import compiled
from heeler.sketch.batch import first_tensor
from heeler.sketch.model_hook import ModelHook
from heeler.sketch.passes import Slot
from heeler.sketch.recorder import Recorder
from heeler.sketch.tap import Marker

SizeOf = Callable[[tuple[Any, ...], dict[str, Any]], int]


class BeginHook(ModelHook):
    """Opens the recorder's passes as the model's forward begins.

    size_of: tells a batch's size where the model's first tensor does not.
    """

    def __init__(self, recorder: Recorder, size_of: SizeOf | None) -> None:
        self.recorder, self.size_of = recorder, size_of

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder
        if torch.compiler.is_compiling():
            recorder.running = False
            compiled.meet_root(recorder.key)
            if torch.is_grad_enabled() and recorder.tapping:  # nothing else is read: one guard, two variants
                self._begin_traced(args, kwargs)
            return
        if recorder.checks.row_test is not None:
            return
        recorder.running = False
        if not torch.is_grad_enabled():
            return
        if not recorder.enabled:
            recorder.checks.taint()
            return
        found, batch = self.batch_of(args, kwargs)
        if not batch:
            self._lose(batch)
            return
        recorder.lost = False
        if not recorder.sketching:
            recorder.current = None
            recorder.count(module, batch)
            return
        if found is not None and found.device != recorder.device:
            recorder.move(found.device)
        if recorder.checks.untested:
            recorder.checks.test_layouts(module, args, kwargs, found, batch)
        recorder.open(module, batch, [] if found is None else [found.shape], found)

    def _begin_traced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same where the compiler traces it together with the forward, for the sketched variant."""
        recorder = self.recorder
        found, batch = self.batch_of(args, kwargs)
        if not batch:
            self._lose(batch)
            return
        recorder.lost = False
        device = recorder.device if found is None else found.device
        armed = capacity = int(recorder.capacity)
        while batch > capacity:
            capacity = max(8, 2 * capacity)
        if capacity > armed or device != recorder.device:
            index = -1 if device.index is None else device.index
            compiled.prepare(recorder.key, capacity, device.type, index)
        compiled.look(recorder.key)
        recorder.open_traced(batch, [] if found is None else [found.shape])

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, int | None]:
        """The first tensor among the arguments that can hold the batch, and the batch's size; None where there is none.

        Where the size cannot be told, the forward has no sketch, and the training step goes on.
        """
        found = args[0] if args else None  # nearly always; the search costs as much as all the rest
        if not isinstance(found, Tensor) or found.ndim <= self.recorder.batch_dim:
            found = first_tensor((args, kwargs), self.recorder.batch_dim + 1)
        if self.size_of is None:
            return found, None if found is None else found.shape[self.recorder.batch_dim]
        if torch.compiler.is_compiling():
            return found, self.size_of(args, kwargs)
        try:
            return found, self.size_of(args, kwargs)
        except Exception:
            return found, None

    def _lose(self, batch: int | None) -> None:
        """This forward has no pass: its batch is empty, or (None) cannot be told."""
        self.recorder.current, self.recorder.lost = None, batch is None
        if batch is None:
            compiled.warn_of_lost_batch(self.recorder.key)


class EndHook(ModelHook):
    """Closes the pass as the model's forward ends."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        recorder = self.recorder
        if not recorder.running:  # before anything else is read, as in `LayerHook`
            return None
        slot = recorder.current
        if slot is None or recorder.checks.row_test is not None:
            return None
        recorder.running = False
        if slot.replayed:
            return _mark(output, recorder, slot)
        if torch.compiler.is_compiling():
            recorder.close_traced(slot)
        return None


def _mark(output: Any, recorder: Recorder, slot: Slot) -> Any:
    """Put a Marker on every output that carries gradients."""

    def announce() -> None:
        recorder.announce(slot)

    if isinstance(output, Tensor):
        return Marker.apply(announce, output) if output.requires_grad else output
    if isinstance(output, dict):
        for name in list(output):
            output[name] = _mark(output[name], recorder, slot)
        return output
    if isinstance(output, (tuple, list)):
        items = [_mark(item, recorder, slot) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


for _hook in (BeginHook, EndHook):
    compiled.run_as_it_is(_hook.__call__)
