"""A herding problem after checking: a flat table, a flat order, shards side by side, and each shard's mean.

One worker's (N, K) and n workers' (n, m, K) are both cases of it, so there is one code path below the public functions.
"""

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
    workers_shape: tuple[int, int] | None = None
    """(n, m) when orders came, and have to go back, as (n, m) row numbers of each shard."""

    def balance(self, order: IntArray, following: IntArray, *, judge: bool = True) -> float:
        """Mean-centred sweep over one shard into `following`; returns the sum of squared prefix norms of `order`.

        Where `sums` are float32 the norm is good to about four digits. Without `judge` it is not taken: zero.
        """
        from heeler.herding import kernels

        mean, drift, running, prefix = check.aligned(4, self.table.shape[1], dtype=self.sums)
        mean[:] = self.means[0]
        drift[:] = self.means[0] - mean
        batch_size = self.batch_size if judge else 0
        scratch = (running, prefix)
        return float(
            kernels.balance_sweep(self.table, check.frozen(order), mean, drift, following, *scratch, batch_size)
        )

    def pair_balance(self, order: IntArray, following: IntArray, group: IntArray | None = None) -> float:
        """Pair sweep over all shards into `following`; returns the sum of squared prefix norms of `order`.

        group (n,) numbers, from 0, the running sum each worker shares; by default all share one.
        """
        from heeler.herding import kernels

        if group is None:
            group = np.zeros(self.offsets.size - 1, np.int64)
        dim = self.table.shape[1]
        running, scratch = check.aligned(int(group.max()) + 1, dim), check.aligned(3, dim)
        shards = (self.offsets, self.means, group)
        rest = (following, running, *scratch, self.batch_size)
        return float(kernels.pair_sweep(self.table, check.frozen(order), *shards, *rest))

    @property
    def boundaries(self) -> int:
        """At how many prefixes an order is judged: after every batch of the longest shard, and at its end."""
        return -(-int(np.diff(self.offsets).max()) // self.batch_size)

    def prefix_norms(self, order: IntArray) -> tuple[float, float, float, int]:
        """Largest infinity norm, largest squared 2-norm, sum of squared 2-norms, number of prefixes."""
        from heeler.herding import kernels

        scratch = check.aligned(self.table.shape[1])
        frozen = check.frozen(order)
        return kernels.prefix_norms(self.table, frozen, self.offsets, self.means, scratch, self.batch_size)

    def shuffled(self, rng: np.random.Generator) -> IntArray:
        """The order with every shard shuffled on its own."""
        out = self.order.copy()
        for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            rng.shuffle(out[start:stop])
        return out

    def as_given(self, order: IntArray) -> IntArray:
        """A flat order in the form the caller's came in."""
        if self.workers_shape is None:
            return order
        return order.reshape(self.workers_shape) - self.offsets[:-1, None]


def flat_problem(
    vectors: Any,
    order: Any,
    *,
    batch_size: int = 1,
    shard_sizes: Sequence[int] | None = None,
    subset: bool = False,
    screen: bool = False,
) -> Problem:
    """vectors (N, K) and order (N,); with `subset`, order lists some of the rows and shards are parts of that list."""
    batch_size = check.check_positive(batch_size, "batch_size")
    floats = check.as_floats(vectors, "(N, K)")
    flat = check.as_order(order, floats.shape[0], subset=subset)
    offsets = check.as_offsets(shard_sizes, flat.size)
    if shard_sizes is not None and not subset:
        check.check_own_rows(flat, offsets)
    return _with_means(floats, flat, offsets, batch_size, screen, None)


def worker_problem(
    vectors: Any,
    orders: Any,
    *,
    batch_size: int = 1,
    shard_sizes: Sequence[int] | None = None,
    subset: bool = False,
    screen: bool = False,
) -> Problem:
    """vectors (n, m, K) with orders (n, m), or the flat form with `shard_sizes`."""
    if shard_sizes is not None:
        options: dict[str, Any] = {"batch_size": batch_size, "subset": subset, "screen": screen}
        return flat_problem(vectors, orders, shard_sizes=shard_sizes, **options)
    if subset:
        raise ValueError("subset needs the flat form: vectors (N, K), order (N,) and shard_sizes")
    batch_size = check.check_positive(batch_size, "batch_size")
    floats = check.as_floats(vectors, "(n, m, K)")
    workers, size, dim = floats.shape
    local = check.as_integers(orders, "orders")
    if local.shape != (workers, size):
        raise ValueError(f"orders must have shape {(workers, size)} for vectors {floats.shape}, got {local.shape}")
    for j, own in enumerate(local):
        check.as_order(own, size, what=f"orders[{j}]")
    offsets = np.arange(workers + 1, dtype=np.int64) * size
    flat = (local + offsets[:-1, None]).reshape(-1)
    return _with_means(floats.reshape(-1, dim), flat, offsets, batch_size, screen, (workers, size))


def _with_means(
    floats: Array, order: IntArray, offsets: IntArray, batch_size: int, screen: bool, shape: tuple[int, int] | None
) -> Problem:
    """Take the means, which also tells whether all is finite: a NaN or infinity anywhere makes some mean so."""
    from heeler.herding import kernels

    table = check.as_bits(floats)
    means = check.aligned(offsets.size - 1, table.shape[1])
    # With all rows in the order, shards lie side by side: file order reads several times faster than the given one.
    rows = check.frozen(np.arange(order.size) if order.size == table.shape[0] else order)
    squares = kernels.shard_means(table, rows, offsets, means)
    if not np.isfinite(means).all():
        bad = check.nonfinite_rows(floats)
        bad = bad[np.isin(bad, order)]
        if not screen or bad.size == 0:
            raise check.refuse_nonfinite(bad)
        table = check.as_bits(check.screened_copy(floats, bad))
        squares = kernels.shard_means(table, rows, offsets, means)
    return Problem(table, order, offsets, means, _sums(table, means, squares / order.size), batch_size, shape)


def _sums(table: Array, means: NDArray[np.float64], square: float) -> Any:
    """float32 for float16 and float32 vectors whose mean square is such that products neither overflow nor vanish, and
    whose spread is not lost beside their mean."""
    spread = square - float(np.max(np.sum(means**2, axis=1)))
    plain = 1e-20 < square < 1e20 and spread > 1e-6 * square
    return np.float32 if plain and table.dtype != np.float64 else np.float64
