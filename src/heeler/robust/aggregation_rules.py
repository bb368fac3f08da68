"""Robust rules: from (n, d) vectors of n workers, f of which may be anything, to one vector (d,) near the good ones.

All take NumPy arrays or torch tensors on any device, and return the same kind. Distances are in double precision. A
vector with a NaN or an infinity is left out and counts as one of the f.
"""

from __future__ import annotations

from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.robust.gram_weights import TooManyLost, best_of, check_f, krum_scores

Vectors = TypeVar("Vectors", NDArray[Any], Tensor)

NETWORK = 64
"""Up to so many rows a network of minima and maxima sorts faster than `torch.sort`: 9 rows of 10⁶ numbers in all took
6 ms against 18 on one core, 64 rows took equally long."""


def krum(v: Vectors, f: int) -> Vectors:
    """(d,) the vector with the least sum of squared distances to its n − f − 2 nearest others (Blanchard et al. 2017).

    Needs n > 2f + 2.
    """
    rows, left = screened("krum", as_tensor(v), f)
    scores = krum_scores(squared_distances(rows).cpu().numpy(), left)
    return like(rows[int(best_of(scores, left, 1)[0])], v)


def multi_krum(v: Vectors, f: int, m: int | None = None) -> Vectors:
    """(d,) the mean of the m vectors with the least Krum scores; m is n − f unless given. Needs n > 2f + 2."""
    rows, left = screened("multi-krum", as_tensor(v), f)
    best = best_of(krum_scores(squared_distances(rows).cpu().numpy(), left), left, m)
    return like(rows[torch.from_numpy(best).to(rows.device)].mean(dim=0), v)


def median(v: Vectors) -> Vectors:
    """(d,) the median of every coordinate; with an even n the mean of the two in the middle, unlike `torch.median`."""
    rows, _ = screened("median", as_tensor(v), None)
    return like(median_of(rows), v)


def trimmed_mean(v: Vectors, f: int) -> Vectors:
    """(d,) the mean of every coordinate without its f least and f greatest values (Yin et al. 2018). Needs n > 2f."""
    rows, left = screened("trimmed-mean", as_tensor(v), f)
    return like(trimmed_mean_of(rows, left), v)


def geometric_median(v: Vectors, nu: float = 1e-6, iterations: int = 32) -> Vectors:
    """(d,) the point with the least sum of distances, by smoothed Weiszfeld steps from the mean (Pillutla et al. 2019).

    z ← Σ w_i x_i / Σ w_i with w_i = 1 / max(ν, ‖z − x_i‖). An outlier a thousand times as far needs about eight steps.
    """
    rows, _ = screened("geometric-median", as_tensor(v), None)
    z = rows.mean(dim=0)
    for _ in range(iterations):
        w = 1.0 / (rows - z).norm(dim=1).clamp(min=nu)
        z = (w / w.sum()) @ rows
    return like(z, v)


def centered_clipping(v: Vectors, center: Vectors, tau: float, iterations: int = 1) -> Vectors:
    """(d,) c ← c + (1/n) Σ (x_i − c) min(1, τ/‖x_i − c‖), from the given centre (Karimireddy et al. 2021).

    The centre is the last step's result. τ has the scale of a worker's distance from it.
    """
    if not tau > 0:
        raise ValueError(f"tau is a length above 0, not {tau!r}")
    rows, _ = screened("centered-clipping", as_tensor(v), None)
    c = as_tensor(center[None])[0].to(rows)
    if not torch.isfinite(c).all():
        raise ValueError("the center has a NaN or an infinity: start from zeros")
    for _ in range(iterations):
        away = rows - c
        c = c + (away * (tau / away.norm(dim=1, keepdim=True)).clamp(max=1.0)).mean(dim=0)
    return like(c, v)


def median_of(rows: Tensor) -> Tensor:
    """(d,) of (n, d) finite numbers."""
    n = len(rows)
    ordered = sorted_rows(rows)
    return ordered[n // 2].clone() if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def trimmed_mean_of(rows: Tensor, f: int) -> Tensor:
    """(d,) of (n, d) finite numbers."""
    return torch.stack(sorted_rows(rows)[f : len(rows) - f]).mean(dim=0)


def sorted_rows(v: Tensor) -> list[Tensor]:
    """n rows (d,) with every coordinate sorted, least first: odd-even transposition, n rounds of minima and maxima."""
    if len(v) > NETWORK:
        return list(v.sort(dim=0).values)
    rows = list(v)
    for turn in range(len(rows)):
        for i in range(turn % 2, len(rows) - 1, 2):
            rows[i], rows[i + 1] = torch.minimum(rows[i], rows[i + 1]), torch.maximum(rows[i], rows[i + 1])
    return rows


# Input and output


def as_tensor(v: Vectors) -> Tensor:
    """(n, d) as a tensor of floats, without a copy where possible."""
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


def screened(rule: str, v: Tensor, f: int | None) -> tuple[Tensor, int]:
    """The finite rows, in double precision, and how many of them may still be bad.

    f = None: the rule has no f, and fewer than half of the rows may be left out.
    """
    n = len(v)
    if f is not None:
        check_f(rule, n, f)
    most = f if f is not None else (n - 1) // 2
    finite = torch.isfinite(v).all(dim=1)
    lost = n - int(finite.sum())
    if lost > most:
        raise TooManyLost(lost, n, most)
    return v[finite].double(), most - lost


def squared_distances(v: Tensor) -> Tensor:
    """(n, n) ‖v_i − v_j‖², from differences: no digits are lost where vectors are long and close together."""
    return torch.stack([(v - row).square().sum(dim=1) for row in v])
