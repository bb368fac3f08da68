"""What `torch.compile` needs: preparation while tracing, and errors where hooks would be skipped in silence."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heeler.notices import warn
from heeler.sketch.model_hook import ModelHook
from heeler.torch_private import runs_while_tracing, transform, unwrapped

if TYPE_CHECKING:
    from heeler.sketch.recorder import Recorder

BatchOf = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor | None, int | None]]


class HooksNotTraced(RuntimeError):
    """The compiled code does not contain the taps."""


ADVICE = (
    "Heeler's hooks are part of the compiled code, so they must be there before the first compiled call: attach first, "
    "or call torch._dynamo.reset() before attaching, so that everything is compiled again"
)

_REGISTRY: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


def enrol(recorder: Recorder) -> str:
    """A name by which the functions below find the recorder.

    A string: the compiler would turn a number that differs between two recorders into a symbol, no longer a constant.
    """
    key = str(next(_KEYS))
    _REGISTRY[key] = recorder
    return key


def recorders_on(model: nn.Module) -> list[Recorder]:
    """Those whose hooks sit on a module of this model."""
    modules = set(model.modules())
    found = [recorder for recorder in _REGISTRY.values() if not recorder.closed]
    return [r for r in found if any(layer.module in modules for layer in r.layers)]


# While it traces, the compiler runs the functions below as plain Python, and gives them nothing but constants.


@runs_while_tracing
def note_half(key: str) -> int:
    """A layer computes in half precision."""
    _REGISTRY[key].checks.note_half()
    return 0


@runs_while_tracing
def prepare(key: str, capacity: int, kind: str, index: int) -> int:
    """The leaves must exist before the graph that uses them."""
    recorder = _REGISTRY[key]
    device = torch.device(kind) if index < 0 else torch.device(kind, index)
    if device != recorder.device:
        recorder.move(device)
    recorder.compiled.arm(capacity)
    return 0


@runs_while_tracing
def look(key: str) -> int:
    """Whether parts add up is looked at in the first backwards of what is being compiled."""
    recorder = _REGISTRY[key]
    recorder.checks.look(recorder.device)
    return 0


@runs_while_tracing
def meet_root(key: str) -> int:
    """The model's own hooks are being traced: nobody will be told as its forwards begin."""
    recorder = _REGISTRY[key]
    recorder.meet_compiled()
    recorder.compiled.count_backwards()
    return 0


@runs_while_tracing
def lend_leaf(key: str) -> int:
    """An eager pass has a leaf for the compiled code in it, and so does every one from now on."""
    recorder = _REGISTRY[key]
    recorder.meet_compiled()
    recorder.eager.lend_leaf()
    return 0


@runs_while_tracing
def warn_of_lost_batch(key: str) -> int:
    _REGISTRY[key].warn_of_lost_batch()
    return 0


@runs_while_tracing
def warn_of_failed_rule(layer: str) -> int:
    warn("%s is not sketched: its rule failed while it was compiled; print(sketcher.coverage) says how", layer)
    return 0


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
        if not (recorder.enabled and torch.is_grad_enabled() and recorder.checks.row_test is None):
            return
        found, rows = self.batch_of(args, kwargs)
        if not rows:
            return
        if not recorder.sketching:
            recorder.count(unwrapped(module), rows)
        elif recorder.checks.untested:
            recorder.checks.test_rows(unwrapped(module), args, kwargs, found, rows)
        recorder.compiled.announce(rows, found)


class _After(ModelHook):
    """Notices when the taps inside did not run."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        recorder = self.recorder
        if transform() is not None:
            return
        recorder.compiled.hush()
        if output is None:  # the forward failed
            return
        wanted = recorder.tapping and not recorder.lost and recorder.checks.row_test is None
        if wanted and torch.is_grad_enabled() and recorder.current is None:
            raise HooksNotTraced(f"a compiled forward ran without its taps. {ADVICE}")


def watch(wrapper: nn.Module, recorder: Recorder, batch_of: BatchOf) -> list[Any]:
    """Hooks outside the compiled region."""
    recorder.compiled.listen()
    before = wrapper.register_forward_pre_hook(_Before(recorder, batch_of), with_kwargs=True)
    return [before, wrapper.register_forward_hook(_After(recorder), always_call=True)]
