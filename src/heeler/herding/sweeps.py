"""One pass over a table of vectors in a given order: balance sweeps, which give the next order, and herding bounds.

The bound of an order is the norm of its centred prefix sums, the quantity that the convergence theorems bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.validate import IntArray
from heeler.herding.vectors import as_single
from heeler.native import loops
from heeler.native.loops import Rows


class Bound(NamedTuple):
    """Prefix norms of an order, taken at batch boundaries and at the end."""

    inf: float
    """max_t ‖Σ_{τ≤t} z_τ‖_∞, as in the published simulation."""
    two: float
    """max_t ‖Σ_{τ≤t} z_τ‖₂, what the theorems bound."""
    rms: float
    """Root mean square over t of ‖Σ_{τ≤t} z_τ‖₂, what `solve` makes small."""


def balance_sweep(vectors: Any, order: Any, *, subset: bool = False) -> IntArray:
    """One mean-centred sweep: go through `order` with a running sum s of signed c_i = v_i − v̄.

    ⟨s, c_i⟩ ≤ 0 puts example i at the end of the front list with sign +1, else at the end of the back list with −1; the
    new order is the front list, then the back list reversed (GraB, arXiv 2205.10733). vectors (N, K), order (N,) and
    what is returned (N,) int64; arguments as in `solve`.
    """
    problem = make_problem(vectors, order, subset=subset)
    return loops.balance_sweep(problem.rows, problem.order, problem.means[0])


def pair_sweep(vectors: Any, order: Any, *, shard_sizes: Sequence[int] | None = None, subset: bool = False) -> IntArray:
    """One epoch of CD-GraB (arXiv 2302.00845): all workers' pairs against one running sum S.

    For each pair of positions (2i, 2i+1), for worker j in turn: D = v[j, 2i] − v[j, 2i+1]; ⟨S, D⟩ ≤ 0 puts the first to
    the front and the second to the back and adds D to S, else the other way round and subtracts it. A worker's odd last
    example keeps its place, and workers go in lockstep by position while they have examples left. With one worker this
    is PairBalance. Arguments as in `solve`.
    """
    problem = make_problem(vectors, order, shard_sizes=shard_sizes, subset=subset)
    together = np.zeros(problem.offsets.size - 1, np.int64)
    return loops.pair_sweep(problem.rows, problem.order, problem.offsets, together)


def herding_bound(
    vectors: Any, order: Any, *, batch_size: int = 1, shard_sizes: Sequence[int] | None = None, subset: bool = False
) -> Bound:
    """Bound of an order (N,) of vectors (N, K), centred on the mean of those in `order`; arguments as in `solve`.

    With `shard_sizes`, of the workers' common prefix: max_t ‖Σ_{τ≤t} Σ_j z_{j,τ}‖, each shard centred on its own mean.
    """
    problem = make_problem(vectors, order, batch_size=batch_size, shard_sizes=shard_sizes, subset=subset)
    inf, two, total, count = problem.prefix_norms(problem.order)
    return Bound(*(norm * problem.unit for norm in (inf, math.sqrt(two), math.sqrt(total / count))))


@dataclass(frozen=True)
class Problem:
    """Checked input of one solve or sweep."""

    rows: Rows
    order: IntArray
    """(N,) row numbers, shards side by side; never written to."""
    offsets: IntArray
    """(n + 1,) where each shard begins in `order`."""
    means: NDArray[np.float64]
    """(n, K) mean of each shard."""
    batch_size: int
    """Examples per worker between two judged prefixes."""
    unit: float
    """What lengths are to be multiplied with, to be those of the vectors that were given."""

    def sweep(self, order: IntArray) -> IntArray:
        """One order by a mean-centred sweep, shards by a coordinated pair sweep: mean-centred ones let the workers'
        lists drift apart."""
        if self.offsets.size == 2:
            return loops.balance_sweep(self.rows, order, self.means[0])
        return loops.pair_sweep(self.rows, order, self.offsets, sharing_groups(np.diff(self.offsets), self.rows.dim))

    def prefix_norms(self, order: IntArray) -> tuple[float, float, float, int]:
        """Largest infinity norm, largest squared 2-norm, sum of squared 2-norms, number of prefixes."""
        inf, two, total, count = loops.prefix_norms(self.rows, order, self.offsets, self.means, self.batch_size)
        return inf, two, total, int(count)


def make_problem(
    vectors: Any, order: Any, *, batch_size: int = 1, shard_sizes: Sequence[int] | None = None, subset: bool = False
) -> Problem:
    """Check what came from outside: vectors (N, K) and order (N,).

    With `subset`, order lists some of the rows, and shards are parts of that list.
    """
    batch_size = check.check_positive(batch_size, "batch_size")
    floats = check.as_floats(vectors)
    order = check.as_order(order, floats.shape[0], subset=subset)
    offsets = check.as_offsets(shard_sizes, order.size)
    if shard_sizes is not None and not subset:
        check.check_own_rows(order, offsets)
    # With all rows in the order, shards lie side by side: file order reads several times faster than the given one.
    listed = np.arange(order.size) if order.size == len(floats) else order
    single, unit = as_single(floats, listed, "drop them, or list the others with subset=True")
    rows = Rows(single)
    means, _ = loops.shard_means(rows, listed, offsets)
    return Problem(rows, order, offsets, means, batch_size, unit)


def sharing_groups(sizes: IntArray, dim: int) -> IntArray:
    """Which workers' pairs are balanced against one running sum: (n,) group numbers, 0 for all where sizes are equal.

    A worker of m examples puts pair i at position i and, from the end, at m − 1 − i. Workers of equal size agree on
    both. Those of unequal size agree on the first only, and a shared sum leaves their second halves unbalanced, by
    about √(workers · difference in pairs) vectors; a sum of their own costs about √dim vectors, the floor of balancing.
    So workers of like size share as long as the former is the smaller. Measured (64 workers of 500 to 530, 64 numbers):
    largest prefix norm 170 with one sum for all, 152 by exact size, 106 so; 293 with a sum each.
    """
    pairs = sizes // 2
    group = np.zeros(sizes.size, np.int64)
    number, members, least = 0, 0, 0
    for j in np.argsort(pairs, kind="stable"):
        if members and (members + 1) * (pairs[j] - least) > dim:
            number, members = number + 1, 0
        if members == 0:
            least = pairs[j]
        members += 1
        group[j] = number
    return group
