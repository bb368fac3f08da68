"""What a leader and its members have in common: an epoch in rounds, and one verdict at its end.

One rank leads and solves for all: two machines that solve the same table may differ in the last bit of a sum, and then
in everything after it; and a sketch travels once. An epoch is cut into rounds, at fixed positions, in which every rank
sends what it has seen since the last one, in a thread. Where the rule keeps a table, from the second epoch on, the last
round is early enough for the next order to be there when the epoch ends; what comes after it goes with the next epoch.

Whether an order is used is decided once, in the transport's store, where the first verdict stands: the leader's
"commit", after all ranks have their part, or any rank's "abort", after a bounded wait. So all use it, or none does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from heeler.herding import OrderingRule
from heeler.herding.validate import IntArray
from heeler.ordering.background import BackgroundThread
from heeler.ordering.dealing import Layout
from heeler.ordering.distributed.follower import tell_peers
from heeler.ordering.distributed.transport import RankFault, Transport
from heeler.ordering.distributed.wire import Rows, Wire, join, join_indices
from heeler.ordering.planner import EARLY_FROM
from heeler.ordering.state import resumed_order

logger = logging.getLogger("heeler")

ROUND_BYTES = 1 << 22
"""Sketches that a rank keeps back, at most, before it sends them."""

T = TypeVar("T")


class SharedPlanner(ABC):
    """The planner of one of several ranks; `Leader` or `Member`.

    Args:
        transport: to the other ranks.
        rule: made alike on every rank, for the first order; only the leader's is fed.
        layout: how the rule's order becomes the ranks' indices.
        dim: numbers per sketch.
        seed: of the random orders that stand in after a fault.
        peers: to the ranks that train on the same examples, which are told this rank's indices; see `Follower`.
    """

    sees_all: bool

    def __init__(
        self,
        transport: Transport,
        rule: OrderingRule,
        layout: Layout,
        *,
        dim: int,
        seed: int,
        peers: Transport | None = None,
    ) -> None:
        self.transport, self.rule, self.layout = transport, rule, layout
        self.indices = layout.part(rule.order)
        self._length = len(self.indices)  # of a full epoch; after an elastic restart the first one is shorter
        self.fault: RankFault | None = None
        """Why these ranks exchange nothing any more; orders are random from then on."""
        self._seed, self._peers, self._dim = seed, peers, dim
        self._closed = False  # rule.order is the next epoch's already
        self._wire = Wire(transport, len(rule.order), dim, halves=rule.keeps_table)
        longest = max(layout.shard_sizes or (self._length,))
        self._rounds = max(1, math.ceil(longest * dim * self._wire.payload.itemsize / ROUND_BYTES))
        self._rounds_begun = 0
        self._turns = 0
        self._first_epoch = True
        self._waiting: list[Rows] = []
        self._forgotten: list[IntArray] = []
        self._closing: Future[IntArray] | None = None
        self._thread = BackgroundThread("heeler-exchange")
        self._failed: RankFault | None = None
        self._using_rule = threading.Lock()  # held while the rule is fed or solves, which the thread does
        self._times = {"exchange_seconds": 0.0, "solve_seconds": 0.0, "waited_seconds": 0.0}

    # What differs

    @abstractmethod
    def _exchange(self, rows: Rows, gone: IntArray) -> None:
        """One round: bring this rank's new sketches, and the numbers to forget, to the leader. In the thread."""

    @abstractmethod
    def _close(self, turn: int) -> IntArray:
        """This rank's part of the next order. In the thread."""

    @abstractmethod
    def _commit_known(self, turn: int) -> None:
        """A resumed epoch's next order was known already: say so. In the thread."""

    @abstractmethod
    def _use(self, part: IntArray) -> None:
        """All ranks have the new order: this is the rank's part."""

    @abstractmethod
    def _report(self, turn: int, fault: RankFault) -> None:
        """A task of this turn has failed here. In the thread."""

    @abstractmethod
    def _resume(self, order: IntArray, state: dict[str, Any]) -> None:
        """Take over what else the leader's state holds."""

    @property
    @abstractmethod
    def _patience(self) -> float:
        """Seconds to wait at the epoch's end, in all."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """See `Planner`."""

    # What the session calls; see `Planner`

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        if self.fault is None:
            self._waiting.append((indices + self.layout.offset(), vectors))

    def wants_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        rounds = self._rounds if self._early else self._rounds - 1  # the last one waits for the epoch's end
        due = (self._rounds_begun + 1) / self._rounds * (EARLY_FROM if self._early else 1.0) * length
        return self.fault is None and self._rounds_begun < rounds and trained >= due

    def start(self) -> None:
        """Begin the round that is due; after the epoch's last one, the next order."""
        self._begin_round()
        if self._early and self._rounds_begun == self._rounds:
            self._begin_close()

    def next_order(self) -> None:
        """Close the epoch and go on to the next order; after a bounded wait, and without the others if need be."""
        started = time.perf_counter()
        if self.fault is None:
            while self._rounds_begun < self._rounds:
                self._begin_round()
            if self._closing is None:
                self._begin_close()
            self._take_agreed()
        if self.fault is not None:
            self._take_random()
            self._waiting.clear()
        if self._peers is not None:
            tell_peers(self._peers, self.indices)
        self._closed, self._closing, self._rounds_begun, self._first_epoch = False, None, 0, False
        self._turns += 1
        self._times["waited_seconds"] = time.perf_counter() - started

    def forget(self, indices: IntArray) -> None:
        numbers = indices + self.layout.offset()
        kept = [(rows, vectors, ~np.isin(rows, numbers)) for rows, vectors in self._waiting]
        self._waiting = [(rows[keep], vectors[keep]) for rows, vectors, keep in kept]
        self._forgotten.append(numbers)

    def consolidate(self) -> None:
        """For the orders it does not matter when a sketch arrives, so a run that saves is the run that does not."""
        if self.fault is not None:
            return
        try:
            # In the thread, so behind a solve that is under way: what is new is about the next one.
            self._begin_sending().result(4.0 * self.transport.timeout)
        except (RankFault, FutureTimeout) as fault:
            logger.warning("the state lacks sketches that other ranks have seen: %s", fault or "no answer in time")

    def reading(self) -> AbstractContextManager[Any]:
        return self._using_rule

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        order, same = resumed_order(state, self.layout)
        self.rule.load_state_dict(state["rule"])
        self.indices = self.layout.part(order)
        self._closed = state["closed"]
        self._first_epoch = state.get("first_epoch", True)  # a state of a single process does not say
        self._waiting.clear()
        self._resume(order, state)
        return same

    def metrics(self) -> dict[str, float]:
        """Seconds of the last epoch's exchange, solve and wait, and the bytes so far."""
        traffic = {"bytes_sent": self.transport.bytes_sent, "bytes_received": self.transport.bytes_received}
        return {**self._times, **{name: float(value) for name, value in traffic.items()}}

    # The epoch's end

    @property
    def _early(self) -> bool:
        return self.rule.keeps_table and not self._first_epoch

    def _begin_round(self) -> None:
        if self._rounds_begun == 0:
            self._times["exchange_seconds"] = self._times["solve_seconds"] = 0.0
        self._rounds_begun += 1
        self._begin_sending()

    def _begin_sending(self) -> Future[None]:
        rows, gone = join(self._waiting, self._dim), join_indices(self._forgotten)
        self._waiting, self._forgotten = [], []
        return self._in_thread(self._turns, lambda: self._timed_exchange(rows, gone))

    def _timed_exchange(self, rows: Rows, gone: IntArray) -> None:
        started = time.perf_counter()
        self._exchange(rows, gone)
        self._times["exchange_seconds"] += time.perf_counter() - started

    def _begin_close(self) -> None:
        turn = self._turns
        if self._closed:
            known = self.layout.part(self.rule.order)
            self._closing = self._thread.submit(lambda: known)
            self._thread.submit(lambda: self._commit_known(turn))
        else:
            self._closing = self._in_thread(turn, lambda: self._close(turn))

    def _take_agreed(self) -> None:
        """Use the new order if all have it."""
        assert self._closing is not None
        key = verdict_key(self._turns)
        try:
            part = self._closing.result(self._patience)
            verdict = self.transport.decided(key, self._patience, "abort 0 it reached no verdict in time")
        except RankFault as fault:
            # When a transfer fails, gloo closes every connection: the leader knows best which rank was at fault.
            verdict = self.transport.decided(key, self.transport.timeout, abort(fault))
        except FutureTimeout:
            verdict = self.transport.decide(key, "abort 0 it did not answer in time")
        if verdict == "commit":
            self._use(part)
            return
        _, rank, why = verdict.split(" ", 2)
        self.fault = RankFault(int(rank), why)
        logger.warning(
            "the workers could not agree on the next order, because of rank %s (%s): orders are random from now on, "
            "and training goes on. Restart from a checkpoint to have them coordinated again.",
            rank,
            why,
        )

    def _take_random(self) -> IntArray:
        order = self.layout.at_random(len(self.rule.order), self._seed, self._turns)
        self.indices = self.layout.part(order)
        return order

    def _in_thread(self, turn: int, task: Callable[[], T]) -> Future[T]:
        return self._thread.submit(lambda: self._guarded(turn, task))

    def _guarded(self, turn: int, task: Callable[[], T]) -> T:
        """Do a task of this turn, unless one before it has failed: nobody waits twice for a rank that is lost."""
        if self._failed is None:
            try:
                return task()
            except RankFault as fault:
                self._failed = fault
            except Exception as error:
                self._failed = RankFault(self.transport.rank, f"{type(error).__name__}: {error}")
            self._report(turn, self._failed)
        raise self._failed


def verdict_key(turn: int) -> str:
    """Where the verdict on the order after `turn` stands."""
    return f"{turn}/verdict"


def abort(fault: RankFault) -> str:
    """The verdict that a fault leads to."""
    return f"abort {fault.rank} {fault.why}"
