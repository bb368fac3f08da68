"""Heeler's own rule, and the default."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.batches import order_batches, turned
from heeler.herding.judgement import ENOUGH, SHAPE, Judgement, Look
from heeler.herding.realized import evenness, realized_balance, row_squares
from heeler.herding.rules.base_rule import BaseRule
from heeler.herding.solver import Solution
from heeler.herding.strata import stratified_shards
from heeler.herding.table import SketchTable
from heeler.herding.validate import IntArray
from heeler.herding.vectors import make_vectors


class TabledRule(BaseRule):
    """A rule with a table; an example that an epoch does not see keeps its last vector."""

    keeps_table = True
    table: SketchTable

    def observe(self, indices: Any, vectors: Any) -> None:
        self.table.put(indices, vectors)
        self.screened = self.table.dropped

    def forget(self, indices: IntArray) -> None:
        self.table.forget(indices)


class Turn(NamedTuple):
    """What `Herd.solve` finds."""

    judgement: Judgement
    solution: Solution | None = None
    """None for an epoch that is left to chance, or has the steps of the one before it."""
    order: IntArray | None = None
    """(N,) of an epoch that has these steps."""

    @property
    def ordered(self) -> bool:
        """Whether the next order comes from sketches."""
        return self.solution is not None or self.order is not None


class Herd(TabledRule):
    """The newest vector of every example in a table, solved between epochs: `order_batches`.

    Every step's examples balance each other, and so does every prefix of the epoch, as far as the vectors predict the
    next ones (`persistence`); and only where that helps (`judgement`). Other epochs, the first among them, are random.
    With strata every step of a solve holds about its share of each, and other epochs are stratified, but for the first
    and those in which class noise helps. The loops let go of the GIL, so a solve can run in a thread. An example
    without a vector counts as the mean.

    Only new sketches are worth a solve, which starts from a new random order. Between them every epoch has the steps of
    the one before, in another order (`turned`), at no cost.
    """

    judges = True
    """Whether it looks at what its orders do, and leaves epochs to chance where that is better. For studies."""
    steps_may_turn = True
    """Whether an order may have the steps of the one before, in another order."""
    judgement: Judgement
    coordinates_shards = True
    solves_in_background = True
    solves_on_gpu = True
    uses_strata = True
    _state = (*TabledRule._state, "_seed")

    def __init__(self, examples: int, dim: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.table = SketchTable(self.examples, self.dim or 0, self.strata)
        self._seed = common.get("seed", 0)
        self.judgement = Judgement()

    def _unsolved_order(self) -> IntArray:
        """Stratified, where there are strata and class noise does not help (docs/will-it-help.md)."""
        if self.strata is None or self.judgement.fits or self.judgement.at_start:
            return self._shuffled()
        return stratified_shards(self.offsets, self.batch_size, self.strata, self.portions, self._rng)

    def forget(self, indices: IntArray) -> None:
        super().forget(indices)
        if not self.table.seen.any():  # what comes may be of other layers, and is not compared with what was
            self.judgement = Judgement(ordered=self.judgement.ordered)

    def solve(self) -> Turn:
        """Judge, and order all examples if that helps. Changes nothing."""
        judgement, table = self.judgement, self.table
        if not table.seen.any():
            return Turn(judgement)
        # Not the rule's own generator: a solve in a thread must leave no trace, and may be run again.
        rng = np.random.default_rng([self._seed, self.epoch])
        is_solved = judgement.ordered and judgement.balances(self.epoch) and not self.has_news
        if is_solved and self.steps_may_turn:
            return Turn(judgement, order=turned(self.order, self.offsets, self.batch_size, rng))
        looks = self.judges and table.persistence.is_refreshed and self.examples >= ENOUGH
        if not looks and not judgement.balances(self.epoch):  # an epoch that is left to chance reads no rows
            return Turn(judgement)
        squares = row_squares(table.rows)
        if looks:
            judgement = judgement.after(self._look(squares))
        at_start = self.strata is not None and judgement.at_start and not judgement.is_old(self.epoch)
        if at_start or not judgement.balances(self.epoch):
            return Turn(judgement)
        weights, shorter = table.persistence.weights(squares / table.scale**2)
        solution = self._solve(weights, rng)
        # Bounds in the gradients' own units: the table's scale may change before anybody reads them.
        before, after, random = (bound * shorter / table.scale for bound in solution[1:4])
        return Turn(judgement, solution._replace(bound_before=before, bound_after=after, bound_random=random))

    def _look(self, squares: NDArray[np.float64]) -> Look:
        """At the epoch that is about to end. squares: (N,) the rows' squared lengths."""
        seen, balance, fall = self.table.seen, None, 0.0
        if self.judgement.ordered:
            shape: dict[str, Any] = {"batch_size": self.batch_size, "shards": self.offsets, "seen": seen}
            balance = realized_balance(self.table.rows, self.order, **shape)
        elif not self.judgement.looks:  # an order that says nothing of gradients: its quarters differ by time alone
            sizes = np.diff(self.offsets)
            place = (np.arange(self.examples) - np.repeat(self.offsets[:-1], sizes)) / np.repeat(sizes, sizes)
            third, last = (self.order[(place >= at) & (place < at + 0.25) & seen[self.order]] for at in (0.5, 0.75))
            fall = evenness(squares[third]) - evenness(squares[last])
        return Look(self.epoch, evenness(squares[seen]), fall, balance)

    def _solve(self, weights: NDArray[np.float32] | None, rng: np.random.Generator) -> Solution:
        """Order all examples by what their rows predict, each times its weight, (N,)."""
        options: dict[str, Any] = {"seen": self.table.seen, "weights": weights, "strata": self.strata}
        if self.gpu_solver is not None:
            found = self.gpu_solver(self.table.rows, batch_size=self.batch_size, seed=rng, **options)
            if found is not None:
                return found
        vectors = make_vectors(self.table.rows, self.offsets, **options)
        return order_batches(vectors, batch_size=self.batch_size, seed=rng)

    def _weighed(self, weights: NDArray[np.float32] | None) -> NDArray[np.float16]:
        """(N, K) a copy of the rows times their weights, for those who cannot take the two apart."""
        return self.table.rows if weights is None else (self.table.rows * weights[:, None]).astype(np.float16)

    def commit(self, turn: Turn) -> IntArray:
        """Make what `solve` found the next epoch's order, and close the epoch."""
        self.judgement = replace(turn.judgement, ordered=turn.ordered)
        if turn.order is not None:
            return self._turn_to(turn.order)
        self.last_solution = turn.solution
        if turn.solution is None:
            return self._turn_to(self._unsolved_order())
        return self._turn_to(self._with_unseen(self._by_worker(turn.solution.order)))

    def next_order(self) -> IntArray:
        return self.commit(self.solve())

    def _turn_to(self, order: IntArray) -> IntArray:
        self.table.close_epoch()
        return super()._turn_to(order)

    def state_dict(self) -> dict[str, Any]:
        table = {name: np.array(own) for name, own in self.table.state_dict().items()}
        return {**self.state_before_close(), "table": table}

    def state_before_close(self) -> dict[str, Any]:
        return {**super().state_dict(), "judgement": self.judgement.as_array()}  # the rows stay

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.table.restore(state["table"])

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        self.table.check_state(check.entry(state, "table"))
        judgement = Judgement()
        if "judgement" in state:  # those of 0.2 have none
            judgement = Judgement.from_array(check.stored_array(state, "judgement", [np.float64], SHAPE))
        return {**super()._read(state), "judgement": judgement}
