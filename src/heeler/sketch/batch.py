"""Where the examples are: from the tensors of a call to (B, tokens, features)."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class NoBatchDimension(ValueError):
    """This call's tensors cannot be split into the batch's examples."""


def first_tensor(args: Any, at_least: int) -> Tensor | None:
    """The first tensor with `at_least` dimensions in nested tuples, lists and dicts."""
    if isinstance(args, Tensor):
        return args if args.ndim >= at_least else None
    if isinstance(args, dict):
        args = tuple(args.values())
    if isinstance(args, (tuple, list)):
        for item in args:
            found = first_tensor(item, at_least)
            if found is not None:
                return found
    return None


def by_example(x: Tensor, batch: int, batch_dim: int) -> Tensor:
    """(..., n) with the batch in `batch_dim` → (B, T, n), all other leading dimensions being tokens T.

    (B, n), one token an example, stays as it is: views cost more than arithmetic in small models.

    A tensor whose leading dimensions were flattened on the way ((B·T, n), or (T·B, n) where batch_dim is 1) is taken
    apart again.
    """
    if x.ndim == 2 and x.shape[0] == batch:
        return x
    n = x.shape[-1]
    if batch_dim == 0 or x.ndim == 1:
        if x.ndim == 1 or x.shape[0] % batch:
            raise NoBatchDimension(_explain(x, batch, batch_dim))
        return x.reshape(batch, -1, n)
    if x.ndim > batch_dim + 1 and x.shape[batch_dim] == batch:
        return x.movedim(batch_dim, 0).reshape(batch, -1, n)
    if batch_dim == 1 and x.shape[0] % batch == 0:
        return x.reshape(-1, batch, n).transpose(0, 1)
    raise NoBatchDimension(_explain(x, batch, batch_dim))


def _explain(x: Tensor, batch: int, batch_dim: int) -> str:
    return (
        f"a layer was called with shape {tuple(x.shape)}, which cannot be split into the {batch} examples of this "
        f"batch (batch_dim={batch_dim}); if the batch lies in another dimension pass batch_dim=..., if it is not a "
        f"dimension of the model's first tensor argument pass batch_dim=lambda args, kwargs: batch_size, and leave "
        f"out layers that mix examples with layers=lambda name, module: ..."
    )
