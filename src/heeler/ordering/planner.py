"""From one epoch to the next: feed the rule what was seen, and have the next order ready when the epoch ends."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from heeler.herding import OrderingRule, Solution
from heeler.herding.lazy import LazyOrder, Order
from heeler.herding.validate import IntArray
from heeler.ordering.background import BackgroundThread
from heeler.ordering.dealing import Layout
from heeler.ordering.state import is_lazy, order_state, resumed_order

LATE = 0.03
"""The share of a sketched epoch that a large solve does not wait for: it runs in a thread meanwhile, on a table whose
rows of these examples are those of the sketched epoch before. A larger one would leave less to wait for, and costs some
networks a part of their gain (`benchmarks.early_solves`)."""
EARLY_SIZE = 1 << 23
"""Numbers in a table from which that pays: below, a solve takes less than a third of a second at the epoch's end."""


def late_share(numbers: int) -> float:
    """The share of an epoch beside which a table of so many numbers is solved, from the second sketched epoch on."""
    return LATE if numbers >= EARLY_SIZE else 0.0


class Planner(Protocol):
    """Feeds a rule and gives this worker's indices for each epoch; of one process, or of many that share an order."""

    rule: OrderingRule
    """The ordering rule. Of many workers the leader's is fed, and the others' only gives the first order."""
    sees_all: bool
    """Whether the sketches of all workers meet here, and with them the state that a restart needs."""

    @property
    def indices(self) -> Order:
        """This worker's indices in the current epoch."""

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        """Take note of trained examples: (b,) indices, (b, K) vectors."""

    def wants_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        """Whether now, with `trained` of `length` positions done, is the time to call `start`.

        sketched: whether this epoch brings sketches. If not, there is nothing to wait for.
        """

    def start(self) -> None:
        """Begin to work on the next order while the epoch goes on."""

    def next_order(self) -> None:
        """Close the epoch and go on to the next order."""

    def forget(self, indices: IntArray) -> None:
        """Drop what was filed under `indices`, for it may be about other examples."""

    def consolidate(self, trained: int) -> None:
        """Bring what all workers have seen to the leader; all of them call it at the same step.

        trained: how many examples of the epoch this worker has trained on.
        """

    def reading(self) -> AbstractContextManager[Any]:
        """Hold this to read the rule's table, with all that this process knows in it, while nobody writes to it."""

    def state_dict(self) -> dict[str, Any]:
        """All state as a copy."""

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on where `state_dict` was taken; True if the workers are the same, so that positions still hold."""

    def metrics(self) -> dict[str, float]:
        """What there is to log besides the rule's own."""


class LocalPlanner:
    """The planner of one process, without a stall where it can.

    A solve that starts early reads the table as it stood at a fixed position of the epoch; what comes after it waits
    in `_late` until the solve is done. So the orders depend on positions alone, never on how fast a thread runs.
    """

    sees_all = True

    def __init__(self, rule: OrderingRule, layout: Layout) -> None:
        self.rule, self.layout = rule, layout
        self._order: Order = rule.order
        self._closed = False  # rule.order is the next epoch's already
        self._late: list[tuple[IntArray, NDArray[np.float32]]] = []
        self._solving: Future[Solution | None] | None = None

    @property
    def indices(self) -> Order:
        if isinstance(self._order, LazyOrder) and self.layout.workers == 1:
            return self._order
        return self.layout.part(np.asarray(self._order))

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        if self._solving is not None:
            self._late.append((indices, vectors))
        else:
            self.rule.observe(indices, vectors)

    def wants_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        if self._closed or self._solving is not None or not self.rule.solves_in_background:
            return False
        table = self.rule.table
        return not sketched or (
            table is not None
            and (1 - late_share(table.rows.size)) * length <= trained < length
            and bool(table.seen.all())  # an example without a sketch would get a random place for an epoch
        )

    def start(self) -> None:
        self._solving = BackgroundThread("heeler-solve").submit(self.rule.solve)

    def next_order(self) -> None:
        self._settle()
        if not self._closed:
            self.rule.next_order()
        self._closed = False
        self._order = self.rule.order

    def forget(self, indices: IntArray) -> None:
        self._settle()
        self.rule.forget(indices)

    def consolidate(self, trained: int) -> None:
        """Nothing to bring together: one worker has seen everything."""

    def reading(self) -> AbstractContextManager[Any]:
        self._settle()  # sketches that wait for a solve are the newest
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        return order_state(self.rule, self._order, self._closed, self.layout)

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        self._settle()
        order, same = (None, True) if is_lazy(state) else resumed_order(state, self.layout)
        self.rule.load_state_dict(state["rule"])
        self._order, self._closed = self.rule.order if order is None else order, state["closed"]
        return same

    def metrics(self) -> dict[str, float]:
        return {}

    def _settle(self) -> None:
        """Wait for a solve under way, take its order, and file what had to wait for it."""
        if self._solving is not None:
            self.rule.commit(self._solving.result())
            self._solving, self._closed = None, True
        for indices, vectors in self._late:
            self.rule.observe(indices, vectors)
        self._late.clear()
