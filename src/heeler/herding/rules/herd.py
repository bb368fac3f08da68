"""Heeler's own rule, and the default."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.herding import validate as check
from heeler.herding.batches import solve_batches
from heeler.herding.rules.base_rule import BaseRule
from heeler.herding.solver import Solution
from heeler.herding.strata import stratified_shards
from heeler.herding.table import SketchTable
from heeler.herding.validate import IntArray


class TabledRule(BaseRule):
    """A rule with a table; an example that an epoch does not see keeps its last vector."""

    keeps_table = True
    table: SketchTable

    def observe(self, indices: Any, vectors: Any) -> None:
        self.table.put(indices, vectors)
        self.screened = self.table.dropped

    def forget(self, indices: IntArray) -> None:
        self.table.forget(indices)


class Herd(TabledRule):
    """The newest vector of every example in a table, solved between epochs: `solve_batches`.

    Every step's examples balance each other, and so does every prefix of the epoch. With strata the first epoch, which
    has no vectors to go by, is that of the rule `stratified`, and later every step holds about its share of each. The
    kernels let go of the GIL, so a solve can run in a thread. An example without a vector counts as the mean.

    A solve starts from a new random order, not from the last one. The result is as good, and an order that is like the
    one before is not: networks that memorize fit the examples worse when they come in the same order again
    (RESULTS.md, LeNet and GPT: above random's loss with one order for up to 8 epochs, level with it or below with new
    ones).
    """

    coordinates_shards = True
    solves_in_background = True
    uses_strata = True
    _state = (*TabledRule._state, "_seed")

    def __init__(self, examples: int, dim: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.table = SketchTable(self.examples, self.dim or 0, self.strata)
        self._seed = common.get("seed", 0)

    def _first_order(self) -> IntArray:
        if self.strata is None:
            return self._shuffled()
        return stratified_shards(self.offsets, self.batch_size, self.strata, self.portions, self._rng)

    def warm_up(self) -> None:
        """Loading takes a second, compiling, once per machine, some ten."""
        workers, dim = min(self.workers, 2), self.dim or 1
        each = max(16, -(-2048 // dim))  # more numbers than NumPy rounds by itself: see `SketchTable`
        strata = None if self.strata is None else np.arange(workers * each) % 2
        twin = Herd(workers * each, dim, batch_size=4, shard_sizes=[each] * workers, strata=strata)
        vectors = np.random.default_rng(0).standard_normal((workers * each, dim), dtype=np.float32)
        for _ in range(2):
            twin.observe(twin.order, vectors)
            twin.next_order()

    def solve(self) -> Solution | None:
        """Order all examples; None if none has a vector. Changes nothing."""
        if not self.table.seen.any():
            return None
        # Not the rule's own generator: a solve in a thread must leave no trace, and may be run again.
        solution = self._solve(np.random.default_rng([self._seed, self.epoch]))
        # Bounds in the gradients' own units: the table's scale may change before anybody reads them.
        before, after, random = (bound / self.table.scale for bound in solution[1:4])
        return solution._replace(bound_before=before, bound_after=after, bound_random=random)

    def _solve(self, rng: np.random.Generator) -> Solution:
        return solve_batches(
            self.table.rows,
            batch_size=self.batch_size,
            seed=rng,
            shard_sizes=np.diff(self.offsets).tolist(),
            strata=self.strata,
            seen=self.table.seen,
        )

    def commit(self, solution: Solution | None) -> IntArray:
        """Make a solution the next epoch's order, and close the epoch."""
        self.last_solution = solution
        if solution is None:
            return self._turn_to(self._first_order())
        return self._turn_to(self._with_unseen(self._by_worker(solution.order)))

    def next_order(self) -> IntArray:
        return self.commit(self.solve())

    def _turn_to(self, order: IntArray) -> IntArray:
        self.table.close_epoch()
        return super()._turn_to(order)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "table": {name: np.array(own) for name, own in self.table.state_dict().items()}}

    def state_before_close(self) -> dict[str, Any]:
        return super().state_dict()  # the rows stay

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.table.restore(state["table"])

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        self.table.check_state(check.entry(state, "table"))
        return super()._read(state)
