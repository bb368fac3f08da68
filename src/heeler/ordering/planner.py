"""From one epoch to the next: feed the rule what was seen, and have the next order ready when the epoch ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from heeler.herding import OrderingRule, Solution
from heeler.herding.lazy import LazyOrder, Order
from heeler.herding.validate import IntArray
from heeler.ordering.background import BackgroundThread, yield_to_training
from heeler.ordering.epoch import Epoch, Plan
from heeler.ordering.partition import Partition
from heeler.ordering.state import is_lazy, order_state, resumed_order

LATE = 0.03
"""The share of a sketched epoch that a large solve does not wait for: it runs in a thread meanwhile, on a table whose
rows of these examples are those of the sketched epoch before. A larger one would leave less to wait for, and costs some
networks a part of their gain (`benchmarks.early_solves`)."""
EARLY_SIZE = 1 << 23
"""Numbers in a table from which that pays: below, a solve takes less than a tenth of a second at the epoch's end."""


FORGET = 1 << 24
"""Examples whose sketches are dropped at a time: no list as long as a huge dataset is ever built."""


def drop_unknown(rule: OrderingRule) -> bool:
    """Whether a rule's sketches do not know their own examples; if so it forgets them, and its orders are random."""
    table = rule.table
    if table is None or not table.own.at_chance:
        return False
    if table.share_seen:
        for start in range(0, len(table), FORGET):
            rule.forget(np.arange(start, min(start + FORGET, len(table)), dtype=np.int64))
    return True


def late_share(numbers: int) -> float:
    """The share of an epoch beside which a table of so many numbers is solved, from the second sketched epoch on."""
    return LATE if numbers >= EARLY_SIZE else 0.0


class Planner(Protocol):
    """Feeds a rule and finds the order of the next epoch; of one process, or of many that share an order.

    It keeps no order: the epoch, with the order that it has, is handed to it where it needs one.
    """

    partition: Partition
    """How an order of all examples becomes this worker's."""
    rule: OrderingRule
    """The ordering rule. Of many workers the leader's is fed, and the others' only gives the first order."""
    sees_all: bool
    """Whether the sketches of all workers meet here, and with them the state that a restart needs."""
    gave_up: bool
    """No more sketches are wanted: they do not know their own examples (`herding.own_check`) and were dropped, or the
    rule has found that its orders balance nothing."""

    def first(self) -> Plan:
        """The order of the first epoch."""

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        """Take note of trained examples: (b,) indices, (b, K) vectors."""

    works_beside: bool
    """Whether there may be something to `start` in an epoch without sketches, too."""

    def wants_start(self, epoch: Epoch, trained: int) -> bool:
        """Whether now, with `trained` positions of the epoch done, is the time to call `start`."""

    def start(self, epoch: Epoch) -> None:
        """Begin to work on the order after `epoch` while that goes on."""

    def finish(self, epoch: Epoch, *, may_go_on: bool = False) -> None:
        """This worker's training of `epoch` has come to its end; waits for nobody.

        may_go_on: it was left in the middle, and a state that is saved now goes on there.
        """

    def next(self, epoch: Epoch) -> Plan:
        """Close `epoch`; returns the order of the next one."""

    def forget(self, indices: IntArray) -> None:
        """Drop what was stored for `indices`, for it may be about other examples."""

    def consolidate(self, epoch: Epoch, trained: int, also: Callable[[], None]) -> None:
        """Bring what all workers have seen to the leader; all of them call it at the same step.

        trained: how many examples of the epoch this worker has trained on. also: an exchange of the caller's own.
        """

    def reading(self) -> AbstractContextManager[Any]:
        """Hold this to read the rule's table, with all that this process knows in it, while nobody writes to it."""

    def state_dict(self, epoch: Epoch) -> dict[str, Any]:
        """All state as a copy."""

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Plan, bool]:
        """Go on where `state_dict` was taken: the order of its epoch, and whether positions in it still hold."""

    def metrics(self) -> dict[str, float]:
        """What there is to log besides the rule's own."""

    def open(self, epoch: Epoch) -> None:
        """Have threads and connections again after `close`; all workers call it in the same epoch."""

    def close(self, epoch: Epoch | None) -> None:
        """End threads and leave connections; what was seen stays. Other workers that wait for this one find out."""


