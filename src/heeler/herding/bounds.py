"""How good an order is: norms of its centred prefix sums, the quantity that the convergence theorems bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from heeler.herding.problem import Problem, flat_problem, worker_problem


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
    """Bound of one order: vectors (N, K) centred on their mean, order (N,) row numbers.

    Args:
        batch_size: prefixes are judged after every `batch_size` examples, and at the end.
        subset: `order` may list only some rows; the mean is theirs.
        screen: count non-finite rows as zero, with a warning, instead of refusing them.
    """
    return bound(flat_problem(vectors, order, batch_size=batch_size, subset=subset, screen=screen))


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
    `batch_size` counts examples of one worker. Other arguments as in `herding_bound`.
    """
    options: dict[str, Any] = {"batch_size": batch_size, "subset": subset, "screen": screen}
    return bound(worker_problem(vectors, orders, shard_sizes=shard_sizes, **options))


def bound(problem: Problem) -> Bound:
    """Bound of a checked problem's order."""
    inf, two, total, count = problem.prefix_norms(problem.order)
    return Bound(inf, math.sqrt(two), math.sqrt(total / count))
