"""The rank that runs the rule for all: sketches come in, and every worker's part of the next order goes out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.distributed.screening import suspicious
from heeler.ordering.distributed.shared import COMMIT, SharedPlanner, abort, announced, verdict_key
from heeler.ordering.distributed.transport import NO_ANSWER, RankFault
from heeler.ordering.distributed.wire import News, Rows, join
from heeler.ordering.epoch import Epoch, Plan
from heeler.ordering.planner import drop_unknown
from heeler.ordering.state import order_state


class Leader(SharedPlanner):
    """Rank 0 of the ranks that share an order."""

    sees_all = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rule.warm_up()
        # An online rule over one dealt order needs the epoch's sketches in that order, so they wait for its end.
        waits = self.partition.shard_sizes is None and not self.rule.keeps_table
        self._stash: list[Rows] | None = [] if waits else None
        self._before: tuple[dict[str, Any], Rows] | None = None
        """Of an epoch that was left in the middle and closed since: the rule's state without that, and the stash."""
        self._trained = 0
        self._gathered: tuple[tuple[int, int], list[int]] = ((-1, -1), [])  # when they were brought together, positions

    def state_dict(self, epoch: Epoch) -> dict[str, Any]:
        """All that a restart needs, on any number of ranks."""
        # Never wait for another rank here: it may itself be waiting, at a barrier, for this one to have saved.
        with self._using_rule:
            if self.rule.keeps_table and self._closing is None:  # a table's rows may come in any order
                for indices, vectors in [*self._late, *self._waiting]:
                    self._feed(indices, vectors)
                self._late, self._waiting = [], []
            state = order_state(self.rule, epoch.plan.whole, self._closed, self.partition)
            stash = join(self._stash or [], self._dim)
            if self._before is not None:
                state |= {"rule": {**state["rule"], **self._before[0]}, "closed": False}
                stash = self._before[1]
            return {
                **state,
                "first_epoch": self._first_epoch,
                "stash": {"indices": stash[0], "vectors": stash[1]},
                "positions": self._known_positions(epoch.number),
                "shard_sizes": list(self.partition.shard_sizes or ()),
            }

    def _known_positions(self, number: int) -> list[int]:
        """How far each rank has come, -1 where that is not known: it is just after `consolidate`, and for this one."""
        at, others = self._gathered
        known = at == (number, self._trained)
        return [self._trained, *(others if known else [-1] * (self.transport.size - 1))]

    def _note(self, number: int, trained: int) -> None:
        self._trained = trained

    def next(self, epoch: Epoch) -> Plan:
        plan = super().next(epoch)
        self._before = None
        return plan

    def _plan(self, part: IntArray, whole: IntArray) -> Plan:
        return Plan(part, whole)

    def _resume(self, state: dict[str, Any]) -> None:
        self._trained, self._before = state.get("trained", 0), None
        positions = state.get("positions", [])
        if len(positions) == self.transport.size:
            self._gathered = (state["epoch"], self._trained), positions[1:]
        if self._stash is not None:
            stash = state.get("stash", {"indices": [], "vectors": []})
            held = np.array(stash["indices"], np.int64), np.array(stash["vectors"], np.float32)
            self._stash = [held] if held[0].size else []

    # In the thread

    def _others(self) -> range:
        return range(1, self.transport.size)

    def _meet(self, number: int, stage: int) -> None:
        notices = self.transport.notices
        late = notices.behind("begun", stage, self._others(), self.transport.timeout, verdict_key(number))
        if late:
            raise RankFault(late[0], NO_ANSWER)

    def _patience(self) -> Callable[[], float]:
        """How many timeouts are left, of one for all ranks: members, who wait for this one, count on it."""
        deadline = time.monotonic() + self.transport.timeout
        return lambda: max(deadline - time.monotonic(), 0.1) / self.transport.timeout

    def _exchange(self, number: int, news: News, trained: int) -> None:
        patience = self._patience()
        received = self._wire.receive(self._others(), patience)
        if trained >= 0:
            self._gathered = (number, trained), [position for _, position in received]
        collected = [news, *(theirs for theirs, _ in received)]
        bad = suspicious([each.rows[1] for each in collected])
        with self._using_rule:
            self._feed_all([self._screened(*each) for each in zip(range(len(bad)), collected, bad, strict=True)])

    def _feed_all(self, collected: list[News]) -> None:
        for each in collected:  # before any rank's sketches, all of which are newer
            if each.forgotten.size:
                self.rule.forget(each.forgotten)
        # What is of the epoch before goes first: by now any other rank may have trained on these examples again.
        for (indices, vectors), late, _ in collected:
            self._feed(indices[:late], vectors[:late])
        for (indices, vectors), late, _ in collected:
            self._feed(indices[late:], vectors[late:])

    def _screened(self, rank: int, news: News, rejected: NDArray[np.bool_]) -> News:
        """What a rank has seen, without what cannot be right."""
        if not rejected.any():
            return news
        warn(
            "rank %d sent %d sketches (of %d) that are not finite or far larger than other ranks': they are left out",
            rank,
            int(rejected.sum()),
            rejected.size,
        )
        (indices, vectors), late, forgotten = news
        if not self.rule.keeps_table:  # a pair's place must not be lost: as in the rules, they count as zero
            return News((indices, np.where(rejected[:, None], np.float32(0), vectors)), late, forgotten)
        keep = ~rejected  # the other examples keep the sketch they had
        return News((indices[keep], vectors[keep]), int(keep[:late].sum()), forgotten)

    def _feed(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        if not indices.size:
            return
        if self._stash is not None:
            self._stash.append((indices, vectors))
        else:
            self.rule.observe(indices, vectors)

    def _new_part(self, epoch: Epoch) -> IntArray:
        started = time.perf_counter()
        with self._using_rule:
            gave_up = self.gave_up or drop_unknown(self.rule)
            if not self._closed:  # it is, if the ranks parted after the last solve
                if self._may_go_on:
                    self._before = self.rule.state_before_close(), join(self._stash or [], self._dim)
                if self._stash is not None:
                    self._feed_in_order(epoch)
                self.rule.next_order()
                self._closed = self._failed is None  # else the epoch's end did not wait for this
            order, gave_up = np.asarray(self.rule.order), gave_up or self.rule.useless
        self._times["solve_seconds"] += time.perf_counter() - started
        started = time.perf_counter()
        told = [(rank, announced(self.partition.part(order, rank), gave_up)) for rank in self._others()]
        parts = [(rank, torch.from_numpy(each)) for rank, each in told]
        self.transport.send_each([(rank, [part.to(self._wire.number)]) for rank, part in parts])
        self._times["exchange_seconds"] += time.perf_counter() - started
        return announced(self.partition.part(order), gave_up)

    def _verdict(self, number: int, stage: int) -> str:
        started, notices, timeout = time.monotonic(), self.transport.notices, self.transport.timeout
        self._vote(stage)
        late = notices.behind("at", stage, self._others(), timeout, verdict_key(number))
        if late:
            raise RankFault(late[0], NO_ANSWER)
        # A rank that has voted waits for three timeouts. If this one was frozen for as long, that one has gone on.
        frozen = time.monotonic() - started > 2.0 * timeout
        word = abort(RankFault(0, "it was held up for longer than the others wait")) if frozen else "commit"
        standing = notices.decide(verdict_key(number), word)
        if standing == "commit":
            self.transport.tell_each(COMMIT, self._others())
        return standing

    def _start_over(self) -> None:
        with self._using_rule:
            if self._stash is not None:
                self._stash = []

    def _feed_in_order(self, epoch: Epoch) -> None:
        """Give an online rule what all ranks saw, in the order of the epoch."""
        assert self._stash is not None
        indices, vectors = join(self._stash, self._dim)
        self._stash = []
        place = np.full(len(self.rule.order), -1)  # after a restart on other workers the epoch is what was left
        order = np.asarray(epoch.plan.whole)
        place[order] = np.arange(len(order))
        sequence = np.argsort(place[indices], kind="stable")
        self.rule.observe(indices[sequence], vectors[sequence])
