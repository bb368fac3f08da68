"""What all hooks on a model share: a copy of the model is not attached, and costs what it cost before."""

from __future__ import annotations

from typing import Any


def inert(*args: Any, **kwargs: Any) -> None:
    """What stands in a copied model where a hook was."""


class ModelHook:
    """A hook that `copy.deepcopy(model)`, `AveragedModel(model)` and `torch.save(model)` leave behind."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return inert

    def __reduce__(self) -> Any:
        # A built-in that takes anything and returns None: a pickled model must load where Heeler is not installed.
        return getattr, ("", "__init__")
