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
from heeler.ordering.distributed.rendezvous import Gathering, RollCall
from heeler.ordering.distributed.rounds import Rounds
from heeler.ordering.distributed.store import Stopped, StoreLost
from heeler.ordering.distributed.transport import NO_ANSWER, ConnectionLost, RankFault, Transport
from heeler.ordering.distributed.wire import News, Rows, Wire, join, join_indices, without
from heeler.ordering.epoch import Epoch, Plan
from heeler.ordering.partition import Partition
from heeler.ordering.state import resumed_order

LONGEST = 4.0
"""Timeouts that a rank waits at an epoch's end, at most. A lost member costs one, a lost leader two; the rest is for
orders that were announced and not yet decided."""
STAGES = 1 << 20
"""More than an epoch has rounds: turn and round in one number that grows."""
LAST_WORD = 1.0
"""Seconds, but no more than a quarter of the timeout, in which a rank that has closed its connections has told why: it
does so before, if the store answers. Members wait twice as long: the leader, who may wait too, knows more."""
CLOSE_PATIENCE = 5.0
"""Seconds that `close` waits for the thread: a solve under way cannot be stopped, and a transfer ends with its time."""
COMMIT = torch.ones(1, dtype=torch.uint8)
"""What the leader sends when its "commit" stands in the notices."""

T = TypeVar("T")


