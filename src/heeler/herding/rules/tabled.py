"""Rules that keep a vector of every example: herd, Heeler's own, and greedy herding, for study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from heeler.herding import _validate as check
from heeler.herding._validate import Array, IntArray, NonFinite
from heeler.herding.rules.base import BaseRule
from heeler.herding.solver import Solution, solve_with_report

HERD_PASSES = 16
"""At most. Ten come within a tenth or so of where passes stop helping, and a solve ends by itself when they do."""


class Table(Protocol):
    """What these rules need of `heeler.sketch.SketchTable`: the newest vector of every example."""

    rows: Any
    """(N, K) float16, float32 or float64."""
    seen: Any
    """(N,) bool: which rows hold a vector."""
    dropped: int
    """Vectors refused because they were not finite."""

    def put(self, indices: Any, vectors: Any, /) -> None:
        """Store copies of vectors (b, K) as rows `indices` (b,); of two with the same index the later counts."""

    def flush(self) -> None:
        """Wait for vectors under way from a device."""


class TabledRule(BaseRule):
    """A rule over a table; an example that an epoch does not see keeps its last vector.

    Args:
        table: where vectors are kept; made here when None. A table handed in belongs to its owner, who also saves it:
            it is not part of the rule's `state_dict`.
    """

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
        table: Table | None = None,
    ) -> None:
        super().__init__(examples, dim, seed=seed, batch_size=batch_size, shard_sizes=shard_sizes)
        self._owns_table = table is None
        if table is None:
            from heeler.sketch.table import SketchTable

            table = SketchTable(self.examples, self.dim or 0)
        if tuple(table.rows.shape) != (self.examples, self.dim):
            raise ValueError(f"the table has shape {tuple(table.rows.shape)}, not {(self.examples, self.dim)}")
        self.table: Any = table

    def observe(self, indices: Any, vectors: Any) -> None:
        """See `Rule.observe`. An example seen twice keeps its newest vector; vectors may be on a device."""
        rows = self._rows(indices)
        if rows.size == 0:
            return
        if tuple(vectors.shape) != (rows.size, self.dim):
            raise ValueError(f"vectors must have shape {(rows.size, self.dim)}, got {tuple(vectors.shape)}")
        self.table.put(rows, vectors)
        self.screened = int(self.table.dropped)

    def _receive(self) -> None:
        """Wait for vectors under way. Not part of a solve, which may run in a thread while others are put."""
        self.table.flush()
        self.screened = int(self.table.dropped)

    def state_dict(self) -> dict[str, Any]:
        """See `Rule.state_dict`; with the table if the rule made it."""
        state = super().state_dict()
        if self._owns_table:
            state["table"] = {name: np.array(value) for name, value in self.table.state_dict().items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Rule.load_state_dict`."""
        super().load_state_dict(state)
        if self._owns_table:
            self.table.load_state_dict(state["table"])

    def _known(self) -> tuple[IntArray, list[int]]:
        """This epoch's order without the examples that have no vector yet, and how many of each worker's remain."""
        known = check.as_numpy(self.table.seen, "seen")[self.order]
        return self.order[known], [int(np.count_nonzero(known[shard])) for shard in self._shards()]

    def _without_nonfinite(self, order: IntArray, sizes: list[int]) -> tuple[IntArray, list[int]]:
        """Leave out rows that are not finite in a table that let them in; they count as not seen."""
        bad = check.nonfinite_rows(check.as_numpy(self.table.rows, "rows"))
        keep = ~np.isin(order, bad)
        parts = np.split(keep, np.cumsum(sizes)[:-1])
        return order[keep], [int(np.count_nonzero(part)) for part in parts]


