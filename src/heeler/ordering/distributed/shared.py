"""What a leader and its members have in common: an epoch in rounds, and one verdict at its end.

One rank leads and solves for all: two machines that solve the same table may differ in the last bit of a sum, and then
in everything after it; and a sketch travels once. An epoch is cut into rounds, at fixed positions (see `Rounds`), in
which every rank sends what it has seen since the last one, in a thread.

Before each transfer the ranks post how far they have come, so that the leader knows whom it waits for. Members wait in
their transfers: on a node of many ranks, asking again and again would take the processors that the solve needs. A
leader that hears of a fault leaves, and they find out at once.

Whether an order is used is decided once, in the transport's notices, where the first verdict stands: the leader's
"commit", after all ranks have said that they have their part, or any rank's "abort", after a bounded wait. So all ranks
use the new order, or none does. After a fault orders are random, and the ranks form again, with new connections and
notices, as soon as all of them have answered a roll call (see `RollCall`).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding import OrderingRule
from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.background import BackgroundThread, result_of
from heeler.ordering.dealing import Layout
from heeler.ordering.distributed.follower import tell_peers
from heeler.ordering.distributed.forming import Gathering, RollCall
from heeler.ordering.distributed.notices import Stopped, StoreLost
from heeler.ordering.distributed.rounds import Rounds
from heeler.ordering.distributed.transport import NO_ANSWER, ConnectionLost, RankFault, Transport
from heeler.ordering.distributed.wire import News, Rows, Wire, join, join_indices, without
from heeler.ordering.state import resumed_order

LONGEST = 4.0
"""Timeouts that a rank waits at an epoch's end, at most. A lost member costs one, a lost leader two; the rest is for
orders that were announced and not yet decided."""
STAGES = 1 << 20
"""More than an epoch has rounds: turn and round in one number that grows."""
LAST_WORD = 1.0
"""Seconds, but no more than a quarter of the timeout, in which a rank that has closed its connections has told why: it
does so before, if the store answers. Members wait twice as long: the leader, who may wait too, knows more."""
COMMIT = torch.ones(1, dtype=torch.uint8)
"""What the leader sends when its "commit" stands in the notices."""

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
        self.indices = layout.part(np.asarray(rule.order))
        self._length = len(self.indices)  # of a full epoch; after an elastic restart the first one is shorter
        self.fault: RankFault | None = None
        """Why these ranks exchange nothing for now; orders are random until they have formed again."""
        self._seed, self._peers, self._dim = seed, peers, dim
        self._closed = False  # rule.order is the next epoch's already
        self._wire = Wire(transport, len(rule.order), dim, halves=rule.keeps_table)
        longest = max(layout.shard_sizes or (self._length,))
        numbers = len(rule.order) * dim if rule.keeps_table else 0
        self._rounds = Rounds(longest, dim * self._wire.payload.itemsize, numbers, layout.batch_size)
        self._rounds_begun = 0
        self._turns = 0
        self._first_epoch = True
        self._waiting: list[Rows] = []
        self._late: list[Rows] = []  # seen in the last epoch, after its last round
        self._forgotten: list[IntArray] = []
        self._closing: Future[IntArray] | None = None
        self._thread = BackgroundThread("heeler-exchange")
        self._last_task: Future[Any] | None = None
        self._failed: RankFault | None = None
        self._voting = threading.Lock()
        self._roll_call, self._gathering = RollCall(transport), Gathering()
        self._using_rule = threading.Lock()  # held while the rule is fed or solves, which the thread does
        self._times = {"exchange_seconds": 0.0, "solve_seconds": 0.0, "waited_seconds": 0.0}

    # What differs

    def _meet(self, stage: int) -> None:  # noqa: B027
        """The leader waits until all have begun this stage. In the thread."""

    @abstractmethod
    def _exchange(self, news: News, trained: int) -> None:
        """One round: bring what this rank has seen to the leader. In the thread.

        trained: how far this rank has come, or -1.
        """

    @abstractmethod
    def _new_part(self, stage: int) -> IntArray:
        """This rank's part of the next order, which is not known yet. In the thread."""

    @abstractmethod
    def _verdict(self, turn: int, stage: int) -> str:
        """Say that this rank has its part, and wait for what is decided. In the thread."""

    @abstractmethod
    def _use(self, part: IntArray) -> None:
        """All ranks have the new order: this is the rank's part."""

    @abstractmethod
    def _resume(self, order: IntArray, state: dict[str, Any]) -> None:
        """Take over what else the leader's state holds."""

    def _note(self, trained: int) -> None:  # noqa: B027
        """This rank has come so far."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """See `Planner`."""

    # What the session calls; see `Planner`

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        if self.fault is None:
            self._waiting.append((indices + self.layout.offset(), vectors))

    def wants_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        self._note(trained)
        if self.fault is not None or self._rounds_begun == self._rounds.count:
            return False
        return trained >= self._rounds.due(self._rounds_begun + 1, length, first=self._first_epoch)

    def start(self) -> None:
        """Begin the round that is due; after the epoch's last one, the next order."""
        self._begin_round()
        if self._rounds_begun == self._rounds.count:
            self._begin_close()

    def next_order(self) -> None:
        """Close the epoch and go on to the next order; after a bounded wait, and without the others if need be."""
        started, deadline = time.perf_counter(), time.monotonic() + LONGEST * self.transport.timeout
        if self.fault is not None:
            idle = self._last_task is None or self._last_task.done()  # else it uses what is to be left
            if self._roll_call.all_meet(self._turns, able=idle):
                self._form_again()
        if self.fault is None:
            while self._rounds_begun < self._rounds.count:
                self._begin_round()
            if self._closing is None:
                self._begin_close()
            self._take_agreed(deadline)
        if self.fault is not None:
            self._take_random()
            self._late, self._waiting = [], []
            self._roll_call.answer(self._turns)
            # A rank that did not hear of the fault shall not wait for this one.
            self.transport.notices.decide_later(verdict_key(self._turns + 1), abort(self.fault))
        if self._peers is not None:
            tell_peers(self._peers, self.indices)
        self._late, self._waiting = [*self._late, *self._waiting], []
        self._closed, self._closing, self._rounds_begun, self._first_epoch = False, None, 0, False
        self._turns += 1
        self._note(0)
        self._times["waited_seconds"] = time.perf_counter() - started

    def forget(self, indices: IntArray) -> None:
        numbers = indices + self.layout.offset()
        self._late, self._waiting = without(self._late, numbers), without(self._waiting, numbers)
        self._forgotten.append(numbers)

    def consolidate(self, trained: int) -> None:
        """For the orders it does not matter when a sketch arrives, so a run that saves is the run that does not."""
        self._note(trained)
        if self.fault is not None:
            return
        timeout = self.transport.timeout
        try:
            absent = self._gathering.absent(self.transport.notices, self._stage, timeout)
            if absent:
                warn(
                    "consolidate() has to be called on every rank at the same step, and rank %s did not call it (this "
                    "rank waits for at most %g s): nothing was brought together, and a state saved now lacks sketches "
                    "that other ranks have seen",
                    ", ".join(map(str, absent)),
                    timeout,
                )
                return
            # In the thread, so behind a solve that is under way: what is new is about the next one.
            result_of(self._begin_sending(None, trained), LONGEST * timeout)
        except (RankFault, StoreLost, FutureTimeout) as fault:
            warn("the state lacks sketches that other ranks have seen: %s", fault or "no answer in time")

    def reading(self) -> AbstractContextManager[Any]:
        return self._using_rule

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        order, same = resumed_order(state, self.layout)
        self.rule.load_state_dict(state["rule"])
        self.indices = self.layout.part(order)
        self._closed = state["closed"]
        self._first_epoch = state.get("first_epoch", True)  # a state of a single process does not say
        self._late, self._waiting = [], []
        self._resume(order, state)
        return same

    def metrics(self) -> dict[str, float]:
        """Seconds of the last epoch's exchange, solve and wait, and the bytes so far."""
        traffic = {"bytes_sent": self.transport.bytes_sent, "bytes_received": self.transport.bytes_received}
        return {**self._times, **{name: float(value) for name, value in traffic.items()}}

    # The epoch's end

    @property
    def _stage(self) -> int:
        """How far this rank has come: the turn, and the rounds of it that have begun, the close counting as one."""
        return self._turns * STAGES + self._rounds_begun + (self._closing is not None)

    def _begin_round(self) -> None:
        if self._rounds_begun == 0:
            self._times["exchange_seconds"] = self._times["solve_seconds"] = 0.0
        self._rounds_begun += 1
        self.transport.notices.post("begun", self._stage)
        self._begin_sending(self._stage)

    def _begin_sending(self, stage: int | None, trained: int = -1) -> Future[None]:
        """Send what waits. stage: to meet at first, unless the ranks have met."""
        rows, late = join([*self._late, *self._waiting], self._dim), sum(indices.size for indices, _ in self._late)
        # Only if there are any: NumPy's first search for equals imports a package, on all ranks at the same moment.
        forgotten = np.unique(join_indices(self._forgotten)) if self._forgotten else join_indices([])
        news = News(rows, late, forgotten)
        self._late, self._waiting, self._forgotten = [], [], []
        return self._in_thread(self._turns, lambda: self._timed_exchange(stage, news, trained))

    def _timed_exchange(self, stage: int | None, news: News, trained: int) -> None:
        started = time.perf_counter()
        if stage is not None:
            self._meet(stage)
        self._exchange(news, trained)
        self._times["exchange_seconds"] += time.perf_counter() - started

    def _begin_close(self) -> None:
        turn, stage = self._turns, self._stage + 1
        # Of a resumed epoch it is known, on every rank.
        known = self.layout.part(np.asarray(self.rule.order)) if self._closed else None
        self._closing = self._in_thread(turn, lambda: self._close(turn, stage, known))

    def _close(self, turn: int, stage: int, known: IntArray | None) -> IntArray:
        part = self._new_part(stage) if known is None else known
        try:
            verdict = self._verdict(turn, stage)
        except StoreLost:  # perhaps just now it answers
            verdict = self.transport.notices.decide(verdict_key(turn), abort(RankFault(0, NO_ANSWER)))
        if verdict != "commit":
            raise Stopped(verdict)
        return part

    def _vote(self, stage: int) -> None:
        """Say that this rank has its part; not any more, if the epoch's end has gone on without it."""
        with self._voting:
            if self._failed is not None:
                raise self._failed
            self.transport.notices.post("at", stage)

    def _take_agreed(self, deadline: float) -> None:
        """Use the new order if all have it."""
        assert self._closing is not None
        try:
            self._use(result_of(self._closing, max(deadline - time.monotonic(), 0.01)))
        except RankFault as fault:
            self._give_up(fault)
        except FutureTimeout:
            self._run_out()

    def _run_out(self) -> None:
        """The longest wait is over, and the thread has not ended."""
        assert self._closing is not None
        fault = RankFault(0, NO_ANSWER)
        with self._voting:
            self._failed = self._failed or fault  # from here on the thread does not vote
        try:
            verdict = self.transport.notices.decide(verdict_key(self._turns), abort(fault))
            if verdict == "commit":  # at this very moment
                self._use(result_of(self._closing, 1.0))
                return
            fault = fault_of(verdict)
        except (StoreLost, FutureTimeout, RankFault):
            pass
        self._give_up(fault)

    def _give_up(self, fault: RankFault) -> None:
        self.fault = fault
        warn(
            "the workers could not agree on the next order, because of rank %d (%s): orders are random, and training "
            "goes on. When all ranks answer at an epoch's end, orders are coordinated again.",
            fault.rank,
            fault.why,
        )

    def _form_again(self) -> None:
        """All ranks are here: leave what is left of the group, and go on with a new one."""
        self.transport.begin(self._turns + 1)
        self.fault = self._failed = None
        self._gathering = Gathering()
        self._start_over()
        self._in_thread(self._turns, self._connect)
        warn("all ranks answer again: from here on they look for common orders as before the fault")

    @property
    def _moment(self) -> float:
        return min(LAST_WORD, self.transport.timeout / 4)

    def _connect(self) -> None:
        notices, turn = self.transport.notices, self._turns
        try:
            self.transport.connect(self.transport.timeout)
            notices.post("tried", 1)
        except RuntimeError:  # which does not say for whom it has waited
            notices.post("tried", 1)
            late = notices.behind("tried", 1, range(self.transport.size), self._moment, verdict_key(turn))
            raise RankFault(late[0] if late else 0, NO_ANSWER) from None

    def _start_over(self) -> None:  # noqa: B027
        """Drop what was collected of an epoch that nobody has seen to its end."""

    def _take_random(self) -> IntArray:
        order = self.layout.at_random(len(self.rule.order), self._seed, self._turns)
        self.indices = self.layout.part(order)
        return order

    def _in_thread(self, turn: int, task: Callable[[], T]) -> Future[T]:
        future = self._thread.submit(lambda: self._guarded(turn, task))
        self._last_task = future
        return future

    def _guarded(self, turn: int, task: Callable[[], T]) -> T:
        """Do a task of this turn, unless one before it has failed: nobody waits twice for a rank that is lost."""
        if self._failed is None:
            left = False
            try:
                return task()
            except RankFault as error:
                fault = RankFault(error.rank, error.why)  # without the traceback, which holds what the task held
                left = isinstance(error, ConnectionLost)
            except Stopped as stopped:
                fault = fault_of(stopped.word)
            except StoreLost as lost:
                fault = RankFault(0, f"{lost}, which usually lives in rank 0")
            except Exception as error:
                fault = RankFault(self.transport.rank, f"{type(error).__name__}: {error}")
            with suppress(StoreLost):  # the first rank to see a fault says what it was: others may see what follows
                if left:
                    self.transport.notices.decided(verdict_key(turn), self._moment * (1 + (self.transport.rank > 0)))
                word = self.transport.notices.decide(verdict_key(turn), abort(fault))
                fault = fault_of(word) if word != "commit" else fault
            self._failed = fault
            self.transport.close()
        self.transport.notices.decide_later(verdict_key(turn), abort(self._failed))
        raise self._failed


def verdict_key(turn: int) -> str:
    """Where the verdict on the order after `turn` stands."""
    return f"verdict/{turn}"


def abort(fault: RankFault) -> str:
    """The verdict that a fault leads to."""
    return f"abort {fault.rank} {fault.why}"


def fault_of(verdict: str) -> RankFault:
    """The fault that led to a verdict."""
    _, rank, why = verdict.split(" ", 2)
    return RankFault(int(rank), why)