class SharedPlanner(ABC):
    """The planner of one of several ranks; `Leader` or `Member`.

    Args:
        transport: to the other ranks.
        rule: made alike on every rank, for the first order; only the leader's is fed.
        partition: how the rule's order becomes the ranks' indices.
        dim: dimensions of a sketch.
        seed: of the random orders that stand in after a fault.
        peers: to the ranks that train on the same examples, which are told this rank's indices; see `Follower`.
    """

    sees_all: bool
    works_beside = True

    def __init__(
        self,
        transport: Transport,
        rule: OrderingRule,
        partition: Partition,
        *,
        dim: int,
        seed: int,
        peers: Transport | None = None,
    ) -> None:
        self.transport, self.rule, self.partition = transport, rule, partition
        self._length = len(self.first().part)  # of a full epoch; after an elastic restart the first one is shorter
        self.fault: RankFault | None = None
        """Why these ranks exchange nothing for now; orders are random until they have formed again."""
        self.gave_up = False
        self._seed, self._peers, self._dim = seed, peers, dim
        self._closed = False  # rule.order is the next epoch's already
        self._all_closed = False  # and on every rank, since a state was loaded
        self._may_go_on = False  # the epoch was left in the middle: a state that is saved takes the close back
        self._wire = Wire(transport, len(rule.order), dim, halves=rule.keeps_table)
        longest = max(partition.shard_sizes or (self._length,))
        numbers = len(rule.order) * dim if rule.keeps_table else 0
        self._rounds = Rounds(longest, dim * self._wire.payload.itemsize, numbers, partition.batch_size)
        self._number = 0  # of the epoch whose rounds have begun
        self._rounds_begun = 0
        self._first_epoch = True
        self._waiting: list[Rows] = []
        self._late: list[Rows] = []  # seen in the last epoch, after its last round
        self._forgotten: list[IntArray] = []
        self._closing: Future[IntArray] | None = None
        self._thread: BackgroundThread | None = BackgroundThread("heeler-exchange")
        self._last_task: Future[Any] | None = None
        self._failed: RankFault | None = None
        self._voting = threading.Lock()
        self._roll_call, self._gathering = RollCall(transport), Gathering()
        self._using_rule = threading.Lock()  # held while the rule is fed or solves, which the thread does
        self._times = {"exchange_seconds": 0.0, "solve_seconds": 0.0, "waited_seconds": 0.0}

    # What differs

    def _meet(self, number: int, stage: int) -> None:  # noqa: B027
        """The leader waits until all have begun this stage. In the thread."""

    @abstractmethod
    def _exchange(self, number: int, news: News, trained: int) -> None:
        """One round: bring what this rank has seen to the leader. In the thread.

        trained: how far this rank has come, or -1.
        """

    @abstractmethod
    def _new_part(self, epoch: Epoch) -> IntArray:
        """This rank's part of the order after `epoch`, `announced`, which is not known to all yet. In the thread."""

    @abstractmethod
    def _verdict(self, number: int, stage: int) -> str:
        """Say that this rank has its part, and wait for what is decided. In the thread."""

    @abstractmethod
    def _plan(self, part: IntArray, whole: IntArray) -> Plan:
        """A rank's part, and the order of all where the rank vouches for it."""

    @abstractmethod
    def _resume(self, state: dict[str, Any]) -> None:
        """Take over what else the leader's state holds."""

    def _note(self, number: int, trained: int) -> None:  # noqa: B027
        """This rank has come so far in epoch `number`."""

    @abstractmethod
    def state_dict(self, epoch: Epoch) -> dict[str, Any]:
        """See `Planner`."""

    # What the session calls; see `Planner`

    def first(self) -> Plan:
        order = np.asarray(self.rule.order)
        return self._plan(self.partition.part(order), order)

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        if self.fault is None:
            self._waiting.append((indices + self.partition.offset(), vectors))

    def wants_start(self, epoch: Epoch, trained: int) -> bool:
        self._note(epoch.number, trained)
        if self.fault is not None or self._rounds_begun == self._rounds.count:
            return False
        return trained >= self._rounds.due(self._rounds_begun + 1, len(epoch.order), first=self._first_epoch)

    def start(self, epoch: Epoch) -> None:
        """Begin the round that is due; after the epoch's last one, the next order."""
        self._begin_round(epoch)
        if self._rounds_begun == self._rounds.count:
            self._begin_close(epoch)

    def finish(self, epoch: Epoch, *, may_go_on: bool = False) -> None:
        """Begin all that is left to do for the next order, so that no rank has to wait for this one's loop."""
        if self.fault is None and self._thread is not None:
            self._may_go_on = may_go_on and self._closing is None
            while self._rounds_begun < self._rounds.count:
                self._begin_round(epoch)
            if self._closing is None:
                self._begin_close(epoch)

    def next(self, epoch: Epoch) -> Plan:
        """Close the epoch; after a bounded wait, and without the other ranks if need be."""
        started, deadline = time.perf_counter(), time.monotonic() + LONGEST * self.transport.timeout
        number, plan = epoch.number, None
        self.open(epoch)
        if self.fault is not None:
            idle = self._last_task is None or self._last_task.done()  # else it uses what is to be left
            if self._thread is not None and self._roll_call.all_meet(number, able=idle):
                self._form_again(number)
        if self.fault is None:
            self.finish(epoch)
            plan = self._agreed(number, deadline)
        if self.fault is not None:
            order = self.partition.at_random(len(self.rule.order), self._seed, number)
            plan = self._plan(self.partition.part(order), order)
            self._late, self._waiting = [], []
            self._roll_call.answer(number)
            # A rank that did not hear of the fault shall not wait for this one.
            self.transport.notices.decide_later(verdict_key(number + 1), abort(self.fault))
        assert plan is not None
        if self._peers is not None:
            part = torch.from_numpy(announced(np.asarray(plan.part), self.gave_up))
            self._peers.tell_each(part, range(1, self._peers.size))  # one that lags takes it when it gets there
        self._late, self._waiting = [*self._late, *self._waiting], []
        self._closed = self._all_closed = self._first_epoch = self._may_go_on = False
        self._closing, self._rounds_begun = None, 0
        self._note(number + 1, 0)
        self._times["waited_seconds"] = time.perf_counter() - started
        return plan

    def open(self, epoch: Epoch | None) -> None:
        if self._thread is not None:
            return
        try:
            for transport in (self.transport, self._peers):
                if transport is not None:
                    transport.open()
        except RuntimeError:
            self._give_up(RankFault(0, NO_ANSWER))
            return
        self._thread = BackgroundThread("heeler-exchange")
        self._gathering, self._failed, self.fault, self._last_task = Gathering(), None, None, None

    def close(self, epoch: Epoch | None) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if self._last_task is not None and not self._last_task.done():
            with self._voting:
                self._failed = self._failed or RankFault(self.transport.rank, "it was closed")
            # So that the leader does not go on waiting, in this process or another; the members find out by that.
            self.transport.notices.decide_later(verdict_key(self._number), abort(self._failed))
        thread.close(CLOSE_PATIENCE)
        agreed = self._closing is not None and self._closing.done() and self._closing.exception() is None
        if not agreed:  # else the others may have gone on with that order already
            self._closing, self._rounds_begun = None, 0

    def forget(self, indices: IntArray) -> None:
        numbers = indices + self.partition.offset()
        self._late, self._waiting = without(self._late, numbers), without(self._waiting, numbers)
        self._forgotten.append(numbers)

    def consolidate(self, epoch: Epoch, trained: int, also: Callable[[], None]) -> None:
        """For the orders it does not matter when a sketch arrives, so a run that saves is the run that does not."""
        self._note(epoch.number, trained)
        if self.fault is not None or self._thread is None:
            return
        timeout, stage = self.transport.timeout, self._stage(epoch.number)
        if self._closing is not None:  # through with the epoch: a rank that looked at the next one is no further
            stage = (epoch.number + 1) * STAGES
            trained = trained if self._may_go_on else -1
        trained = trained or -1  # a rank that has not begun is where the leader is
        try:
            absent = self._gathering.absent(self.transport.notices, stage, timeout)
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
            self._begin_sending(epoch.number, None, trained)
            result_of(self._in_thread(epoch.number, also), LONGEST * timeout)
        except (RankFault, StoreLost, FutureTimeout) as fault:
            warn("the state lacks sketches that other ranks have seen: %s", fault or "no answer in time")

    def reading(self) -> AbstractContextManager[Any]:
        return self._using_rule

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Plan, bool]:
        order, same = resumed_order(state, self.partition)
        # Nothing under way may meet what is loaded. And epochs come again, whose numbers must not meet what was said of
        # them before: so the ranks leave each other, and connect again. Every rank loads, so all of them do.
        self.close(None)
        self.transport.close()
        try:
            self.rule.load_state_dict(state["rule"])
            self._closing, self._rounds_begun = None, 0
            self._closed = self._all_closed = state["closed"]
            self.gave_up = state.get("gave_up", False)
            self._first_epoch = state.get("first_epoch", True)  # a state of a single process does not say
            self._late, self._waiting, self._forgotten = [], [], []
            self._resume(state)
        finally:
            self.open(None)
        return self._plan(self.partition.part(order), order), same

    def metrics(self) -> dict[str, float]:
        """Seconds of the last epoch's exchange, solve and wait, and the bytes so far."""
        traffic = {"bytes_sent": self.transport.bytes_sent, "bytes_received": self.transport.bytes_received}
        return {**self._times, **{name: float(value) for name, value in traffic.items()}}

    # The epoch's end

    def _stage(self, number: int) -> int:
        """How far this rank has come: the epoch, and the rounds of it that have begun, the close counting as one."""
        return number * STAGES + self._rounds_begun + (self._closing is not None)

    def _begin_round(self, epoch: Epoch) -> None:
        if self._rounds_begun == 0:
            self._times["exchange_seconds"] = self._times["solve_seconds"] = 0.0
        self._rounds_begun += 1
        self._number = epoch.number
        stage = self._stage(epoch.number)
        self.transport.notices.post("begun", stage)
        self._begin_sending(epoch.number, stage)

    def _begin_sending(self, number: int, stage: int | None, trained: int = -1) -> Future[None]:
        """Send what waits. stage: to meet at first, unless the ranks have met."""
        rows, late = join([*self._late, *self._waiting], self._dim), sum(indices.size for indices, _ in self._late)
        # Only if there are any: NumPy's first search for equals imports a package, on all ranks at the same moment.
        forgotten = np.unique(join_indices(self._forgotten)) if self._forgotten else join_indices([])
        news = News(rows, late, forgotten)
        self._late, self._waiting, self._forgotten = [], [], []
        return self._in_thread(number, lambda: self._timed_exchange(number, stage, news, trained))

    def _timed_exchange(self, number: int, stage: int | None, news: News, trained: int) -> None:
        started = time.perf_counter()
        if stage is not None:
            self._meet(number, stage)
        self._exchange(number, news, trained)
        self._times["exchange_seconds"] += time.perf_counter() - started

    def _begin_close(self, epoch: Epoch) -> None:
        stage = self._stage(epoch.number) + 1
        # Of a resumed epoch it is known, on every rank.
        order = np.asarray(self.rule.order) if self._all_closed else None
        known = None if order is None else announced(self.partition.part(order), self.gave_up)
        self._closing = self._in_thread(epoch.number, lambda: self._close(epoch, stage, known))

    def _close(self, epoch: Epoch, stage: int, known: IntArray | None) -> IntArray:
        part = self._new_part(epoch) if known is None else known
        try:
            verdict = self._verdict(epoch.number, stage)
        except StoreLost:  # perhaps just now it answers
            verdict = self.transport.notices.decide(verdict_key(epoch.number), abort(RankFault(0, NO_ANSWER)))
        if verdict != "commit":
            raise Stopped(verdict)
        return part

    def _vote(self, stage: int) -> None:
        """Say that this rank has its part; not any more, if the epoch's end has gone on without it."""
        with self._voting:
            if self._failed is not None:
                raise self._failed
            self.transport.notices.post("at", stage)

    def _agreed(self, number: int, deadline: float) -> Plan | None:
        """The new order if all have it."""
        assert self._closing is not None
        try:
            return self._planned(result_of(self._closing, max(deadline - time.monotonic(), 0.01)))
        except RankFault as fault:
            self._give_up(fault)
        except FutureTimeout:
            return self._run_out(number)
        return None

    def _planned(self, told: IntArray) -> Plan:
        self.gave_up = bool(told[-1])
        return self._plan(told[:-1], np.asarray(self.rule.order))

    def _run_out(self, number: int) -> Plan | None:
        """The longest wait is over, and the thread has not ended."""
        assert self._closing is not None
        fault = RankFault(0, NO_ANSWER)
        with self._voting:
            self._failed = self._failed or fault  # from here on the thread does not vote
        try:
            verdict = self.transport.notices.decide(verdict_key(number), abort(fault))
            if verdict == "commit":  # at this very moment
                return self._planned(result_of(self._closing, 1.0))
            fault = fault_of(verdict)
        except (StoreLost, FutureTimeout, RankFault):
            pass
        self._give_up(fault)
        return None

    def _give_up(self, fault: RankFault) -> None:
        self.fault = fault
        warn(
            "the workers could not agree on the next order, because of rank %d (%s): orders are random, and training "
            "goes on. When all ranks answer at an epoch's end, orders are coordinated again.",
            fault.rank,
            fault.why,
        )

    def _form_again(self, number: int) -> None:
        """All ranks are here: leave what is left of the group, and go on with a new one."""
        self.transport.begin(number + 1)
        self.fault = self._failed = None
        self._gathering = Gathering()
        self._start_over()
        self._in_thread(number, lambda: self._connect(number))
        warn("all ranks answer again: from here on they look for common orders as before the fault")

    @property
    def _moment(self) -> float:
        return min(LAST_WORD, self.transport.timeout / 4)

    def _connect(self, number: int) -> None:
        notices = self.transport.notices
        try:
            self.transport.connect(self.transport.timeout)
            notices.post("tried", 1)
        except RuntimeError:  # which does not say for whom it has waited
            notices.post("tried", 1)
            late = notices.behind("tried", 1, range(self.transport.size), self._moment, verdict_key(number))
            raise RankFault(late[0] if late else 0, NO_ANSWER) from None

    def _start_over(self) -> None:  # noqa: B027
        """Drop what was collected of an epoch that nobody has seen to its end."""

    def _in_thread(self, number: int, task: Callable[[], T]) -> Future[T]:
        assert self._thread is not None
        future = self._thread.submit(lambda: self._guarded(number, task))
        self._last_task = future
        return future

    def _guarded(self, number: int, task: Callable[[], T]) -> T:
        """Do a task of this epoch, unless one before it has failed: nobody waits twice for a rank that is lost."""
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
                    self.transport.notices.decided(verdict_key(number), self._moment * (1 + (self.transport.rank > 0)))
                word = self.transport.notices.decide(verdict_key(number), abort(fault))
                fault = fault_of(word) if word != "commit" else fault
            self._failed = self._failed or fault
            self.transport.leave()
        self.transport.notices.decide_later(verdict_key(number), abort(self._failed))
        raise self._failed


def announced(part: IntArray, gave_up: bool) -> IntArray:
    """A rank's part of an order, and behind it whether sketches are given up: all ranks stop in the same epoch."""
    return np.append(part, np.int64(gave_up))


def verdict_key(number: int) -> str:
    """Where the verdict on the order after epoch `number` stands."""
    return f"verdict/{number}"


def abort(fault: RankFault) -> str:
    """The verdict that a fault leads to."""
    return f"abort {fault.rank} {fault.why}"


def fault_of(verdict: str) -> RankFault:
    """The fault that led to a verdict."""
    _, rank, why = verdict.split(" ", 2)
    return RankFault(int(rank), why)
