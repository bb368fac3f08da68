"""The test of whose rows they are, for compiled code: no mode sees its operations, so the model itself runs again.

Only where that has no effects: see `heeler.sketch.effects`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch.preserve_state import preserve_state
from heeler.sketch.row_ownership import Moved, RowOwnershipTest


def rerun(test: RowOwnershipTest, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """Run the test on the batch that is about to be trained on; the error where the model does not run twice on it.

    Without gradients if the model does without them.
    """
    for needs_grad in (False, True):
        try:
            with preserve_state(model) as begin, torch.set_grad_enabled(needs_grad):

                def run(moved: Moved) -> None:
                    begin()
                    model(*with_moved(args, moved), **with_moved(kwargs, moved))

                test.run(run)
            return None
        except Exception as error:
            failure = error
    return failure


def with_moved(tree: Any, moved: Moved) -> Any:
    """The arguments with some tensors replaced."""
    if isinstance(tree, Tensor):
        return moved[id(tree)][1] if id(tree) in moved else tree
    if isinstance(tree, Mapping):
        items = {key: with_moved(value, moved) for key, value in tree.items()}
        return items if type(tree) is dict else _rebuilt(tree, items)
    if isinstance(tree, (tuple, list)):
        parts = [with_moved(value, moved) for value in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: with_moved(getattr(tree, name), moved) for name in fields})
    return tree


def _rebuilt(tree: Any, items: dict[str, Any]) -> Any:
    """A mapping of another class, such as transformers' BatchEncoding."""
    try:
        copy = type(tree)(tree)
        copy.update(items)
        return copy
    except Exception:
        return items
