"""How good an order is: norms of its centred prefix sums, the quantity that the convergence theorems bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from heeler.herding.problem import Problem, make_problem


class Bound(NamedTuple):
    """Prefix norms of an order, taken at batch boundaries and at the end."""

    inf: float
    """max_t ‖Σ_{τ≤t} z_τ‖_∞, as in the published simulation."""
    two: float
    """max_t ‖Σ_{τ≤t} z_τ‖₂, what the theorems bound."""
    rms: float
    """Root mean square over t of ‖Σ_{τ≤t} z_τ‖₂, what `solve` makes small."""


def herding_bound(
    vectors: Any, order: Any, *, batch_size: int = 1, subset: bool = False, screen: bool = False
) -> Bound:
    """Bound of one order: vectors (N, K) centred on the mean of those in `order` (N,); arguments as in `solve`."""
    return _bound(make_problem(vectors, order, batch_size=batch_size, subset=subset, screen=screen))


def parallel_herding_bound(
    vectors: Any,
    orders: Any,
    *,
    batch_size: int = 1,
    shard_sizes: Sequence[int] | None = None,
    subset: bool = False,
    screen: bool = False,
) -> Bound:
    """Bound of several workers' common prefix: max_t ‖Σ_{τ≤t} Σ_j z_{j,τ}‖, each shard centred on its own mean.

    vectors (n, m, K) with orders (n, m); or vectors (N, K), orders (N,) and `shard_sizes`, the shards side by side.
    Other arguments as in `solve`.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "subset": subset, "screen": screen}
    return _bound(make_problem(vectors, orders, cube=shard_sizes is None, shard_sizes=shard_sizes, **options))


def _bound(problem: Problem) -> Bound:
    inf, two, total, count = problem.prefix_norms(problem.order)
    return Bound(inf, math.sqrt(two), math.sqrt(total / count))
