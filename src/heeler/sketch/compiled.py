"""What `torch.compile` needs: preparation while tracing, and errors where hooks would be skipped in silence."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from heeler.torch_private import runs_while_tracing

if TYPE_CHECKING:
    from heeler.sketch.recorder import Recorder


class HooksNotTraced(RuntimeError):
    """The compiled code does not contain the taps."""


ADVICE = (
    "Heeler's hooks are part of the compiled code, so they must be there before the first compiled call: attach first, "
    "or call torch._dynamo.reset() before attaching, so that everything is compiled again"
)

_REGISTRY: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


def enrol(recorder: Recorder) -> str:
    """A name by which traced code finds the recorder.

    A string: the compiler would turn a number that differs between two recorders into a symbol, no longer a constant.
    """
    key = str(next(_KEYS))
    _REGISTRY[key] = recorder
    return key


def recorders_on(model: nn.Module) -> list[Recorder]:
    """Those whose hooks sit on a module of this model."""
    modules = set(model.modules())
    alive = [reference() for reference in _REGISTRY.valuerefs()]  # a copy: other threads may add to it
    found = [recorder for recorder in alive if recorder is not None and not recorder.closed]
    return [r for r in found if any(layer.module in modules for layer in r.layers)]


@runs_while_tracing
def call(key: str, method: str, *constants: Any) -> int:
    """Call a method of the recorder as plain Python while the compiler traces, with nothing but constants."""
    getattr(_REGISTRY[key], method)(*constants)
    return 0
