"""Heeler's own rule, and the default."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.tabled import TabledRule
from heeler.herding.solver import Solution, solve
from heeler.herding.validate import IntArray

HERD_SWEEPS = 16
"""At most. Ten come within a tenth or so of where sweeps stop helping, and a solve ends by itself when they do."""


class Herd(TabledRule):
    """The newest vector of every example in a table, solved between epochs.

    The solve takes the time; the kernels let go of the GIL, so it can run in a thread. Examples without a vector get
    random places.

    A solve starts from a new random order, not from the last one. Sweeps from there are nearly as good, and an order
    that is like the one before is not: networks that memorize fit the examples worse when they come in the same order
    again (RESULTS.md, LeNet and GPT: above random's loss with one order for up to 8 epochs, level with it or below with
    new ones).

    Args:
        sweeps: balance sweeps per solve, at most.
    """

    coordinates_shards = True
    solves_in_background = True
    uses_strata = True
    _state = (*TabledRule._state, "_seed")

    def __init__(self, examples: int, dim: int | None = None, *, sweeps: int = HERD_SWEEPS, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.sweeps = check.check_positive(sweeps, "sweeps")
        self._seed = common.get("seed", 0)

    def solve(self) -> Solution | None:
        """Order the examples that have vectors; None if there are none. Changes nothing."""
        known = self._known()
        order, sizes = np.concatenate(known), [own.size for own in known]
        del known
        if order.size == 0:
            return None
        # Not the rule's own generator: a solve in a thread must leave no trace, and may be run again.
        rng = np.random.default_rng([self._seed, self.epoch])
        for own in self._by_worker(order):
            rng.shuffle(own)
        solution = solve(
            self.table.rows,
            order,
            sweeps=self.sweeps,
            batch_size=self.batch_size,
            seed=int(rng.integers(2**32)),
            shard_sizes=None if self.workers == 1 else sizes,
            subset=True,
        )
        # Bounds in the gradients' own units: the table's scale may change before anybody reads them.
        before, after, random = (bound / self.table.scale for bound in solution[1:4])
        return solution._replace(bound_before=before, bound_after=after, bound_random=random)

    def commit(self, solution: Solution | None) -> IntArray:
        """Make a solution the next epoch's order, and close the epoch."""
        self.last_solution = solution
        placed = np.empty(0, np.int64) if solution is None else solution.order
        return self._turn_to(self._with_unseen(self._by_worker(placed)))

    def next_order(self) -> IntArray:
        return self.commit(self.solve())