class LocalPlanner:
    """The planner of one process, without a stall where it can.

    A solve that starts early reads the table as it stood at a fixed position of the epoch; what comes after it waits
    in `_late` until the solve is done. So the orders depend on positions alone, never on how fast a thread runs.
    """

    sees_all, works_beside = True, False

    def __init__(self, rule: OrderingRule, partition: Partition) -> None:
        self.rule, self.partition = rule, partition
        rule.warm_up()
        self.gave_up = False
        self._closed = False  # rule.order is the next epoch's already
        self._late: list[tuple[IntArray, NDArray[np.float32]]] = []
        self._solving: Future[Solution | None] | None = None

    def first(self) -> Plan:
        return self._plan(self.rule.order)

    def _plan(self, order: Order) -> Plan:
        if isinstance(order, LazyOrder) and self.partition.workers == 1:
            return Plan(order, order)
        return Plan(self.partition.part(np.asarray(order)), order)

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        if self._solving is not None:
            self._late.append((indices, vectors))
        else:
            self.rule.observe(indices, vectors)

    def wants_start(self, epoch: Epoch, trained: int) -> bool:
        if self._closed or self._solving is not None or not self.rule.solves_in_background:
            return False
        if self.rule.gpu_solver is not None:  # takes little time, and must not run beside training
            return False
        table, length = self.rule.table, len(epoch.order)
        return (
            table is not None
            and (1 - late_share(table.rows.size)) * length <= trained < length
            and bool(table.seen.all())  # an example without a sketch would get a random place for an epoch
        )

    def start(self, epoch: Epoch) -> None:
        thread = BackgroundThread("heeler-solve")
        thread.submit(yield_to_training)
        self._solving = thread.submit(self.rule.solve)
        thread.close(wait=0.0)  # it ends with its task

    def finish(self, epoch: Epoch, *, may_go_on: bool = False) -> None:
        """Nobody waits for this worker."""
        self._give_up_unknown()

    def _give_up_unknown(self) -> None:
        table = self.rule.table
        if table is not None and table.own.at_chance:
            self._settle()
            self.gave_up = drop_unknown(self.rule)

    def next(self, epoch: Epoch) -> Plan:
        self._settle()
        self._give_up_unknown()
        if not self._closed:
            self.rule.next_order()
        self._closed = False
        self.gave_up = self.gave_up or self.rule.useless
        return self._plan(self.rule.order)

    def forget(self, indices: IntArray) -> None:
        self._settle()
        self.rule.forget(indices)

    def consolidate(self, epoch: Epoch, trained: int, also: Callable[[], None]) -> None:
        """One worker has seen everything, or each has an order of its own."""
        also()

    def reading(self) -> AbstractContextManager[Any]:
        self._settle()  # sketches that wait for a solve are the newest
        return nullcontext()

    def state_dict(self, epoch: Epoch) -> dict[str, Any]:
        self._settle()
        return order_state(self.rule, epoch.plan.whole, self._closed, self.partition)

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Plan, bool]:
        self._settle()
        order, same = (None, True) if is_lazy(state) else resumed_order(state, self.partition)
        self.rule.load_state_dict(state["rule"])
        self._closed, self.gave_up = state["closed"], state.get("gave_up", False)
        return self._plan(self.rule.order if order is None else order), same

    def metrics(self) -> dict[str, float]:
        return {}

    def open(self, epoch: Epoch) -> None:
        """A solve has its own thread, which ends with it."""

    def close(self, epoch: Epoch | None) -> None:
        if epoch is not None:  # a finalizer must not wait for a solve, whose thread ends by itself
            self._settle()
            self._give_up_unknown()
        self.rule.close()

    def _settle(self) -> None:
        """Wait for a solve under way, take its order, and store what had to wait for it."""
        if self._solving is not None:
            solving, self._solving = self._solving, None
            self.rule.commit(solving.result())
            self._closed = True
        for indices, vectors in self._late:
            self.rule.observe(indices, vectors)
        self._late.clear()
