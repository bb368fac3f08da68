"""What all hooks on a model share: a copy of the model is not attached, and costs what it cost before."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class ModelHook:
    """A hook that `copy.deepcopy(model)`, `AveragedModel(model)` and `torch.save(model)` leave behind.

    In its place they have a function that takes anything and returns None. It is one of Python's own, since a saved
    model must load where Heeler is not installed, and one that `torch.compile` can trace.
    """

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")