class Herd(TabledRule):
    """Heeler's own rule and the default: the newest vector of every example in a table, solved between epochs.

    `next_order()` is `commit(solve())`. The solve takes the time; it only reads, and may run in a thread (the kernels
    let go of the GIL). Examples without a vector get random places.

    A solve starts from a new random order, not from the last one. Passes from there are nearly as good, and an order
    that is like the one before is not: networks that memorize fit the examples worse when they come in the same order
    again (RESULTS.md, LeNet and GPT: above random's loss with one order for up to 8 epochs, level with it or below with
    new ones).

    Args:
        passes: balance passes in a solve, at most.
        table: see `TabledRule`.
    """

    _state = (*TabledRule._state, "_seed")

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
        table: Table | None = None,
        passes: int = HERD_PASSES,
    ) -> None:
        options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "shard_sizes": shard_sizes}
        super().__init__(examples, dim, table=table, **options)
        self.passes = check.check_positive(passes, "passes")
        self._seed = seed
        self.last_solution: Solution | None = None
        """Bounds, passes and seconds of the last solve; its order holds the examples that had vectors."""

    def solve(self) -> Solution | None:
        """Order the examples that have vectors; None if there are none. Changes nothing."""
        order, sizes = self._known()
        if order.size == 0:
            return None
        try:
            return self._solve(order, sizes)
        except NonFinite:
            order, sizes = self._without_nonfinite(order, sizes)
            return self._solve(order, sizes) if order.size else None

    def commit(self, solution: Solution | None) -> IntArray:
        """Make a solution the next epoch's order, and close the epoch."""
        self.last_solution = solution
        if solution is None:
            placed = [np.empty(0, np.int64)] * self.workers
        else:
            owner = self._worker(solution.order)  # shards lie side by side, so owners ascend
            placed = np.split(solution.order, np.searchsorted(owner, np.arange(1, self.workers)))
        self.order = self._with_unseen(placed)
        self.epoch += 1
        return self.order

    def next_order(self) -> IntArray:
        """See `Rule.next_order`."""
        self._receive()
        return self.commit(self.solve())

    def _solve(self, order: IntArray, sizes: list[int]) -> Solution:
        """`order` is a copy, and is shuffled."""
        # Not the rule's own generator: a solve in a thread must leave no trace, and may be run again.
        rng = np.random.default_rng([self._seed, self.epoch])
        for own in np.split(order, np.cumsum(sizes)[:-1]):
            rng.shuffle(own)
        solution = solve_with_report(
            self.table.rows,
            order,
            passes=self.passes,
            batch_size=self.batch_size,
            seed=int(rng.integers(2**32)),
            shard_sizes=None if self.workers == 1 else sizes,
            subset=True,
        )
        # Bounds in the gradients' own units: the table's scale may change before anybody reads them.
        scale = getattr(self.table, "scale", 1.0)
        bounds = {name: getattr(solution, name) / scale for name in ("bound_before", "bound_after", "bound_random")}
        return solution._replace(**bounds)


class Greedy(TabledRule):
    """Greedy herding, for study: always the example that keeps the prefix sum shortest.

    Its prefix norms are the best of all and it trains *worse than random* at large learning rates: unstable, since it
    leaves the largest gradients to the end. Takes O(N²K) time. Each worker herds its own examples.

    Args:
        limit: the largest shard it will take on.
    """

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
        table: Table | None = None,
        limit: int = 20_000,
    ) -> None:
        options: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "shard_sizes": shard_sizes}
        super().__init__(examples, dim, table=table, **options)
        largest = int(np.diff(self.offsets).max())
        if largest > limit:
            raise ValueError(
                f"greedy herding takes O(N²K) time and a shard has {largest} examples, more than limit={limit}: "
                "use the rule 'herd', or raise the limit and wait"
            )

    def _close(self) -> IntArray:
        self._receive()
        order, sizes = self._known()
        order, sizes = self._without_nonfinite(order, sizes)
        rows = check.as_numpy(self.table.rows, "rows")
        return self._with_unseen([greedy_order(rows, own) for own in np.split(order, np.cumsum(sizes)[:-1])])


def greedy_order(vectors: Array, order: IntArray) -> IntArray:
    """Rows of `order` so that each next one keeps the centred prefix shortest; of equals the earliest in `order`.

    ‖p + c_i‖² = ‖p‖² + 2⟨p, c_i⟩ + ‖c_i‖², so the least of 2⟨p, c_i⟩ + ‖c_i‖² is taken: a matrix-vector product a step.
    """
    if order.size == 0:
        return order
    centred = vectors[order].astype(np.float64)
    centred -= centred.mean(axis=0)
    squares = np.einsum("ik,ik->i", centred, centred)
    prefix, following = np.zeros(centred.shape[1]), np.empty_like(order)
    for t in range(order.size):
        best = int(np.argmin(2.0 * (centred @ prefix) + squares))
        following[t] = order[best]
        prefix += centred[best]
        squares[best] = np.inf
    return following
