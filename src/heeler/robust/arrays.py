"""What every rule asks of its input: (n, d) vectors of n workers, NumPy or torch, of which up to f may be anything.

A vector with a NaN or an infinity in it is left out and counts as one of the f: what remains are n − k vectors with at
most f − k bad ones.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vectors = TypeVar("Vectors", NDArray[Any], Tensor)

NEEDS = {
    "krum": ("n > 2f + 2", lambda n, f: n > 2 * f + 2),
    "multi-krum": ("n > 2f + 2", lambda n, f: n > 2 * f + 2),
    "median": ("n > 2f", lambda n, f: n > 2 * f),
    "trimmed-mean": ("n > 2f", lambda n, f: n > 2 * f),
    "geometric-median": ("n > 2f", lambda n, f: n > 2 * f),
    "centered-clipping": ("n > 2f", lambda n, f: n > 2 * f),
    "nearest-neighbor-mixing": ("n > 2f", lambda n, f: n > 2 * f),
}
"""Of every rule: what it needs of n workers with f bad ones among them."""


def check_f(rule: str, n: int, f: int) -> None:
    """ValueError if the rule cannot bear f bad workers of n; it names the condition."""
    if isinstance(f, bool) or not isinstance(f, (int, np.integer)) or f < 0:
        raise ValueError(f"f is a number of workers, 0 or more, not {f!r}")
    condition, holds = NEEDS[rule]
    if not holds(n, f):
        most = max((g for g in range(n) if holds(n, g)), default=None)
        bears = "none at all" if most is None else f"at most f = {most}"
        raise ValueError(f"{rule} needs {condition}, but n = {n} and f = {f}: so many workers bear {bears}")


def as_tensor(v: Vectors) -> Tensor:
    """(n, d) as a tensor of floats, without a copy where that can be."""
    tensor = torch.from_numpy(np.ascontiguousarray(v)) if isinstance(v, np.ndarray) else v
    if not isinstance(tensor, Tensor):
        raise TypeError(f"vectors are an (n, d) NumPy array or torch tensor, not a {type(v).__name__}")
    if tensor.ndim != 2 or 0 in tensor.shape:
        raise ValueError(f"vectors have the shape (n, d), one row per worker, not {tuple(tensor.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"vectors are of floats, not of {tensor.dtype}")
    return tensor.detach()


@overload
def like(result: Tensor, v: NDArray[Any]) -> NDArray[Any]: ...
@overload
def like(result: Tensor, v: Tensor) -> Tensor: ...
def like(result: Tensor, v: Any) -> Any:
    """The result in the kind and dtype of the input."""
    if isinstance(v, np.ndarray):
        return result.cpu().numpy().astype(v.dtype, copy=False)
    return result.to(v.dtype)


def finite_rows(v: Tensor) -> Tensor:
    """(n,) which rows have neither NaN nor infinity."""
    return torch.isfinite(v).all(dim=1)


def screened(rule: str, v: Tensor, f: int | None) -> tuple[Tensor, int]:
    """The finite rows, in double precision, and how many of them may still be bad.

    f = None: the rule has no f. It then bears fewer than half of the rows to be left out.
    """
    n = len(v)
    if f is not None:
        check_f(rule, n, f)
    finite = finite_rows(v)
    lost = n - int(finite.sum())
    most = f if f is not None else (n - 1) // 2
    if lost > most:
        raise ValueError(f"{lost} of {n} vectors have a NaN or an infinity; {rule} bears {most} of them here")
    return v[finite].double(), most - lost


def squared_distances(v: Tensor) -> Tensor:
    """(n, n) ‖v_i − v_j‖², of differences: no digits are lost where vectors are long and close together."""
    rows = [(v - row).square().sum(dim=1) for row in v]
    return torch.stack(rows)
