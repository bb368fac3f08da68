"""How good an order is: norms of its centred prefix sums, the quantity that the convergence theorems bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from heeler.herding.sweep_problem import make_problem


class Bound(NamedTuple):
    """Prefix norms of an order, taken at batch boundaries and at the end."""

    inf: float
    """max_t ‖Σ_{τ≤t} z_τ‖_∞, as in the published simulation."""
    two: float
    """max_t ‖Σ_{τ≤t} z_τ‖₂, what the theorems bound."""
    rms: float
    """Root mean square over t of ‖Σ_{τ≤t} z_τ‖₂, what `solve` makes small."""


def herding_bound(
    vectors: Any, order: Any, *, batch_size: int = 1, shard_sizes: Sequence[int] | None = None, subset: bool = False
) -> Bound:
    """Bound of an order (N,) of vectors (N, K), centred on the mean of those in `order`; arguments as in `solve`.

    With `shard_sizes`, of the workers' common prefix: max_t ‖Σ_{τ≤t} Σ_j z_{j,τ}‖, each shard centred on its own mean.
    """
    problem = make_problem(vectors, order, batch_size=batch_size, shard_sizes=shard_sizes, subset=subset)
    inf, two, total, count = problem.prefix_norms(problem.order)
    return Bound(inf, math.sqrt(two), math.sqrt(total / count))
