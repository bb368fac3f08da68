"""The hooks on the model itself: its forward begins, and ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch import compiled
from heeler.sketch.batch import first_tensor
from heeler.sketch.model_hook import ModelHook
from heeler.sketch.recorder import Recorder
from heeler.torch_private import run_as_it_is, transform

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
            recorder.leave()
            compiled.meet_root(recorder.key)
            if torch.is_grad_enabled() and recorder.tapping:  # nothing else is read: one guard, two variants
                found, batch = self.batch_of(args, kwargs)
                if batch:
                    recorder.tell()
                    recorder.compiled.begin(module, batch, found)
                else:
                    recorder.lose(batch)
            return
        if recorder.checks.row_test is not None or transform() is not None or not torch.is_grad_enabled():
            return
        if not recorder.enabled:
            recorder.eager.ignore()
            return
        found, batch = self.batch_of(args, kwargs)
        if not batch:
            recorder.leave()
            recorder.lose(batch)
            return
        recorder.tell()
        if not recorder.sketching:
            recorder.hold(None)
            recorder.count(module, batch)
            return
        if found is not None and found.device != recorder.device:
            recorder.move(found.device)
        if recorder.checks.untested:
            recorder.checks.test_rows(module, args, kwargs, found, batch)
        recorder.eager.begin(module, batch, found)

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


class EndHook(ModelHook):
    """Closes the pass as the model's forward ends."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        recorder = self.recorder
        if torch.compiler.is_compiling():
            return recorder.compiled.end(output) if recorder.running else None  # nothing else is read, as above
        if recorder.current is None or recorder.checks.row_test is not None:
            return None
        return recorder.eager.end(output)


for _hook in (BeginHook, EndHook):
    run_as_it_is(_hook.__call__)
