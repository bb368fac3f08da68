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
from heeler.herding.validate import Array, IntArray


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
    following = np.empty_like(problem.order)
    problem.balance(problem.order, following, judge=False)
    return following


def pair_sweep(vectors: Any, order: Any, *, shard_sizes: Sequence[int] | None = None, subset: bool = False) -> IntArray:
    """One epoch of CD-GraB (arXiv 2302.00845): all workers' pairs against one running sum S.

    For each pair of positions (2i, 2i+1), for worker j in turn: D = v[j, 2i] − v[j, 2i+1]; ⟨S, D⟩ ≤ 0 puts the first to
    the front and the second to the back and adds D to S, else the other way round and subtracts it. A worker's odd last
    example keeps its place, and workers go in lockstep by position while they have examples left. With one worker this
    is PairBalance. Arguments as in `solve`.
    """
    problem = make_problem(vectors, order, shard_sizes=shard_sizes, subset=subset)
    following = np.empty_like(problem.order)
    problem.pair_balance(problem.order, following)
    return following


def herding_bound(
    vectors: Any, order: Any, *, batch_size: int = 1, shard_sizes: Sequence[int] | None = None, subset: bool = False
) -> Bound:
    """Bound of an order (N,) of vectors (N, K), centred on the mean of those in `order`; arguments as in `solve`.

    With `shard_sizes`, of the workers' common prefix: max_t ‖Σ_{τ≤t} Σ_j z_{j,τ}‖, each shard centred on its own mean.
    """
    problem = make_problem(vectors, order, batch_size=batch_size, shard_sizes=shard_sizes, subset=subset)
    inf, two, total, count = problem.prefix_norms(problem.order)
    return Bound(inf, math.sqrt(two), math.sqrt(total / count))


@dataclass(frozen=True)
class Problem:
    """Checked input of one solve or sweep."""

    table: Array
    """(N, K) as the kernels read it: see `validate`."""
    order: IntArray
    """(N,) row numbers, shards side by side; never written to."""
    offsets: IntArray
    """(n + 1,) where each shard begins in `order`."""
    means: NDArray[np.float64]
    """(n, K) mean of each shard."""
    sums: Any
    """Type of the sums in `balance`: float32 where that is precise enough, else float64."""
    batch_size: int
    """Examples per worker between two judged prefixes."""

    def balance(self, order: IntArray, following: IntArray, *, judge: bool = True) -> float:
        """Mean-centred sweep over one shard into `following`; returns the sum of squared prefix norms of `order`.

        Where `sums` are float32 the norm is good to about four digits. Without `judge` it is not taken: zero.
        """
        from heeler.herding import kernels_sweeps

        mean, drift, running, prefix = check.aligned(4, self.table.shape[1], dtype=self.sums)
        mean[:] = self.means[0]
        drift[:] = self.means[0] - mean
        sums = (mean, drift, following, running, prefix)
        return float(
            kernels_sweeps.balance_sweep(self.table, check.frozen(order), *sums, self.batch_size if judge else 0)
        )

    def pair_balance(self, order: IntArray, following: IntArray, group: IntArray | None = None) -> float:
        """Pair sweep over all shards into `following`; returns the sum of squared prefix norms of `order`.

        group (n,) numbers, from 0, the running sum each worker shares; by default all share one.
        """
        from heeler.herding import kernels_sweeps

        if group is None:
            group = np.zeros(self.offsets.size - 1, np.int64)
        dim = self.table.shape[1]
        shards = (self.offsets, self.means, group)
        sums = (following, check.aligned(int(group.max()) + 1, dim), *check.aligned(3, dim))
        return float(kernels_sweeps.pair_sweep(self.table, check.frozen(order), *shards, *sums, self.batch_size))

    def prefix_norms(self, order: IntArray) -> tuple[float, float, float, int]:
        """Largest infinity norm, largest squared 2-norm, sum of squared 2-norms, number of prefixes."""
        from heeler.herding import kernels_sweeps

        shards, prefix = (self.offsets, self.means), check.aligned(self.table.shape[1])
        return kernels_sweeps.prefix_norms(self.table, check.frozen(order), *shards, prefix, self.batch_size)


def make_problem(
    vectors: Any, order: Any, *, batch_size: int = 1, shard_sizes: Sequence[int] | None = None, subset: bool = False
) -> Problem:
    """Check what came from outside: vectors (N, K) and order (N,).

    With `subset`, order lists some of the rows, and shards are parts of that list.
    """
    from heeler.herding import kernels_sweeps

    batch_size = check.check_positive(batch_size, "batch_size")
    floats = check.as_floats(vectors)
    order = check.as_order(order, floats.shape[0], subset=subset)
    offsets = check.as_offsets(shard_sizes, order.size)
    if shard_sizes is not None and not subset:
        check.check_own_rows(order, offsets)
    table = check.as_bits(floats)
    means = check.aligned(offsets.size - 1, table.shape[1])
    # With all rows in the order, shards lie side by side: file order reads several times faster than the given one.
    rows = check.frozen(np.arange(order.size) if order.size == table.shape[0] else order)
    squares = kernels_sweeps.shard_means(table, rows, offsets, means)
    if not np.isfinite(means).all():  # as a NaN or infinity anywhere makes some mean
        check.refuse_nonfinite(floats, order, "drop them, or list the others with subset=True")
    return Problem(table, order, offsets, means, _sums(table, means, squares / order.size), batch_size)


def _sums(table: Array, means: NDArray[np.float64], square: float) -> Any:
    """float32 for float16 and float32 vectors whose mean square is such that products neither overflow nor vanish, and
    whose spread is not lost beside their mean."""
    spread = square - float(np.max(np.sum(means**2, axis=1)))
    plain = 1e-20 < square < 1e20 and spread > 1e-6 * square
    return np.float32 if plain and table.dtype != np.float64 else np.float64
