"""A herding problem after checking: a table, an order of its rows, shards side by side, and each shard's mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.validate import Array, IntArray


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
    vectors: Any,
    order: Any,
    *,
    batch_size: int = 1,
    shard_sizes: Sequence[int] | None = None,
    subset: bool = False,
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
