"""What `torch.compile` needs: preparation while tracing, and errors where hooks would be skipped in silence."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from heeler.notices import warn
from heeler.sketch.model_hook import ModelHook

if TYPE_CHECKING:
    from heeler.sketch.recorder import Recorder


F = TypeVar("F", bound=Callable[..., Any])
BatchOf = Callable[[tuple[Any, ...], dict[str, Any]], tuple[Tensor | None, int | None]]


class HooksNotTraced(RuntimeError):
    """The compiled code does not contain the taps."""


_ADVICE = (
    "Heeler's hooks are part of the compiled code, so they must be there before the first compiled call: attach first, "
    "or call torch._dynamo.reset() before attaching, so that everything is compiled again"
)


def is_compiled(model: nn.Module) -> bool:
    """Whether calls of this model run compiled code: `torch.compile(model)` and `model.compile()` alike."""
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


# While it traces, the compiler runs the functions below as plain Python, and gives them nothing but constants.


def _runs_while_tracing(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does; that would import the compiler, which takes a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


_REGISTRY: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


def enrol(recorder: Recorder) -> str:
    """A name by which these functions find the recorder.

    A string: the compiler would turn a number that differs between two recorders into a symbol, no longer a constant.
    """
    key = str(next(_KEYS))
    _REGISTRY[key] = recorder
    return key


def all_recorders() -> list[Recorder]:
    return list(_REGISTRY.values())


@_runs_while_tracing
def note_half(key: str) -> int:
    """A layer computes in half precision."""
    _REGISTRY[key].checks.note_half()
    return 0


@_runs_while_tracing
def prepare(key: str, capacity: int, kind: str, index: int) -> int:
    """The leaves must exist before the graph that uses them."""
    recorder = _REGISTRY[key]
    device = torch.device(kind) if index < 0 else torch.device(kind, index)
    if device != recorder.device:
        recorder.move(device)
    recorder.arm(capacity)
    return 0


@_runs_while_tracing
def look(key: str) -> int:
    """Whether parts add up is looked at in the first backwards of what is being compiled."""
    recorder = _REGISTRY[key]
    recorder.checks.look(recorder.device)
    return 0


@_runs_while_tracing
def meet_root(key: str) -> int:
    """The model's own hooks are being traced: nobody will be told as its forwards begin."""
    _REGISTRY[key].count_backwards()
    return 0


@_runs_while_tracing
def lend_leaf(key: str) -> int:
    """An eager pass has a leaf for the compiled code in it, and so does every one from now on."""
    recorder = _REGISTRY[key]
    recorder.is_compiled = True
    if recorder.current is not None and recorder.current.leaf is None:
        recorder.needs_leaves = True
        recorder.lend_leaf(recorder.current)
    return 0


@_runs_while_tracing
def warn_of_lost_batch(key: str) -> int:
    _REGISTRY[key].warn_of_lost_batch()
    return 0


@_runs_while_tracing
def warn_of_failed_rule(layer: str) -> int:
    warn("%s is not sketched: its rule failed while it was compiled; print(sketcher.coverage) says how", layer)
    return 0


def run_as_it_is(function: Any) -> None:
    """Have dynamo run this function uncompiled where it meets it as a frame of its own.

    It does so with the hooks of a root module of the user's own class: compiled, they would cost more than they do.
    The hooks of torch's own containers are traced together with the forward, and there this makes no difference.
    """
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # older versions compile the hooks
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def run_eagerly() -> AbstractContextManager[Any]:
    """Compiled code runs as it was written meanwhile."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def refuse_if_called(model: nn.Module) -> None:
    """Raise if the model is compiled and compiled code exists that would run without hooks."""
    if not is_compiled(model):
        return
    for code in _entry_codes(model):
        if torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code):
            raise HooksNotTraced(f"a compiled model has been called before the sketcher was attached. {_ADVICE}")


def _entry_codes(model: Any) -> list[Any]:
    """The code objects at which dynamo may have entered this module: its wrapper's, or its own forward."""
    root = getattr(model, "_orig_mod", model)
    entry = model.forward if root is not model else model._compiled_call_impl
    codes = [root.forward.__code__] if hasattr(root.forward, "__code__") else []
    while entry is not None:
        code = getattr(entry, "__code__", None)
        if code is not None:
            codes.append(code)
        entry = getattr(entry, "_torchdynamo_orig_callable", None)
    return codes


class _Before(ModelHook):
    """Outside the compiled code: try the layouts out, stamp the pass or count it, and forget the last one.

    batch_of: (args, kwargs) → the tensor that holds the batch, if one does, and the batch's size, if it can be told.
    """

    def __init__(self, recorder: Recorder, batch_of: BatchOf) -> None:
        self.recorder, self.batch_of = recorder, batch_of

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder = self.recorder
        recorder.current = None
        recorder.announced = False
        if not (recorder.enabled and torch.is_grad_enabled() and recorder.checks.row_test is None):
            return
        found, rows = self.batch_of(args, kwargs)
        if not rows:
            return
        if not recorder.sketching:
            # As an attribute it would be searched for, in Python.
            recorder.count(module._modules["_orig_mod"], rows)
        else:
            if recorder.checks.untested:
                recorder.checks.test_layouts(module._orig_mod, args, kwargs, found, rows)
            recorder.begin_compiled(rows, found)
        recorder.announced = True


class _After(ModelHook):
    """Notices when the taps inside did not run."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        recorder = self.recorder
        recorder.announced = False
        if output is None:  # the forward failed
            return
        wanted = recorder.tapping and not recorder.lost and recorder.checks.row_test is None
        if wanted and torch.is_grad_enabled() and recorder.current is None:
            raise HooksNotTraced(f"a compiled forward ran without its taps. {_ADVICE}")


def watch(wrapper: nn.Module, recorder: Recorder, batch_of: BatchOf) -> list[Any]:
    """Hooks outside the compiled region."""
    recorder.hears_forwards = True
    before = wrapper.register_forward_pre_hook(_Before(recorder, batch_of), with_kwargs=True)
    return [before, wrapper.register_forward_hook(_After(recorder), always_call=True)]


class BackwardCounter:
    """Counts backwards where nobody is told of forwards: see `SketchListener.forward_counted`.

    By a hook on the node that adds to one parameter's `.grad`, which no compiled code holds.
    """

    def __init__(self, recorder: Recorder, parameter: nn.Parameter) -> None:
        self._recorder = weakref.ref(recorder)
        with torch.enable_grad():
            view: Any = parameter.view_as(parameter).grad_fn
        self._node = view.next_functions[0][0]  # autograd holds it weakly
        self._handle = self._node.register_prehook(self)

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        recorder = self._recorder()
        if recorder is not None and recorder.enabled and not recorder.sketching:
            recorder.listener.forward_counted(None)

    def remove(self) -> None:
        self._handle.remove()


def forget_sizes() -> None:
    """Have a variant that is new compiled as the first one was: for the sizes it meets, before any that vary.

    The compiler remembers which sizes have varied and does not try fixed ones again: after an epoch with a smaller last
    batch, the unsketched variant would be slower code than the plain model's. What is compiled already stays. Another
    function in the process, whose sizes vary later, may be compiled once more.
    """
    pgo: Any = sys.modules.get("torch._dynamo.pgo")
    if hasattr(pgo, "reset_code_state"):
        pgo.reset_code_state()
