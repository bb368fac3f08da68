"""The hooks on the model itself, and on the wrapper of a compiled one: its forward begins, and ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from heeler.sketch import compiled
from heeler.sketch.examples import first_tensor
from heeler.sketch.recorder import Recorder
from heeler.torch_private import run_as_it_is, transform, unwrapped

SizeOf = Callable[[tuple[Any, ...], dict[str, Any]], int]
BatchOf = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor | None, int | None]]


class ModelHook:
    """A hook that `copy.deepcopy(model)`, `AveragedModel(model)` and `torch.save(model)` leave behind.

    In its place they have a function that takes anything and returns None. It is one of Python's own, since a saved
    model must load where Heeler is not installed, and one that `torch.compile` can trace.
    """

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


class BeginHook(ModelHook):
    """Opens the recorder's passes as the model's forward begins.

    size_of: tells a batch's size where the model's first tensor does not.
    """

    def __init__(self, recorder: Recorder, size_of: SizeOf | None) -> None:
        self.recorder, self.size_of = recorder, size_of

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder
        if is_compiling():
            recorder.leave()
            compiled.call(recorder.key, "meet_root")
            if is_grad_enabled() and recorder.tapping:  # nothing else is read: one guard, two variants
                found, batch = self.batch_of(args, kwargs)
                if batch:
                    recorder.compiled.begin(module, batch, found)
                else:
                    recorder.lose(batch)
            return
        if recorder.rows.rerun_test is not None or transform() is not None or not is_grad_enabled():
            return
        if not recorder.enabled:
            recorder.eager.ignore()
            return
        found, batch = self.batch_of(args, kwargs)
        if not batch:
            recorder.lose(batch)
            return
        if not recorder.sketching:
            recorder.hold(None)
            recorder.count(module, batch)
            return
        if found is not None and found.device != recorder.device:
            recorder.move(found.device)
        is_recorded = recorder.rows.untested and not recorder.compiled.announced
        if is_recorded:
            recorder.rows.prepare(module, args, kwargs, found, batch)
        recorder.eager.begin(module, batch, found)
        if is_recorded:
            recorder.rows.start()

    def batch_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, int | None]:
        """The first tensor among the arguments that can hold the batch, and the batch's size; None where there is none.

        Where the size cannot be told, the forward has no sketch, and the training step goes on.
        """
        found = args[0] if args else None  # nearly always; the search costs as much as all the rest
        if not isinstance(found, Tensor) or found.ndim <= self.recorder.batch_dim:
            found = first_tensor((args, kwargs), self.recorder.batch_dim + 1)
        if self.size_of is None:
            return found, None if found is None else found.shape[self.recorder.batch_dim]
        if is_compiling():
            return found, self.size_of(args, kwargs)
        try:
            return found, self.size_of(args, kwargs)
        except Exception:
            return found, None


class EndHook(ModelHook):
    """Closes the pass as the model's forward ends."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder = self.recorder
        if is_compiling():
            if recorder.running:  # nothing else is read, as above
                recorder.compiled.end(output)
        elif (recorder.current is not None or recorder.rows.recording is not None) and recorder.rows.rerun_test is None:
            recorder.eager.end(output)


class OutputHook(ModelHook):
    """Has norms of gradients at the model's output noted; on the module inside DDP, whose own output is a copy."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_compiling():
            slot = self.recorder.current
            self.recorder.note_norms(output, None if slot is None or slot.ignored else slot.owner.stamp)


class _Before(ModelHook):
    """Outside the compiled code: test whose rows they are, stamp the pass or count it, and forget the last one.

    batch_of: (args, kwargs) → the tensor that holds the batch, if one does, and the batch's size, if it can be told.
    """

    def __init__(self, recorder: Recorder, batch_of: BatchOf) -> None:
        self.recorder, self.batch_of = recorder, batch_of

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder
        if transform() is not None:
            return
        recorder.hold(None)
        recorder.compiled.hush()
        if not (recorder.enabled and is_grad_enabled() and recorder.rows.rerun_test is None):
            return
        found, rows = self.batch_of(args, kwargs)
        if not rows:
            return
        if not recorder.sketching:
            recorder.count(unwrapped(module), rows)
        elif recorder.rows.untested:
            recorder.rows.test_compiled(unwrapped(module), args, kwargs, found, rows)
        recorder.compiled.announce(rows, found)


class _After(ModelHook):
    """Notices when the taps inside did not run."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        recorder = self.recorder
        if transform() is not None:
            return
        recorder.note_norms(output, recorder.compiled.newest_stamp)
        recorder.compiled.hush()
        if output is None:  # the forward failed
            return
        wanted = recorder.tapping and not recorder.lost and recorder.rows.rerun_test is None
        if wanted and is_grad_enabled() and recorder.current is None:
            raise compiled.HooksNotTraced(f"a compiled forward ran without its taps. {compiled.ADVICE}")


def watch(wrapper: nn.Module, recorder: Recorder, batch_of: BatchOf) -> list[Any]:
    """Hooks outside the compiled region."""
    recorder.compiled.listen()
    before = wrapper.register_forward_pre_hook(_Before(recorder, batch_of), with_kwargs=True)
    return [before, wrapper.register_forward_hook(_After(recorder), always_call=True)]


for _hook in (BeginHook, EndHook, OutputHook):
    run_as_it_is(_hook.__call__)
