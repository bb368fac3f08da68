"""Gradients as the optimizer steps by: Adam moves a weight by its gradient over √v̂ + ε, so that is what is balanced.

With w = (√v̂ + ε)², v̂ corrected for its bias as the optimizer does it, an entry's gradient is multiplied by w^−½. For a
matrix w is factored as in Adafactor (Shazeer & Stern 2018), from its row and column means,

    w_ij ≈ ρ_i κ_j,     ρ_i = mean_j w_ij / √m,     κ_j = mean_i w_ij / √m,     m = mean_ij w_ij,

the best such factors by the Kullback-Leibler divergence. Then the scaled gradient is D_ρ^−½ G D_κ^−½, and its sketch
RᵀD_ρ^−½ G D_κ^−½ C is one with other projections: the two thin products of a tap stay what they are. Elementwise
parameters, and exact gradients, are scaled entry by entry.

All multipliers are then brought to one size by a common factor, at which the mean square of the scaled gradient is that
of the gradient itself. So parameters without a second moment, which are not scaled, keep their share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

POWER = 0.5
"""The multiplier is w^−POWER: ½ is what Adam steps by."""
FLOOR = 1e-3
"""No w counts as less than this share of its parameter's mean. Adam adds 1 − β₂ (0.001) of a gradient's own square to v
before it divides by it, so its steps are bounded even where v was zero; multipliers from before the step are not."""

MOMENTS = ("exp_avg_sq", "square_avg", "sum")
"""Where optimizers keep v: Adam and its kin, RMSprop, Adagrad."""

Factors = dict[str, Tensor]
"""Of one parameter: "rows" (r,) and "cols" (c,) of a matrix, or "entries" (n,)."""
Scale = dict[str, Factors]
"""By parameter name; a parameter that is not in it is not scaled."""


class NotWhole(Exception):
    """The optimizer's state on this rank is of a part of the parameter, or in another shape."""


class Wanted(NamedTuple):
    """A parameter whose multipliers are wanted; matrix: (r, c), or None for one per entry."""

    name: str
    parameter: Tensor
    matrix: tuple[int, int] | None


def fitting(optimizer: Any) -> Any:
    """The optimizer itself, below a framework's wrappers; raises if its state is not the same on all ranks."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not (hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")):
        raise TypeError(f"optimizer must be a torch optimizer, not a {type(optimizer).__name__}")
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        raise ValueError(
            "a ZeroRedundancyOptimizer has on each rank the state of some parameters only, so the ranks' sketches "
            "could not be compared: leave optimizer= away (sketches are then of plain gradients)"
        )
    return optimizer


def has_moments(optimizer: Any) -> bool:
    """Whether it keeps second moments of anything."""
    return any(key in state for state in optimizer.state.values() for key in MOMENTS)


def squared_denominator(optimizer: Any, parameter: Tensor) -> Tensor | None:
    """w = (√v̂ + ε)², of the parameter's shape, in single precision; None where there is no second moment (yet).

    Of Adam, AdamW, NAdam, RAdam and others that keep `exp_avg_sq`, of RMSprop and of Adagrad.
    """
    state = optimizer.state.get(parameter)
    group = next((g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), None)
    if not state or group is None or float(state.get("step", 1)) < 1:
        return None
    v, remembered = None, 0.0
    if "exp_avg_sq" in state:
        v = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        remembered = float(group["betas"][1]) ** float(state.get("step", math.inf))
    elif "square_avg" in state:
        v = state["square_avg"]
        if group.get("centered"):
            v = (v - state["grad_avg"].square()).clamp_min(0.0)
    elif "sum" in state:
        v = state["sum"]
    if not isinstance(v, Tensor):
        return None
    if hasattr(v, "to_local") or v.shape != parameter.shape:
        raise NotWhole
    v = v.detach().float() / (1.0 - remembered)
    mean = v.mean()
    if not (torch.isfinite(mean) and mean > 0):  # nothing has come here, or it has diverged
        return None
    w = (v.sqrt() + float(group.get("eps", 0.0))).square()
    return w.clamp_min(FLOOR * float(w.mean()))


def factor(w: Tensor) -> tuple[Tensor, Tensor]:
    """ρ (r,) and κ (c,) of a positive w (r, c), w ≈ ρκᵀ with the right row and column sums; exact where w is such."""
    root = w.mean().sqrt()
    return w.mean(1) / root, w.mean(0) / root


def scale_of(optimizer: Any, wanted: Iterable[Wanted]) -> Scale:
    """The multipliers of these parameters as the optimizer stands now; {} where it has no second moments of them."""
    scale: Scale = {}
    plain = scaled = 0.0
    for name, parameter, matrix in wanted:
        w = squared_denominator(optimizer, parameter)
        if w is None:
            continue
        if matrix is None:
            entries = w.flatten() ** -POWER
            scaled += float((w.flatten() * entries.square()).sum(dtype=torch.float64))
            found = {"entries": entries}
        else:
            w = w.reshape(matrix)
            rows, cols = (side**-POWER for side in factor(w))
            scaled += float((rows.square() @ w @ cols.square()).double())
            found = {"rows": rows, "cols": cols}
        plain += float(w.sum(dtype=torch.float64))
        scale[name] = {side: each.cpu() for side, each in found.items()}
    common = math.sqrt(plain / scaled) if scale else 1.0
    return {name: {s: f * common ** (1 / len(found)) for s, f in found.items()} for name, found in scale.items()}


def of_bias(entries: Tensor, grad_side: Tensor) -> Tensor:
    """(): a bias's multiplier beside those (n,) of the side of its weight that it shares, which it cannot leave.

    β such that Σ_i w_i (β d_i)² is what it would be with multipliers of its own, e_i = w_i^−½: β = 1 / rms(d / e).
    """
    return (grad_side / entries).square().mean().rsqrt()


def check(scale: Any, wanted: Iterable[Wanted]) -> Scale:
    """What a state holds as a `Scale`, or a ValueError where it is not one of these parameters."""
    sizes = {
        name: {"entries": parameter.numel()} if matrix is None else {"rows": matrix[0], "cols": matrix[1]}
        for name, parameter, matrix in wanted
    }
    found: Scale = {}
    for name, factors in scale.items():
        found[name] = {side: torch.as_tensor(each) for side, each in factors.items()}
        shapes = {side: tuple(each.shape) for side, each in found[name].items()}
        if name not in sizes or shapes != {side: (size,) for side, size in sizes[name].items()}:
            raise ValueError(f"the state's scale of {name} is {shapes}, which fits no sketched parameter")
        if not all(each.dtype == torch.float32 and bool((each > 0).all()) for each in found[name].values()):
            raise ValueError(f"the state's scale of {name} is damaged")
    return found
