"""From one epoch to the next: feed the rule what was seen, and have the next order ready when the epoch ends."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import Rule
from heeler.herding.rules import Herd
from heeler.herding.solver import Solution
from heeler.ordering.dealing import IntArray, Layout
from heeler.ordering.thread import Worker

EARLY_FROM = 0.97
"""The share of an epoch after which a large solve starts, in a thread, on a table whose last rows are an epoch old.
Measured on digits at a large learning rate (8 seeds, geometric mean over epochs 3 to 25 of the distance from the
optimum): at the end 2.09e-3, from 0.99 on 2.02e-3, from 0.97 on 2.04e-3, from 0.95 on 2.23e-3."""
EARLY_SIZE = 1 << 25
"""Numbers in a table from which that pays: below, a solve takes a fraction of a second at the epoch's end."""


class Turnover:
    """Feeds a rule, and turns it over to the next epoch, without a stall where it can.

    A solve that starts early reads the table as it stood at a fixed position of the epoch; what comes after it waits
    in `_late` until the solve is done. So the orders depend on positions alone, never on how fast a thread runs.
    """

    def __init__(self, rule: Rule, layout: Layout) -> None:
        self.rule = rule
        self.layout = layout
        self.walk: IntArray = rule.order
        """(N,) what all workers together walk in this epoch."""
        self.closed = False
        """Whether `rule.order` is the next epoch's already."""
        self._late: list[tuple[IntArray, NDArray[np.float32]]] = []
        self._solving: Future[Solution | None] | None = None

    @property
    def indices(self) -> IntArray:
        """This worker's part of the walk."""
        return self.layout.part(self.walk)

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        """Take note of trained examples: (b,) indices, (b, K) vectors."""
        if self._solving is not None:
            self._late.append((indices, vectors))
        else:
            self.rule.observe(indices, vectors)

    def wants_early_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        """Whether now, with `trained` of `length` positions done, is the time to call `start_early`.

        sketched: whether this epoch brings sketches. If not, there is nothing to wait for.
        """
        rule = self.rule
        if self.closed or self._solving is not None or not isinstance(rule, Herd):
            return False
        return not sketched or (
            rule.table.rows.size >= EARLY_SIZE
            and EARLY_FROM * length <= trained < length
            and bool(rule.table.seen.all())  # an example without a sketch would get a random place for a whole epoch
        )

    def start_early(self) -> None:
        """Start to solve while the epoch goes on."""
        assert isinstance(self.rule, Herd)  # see wants_early_start
        self._solving = Worker("heeler-solve").submit(self.rule.solve)

    def next_order(self) -> None:
        """Close the epoch and go on to the next order."""
        self.settle()
        if not self.closed:
            self.rule.next_order()
        self.closed = False
        self.walk = self.rule.order

    def forget(self, indices: IntArray) -> None:
        """Drop what was filed under `indices`, for it may be about other examples."""
        self.settle()
        forget(self.rule, indices)

    def settle(self) -> None:
        """Wait for a solve under way, take its order, and file what had to wait for it."""
        if self._solving is not None:
            assert isinstance(self.rule, Herd)
            self.rule.commit(self._solving.result())
            self._solving, self.closed = None, True
        for indices, vectors in self._late:
            self.rule.observe(indices, vectors)
        self._late.clear()

    def consolidate(self) -> None:
        """Nothing to bring together: one worker has seen everything."""

    def state_dict(self) -> dict[str, Any]:
        """All state as a copy; waits for a solve under way."""
        self.settle()
        return whole_state(self.rule, self.walk, self.closed, self.layout)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on where `state_dict` was taken; True if the workers are the same, so that positions still hold."""
        self.settle()
        walk, same = resumed_walk(state, self.layout)
        self.rule.load_state_dict(state["rule"])
        self.walk = walk
        self.closed = state["closed"]
        return same

    def numbers(self) -> dict[str, float]:
        """What there is to log besides the rule's own."""
        return {}


def forget(rule: Rule, indices: IntArray) -> None:
    """Drop what a rule holds under `indices`."""
    table = getattr(rule, "table", None)
    if table is not None:
        table.seen[indices] = False
    else:  # an online rule has mixed them into its sums: close those, so that the next order is a random one
        rule.next_order()


def whole_state(rule: Rule, walk: IntArray, closed: bool, layout: Layout) -> dict[str, Any]:
    """What any number of workers can go on from, as a copy."""
    return {
        "rule": rule.state_dict(),
        "walk": walk.copy(),
        "closed": closed,
        "workers": layout.workers,
        "batch_size": layout.batch_size,
        "drop_last": layout.drop_last,
    }


def resumed_walk(state: dict[str, Any], layout: Layout) -> tuple[IntArray, bool]:
    """The walk to go on with, and whether positions in it still hold.

    With other workers than the state was saved with, what is left of the epoch is dealt out anew.
    """
    walk: IntArray = np.asarray(state["walk"])
    before = Layout(state["workers"], 0, state["batch_size"], state["drop_last"], layout.shard_sizes)
    if (before.workers, before.batch_size, before.drop_last) == (layout.workers, layout.batch_size, layout.drop_last):
        return walk, True
    if layout.workers == before.workers == 1:  # a position is a position, whatever the batch size
        return walk, True
    if layout.shard_sizes is not None:
        raise ValueError(
            f"the state is of {before.workers} workers with shards of their own and cannot go on with "
            f"{layout.workers}: with shards='local' the examples belong to the workers"
        )
    return before.remaining(walk, state["trained"]), False
