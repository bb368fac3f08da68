"""Many workers, one order: sketches travel to one rank, which hosts the rule, and every worker's part comes back.

One rank solves because the order must be one: two machines that solve the same table may differ in the last bit of a
sum, and then in everything after it. It is also cheaper: a sketch travels once, not once to every rank.

An epoch is cut into rounds, at fixed positions. In a round every rank sends what it has seen since the last one. All
of it runs in a thread, off the training step's path. Where the rule allows it (`herd`, from the second epoch on) the
last round is early enough for the next order to be there when the epoch ends; what a rank sees after it goes with the
next epoch's rounds.

Whether an order is used is decided once, in the process group's store, where the first verdict stands: the host's
"commit", after all ranks have their part, or any rank's "abort", after a bounded wait. So all ranks use the new order,
or none does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding import Rule
from heeler.ordering.dealing import IntArray, Layout
from heeler.ordering.following import random_walk, tell_peers
from heeler.ordering.group import Group, RankFault
from heeler.ordering.parcels import Parcels, Rows, join
from heeler.ordering.screening import suspicious
from heeler.ordering.thread import Worker
from heeler.ordering.turnover import EARLY_FROM, forget, resumed_walk, whole_state

logger = logging.getLogger("heeler")

ROUND_BYTES = 1 << 22
"""Sketches that a rank keeps back, at most, before it sends them."""

T = TypeVar("T")


class CoordinatedTurnover:
    """`Turnover` for a rule that several ranks share; rank 0 of the group runs it.

    Args:
        group: the ranks.
        rule: made alike on every rank, for the first order; only the host's is fed.
        layout: how the rule's order becomes the ranks' indices.
        seed: of the random orders that stand in after a fault.
        peers: ranks that train on the same examples and are told this rank's indices; see `FollowingTurnover`.
    """

    def __init__(
        self, group: Group, rule: Rule, layout: Layout, *, dim: int, seed: int, peers: Group | None = None
    ) -> None:
        self._peers = peers
        self.group, self.rule, self.layout, self.seed = group, rule, layout, seed
        self.walk: IntArray | None = rule.order
        self.indices = layout.part(rule.order)
        self.closed = False
        self.fault: RankFault | None = None
        """Why this group exchanges nothing any more; its orders are random from then on."""
        self._length = len(self.indices)
        self._dim = dim
        self._table = hasattr(rule, "table")
        self._parcels = Parcels(group, len(rule.order), dim, halves=self._table)
        # An online rule over one dealt order needs the whole epoch in that order.
        self._stash: list[Rows] | None = [] if layout.shard_sizes is None and not self._table else None
        longest = max(layout.shard_sizes or (self._length,))
        self._rounds = max(1, math.ceil(longest * dim * self._parcels.payload.itemsize / ROUND_BYTES))
        self._waiting: list[Rows] = []
        self._forgotten: list[IntArray] = []
        self._rounds_begun = 0
        self._turns = 0
        self._first_epoch = True
        self._closing: Future[IntArray] | None = None
        self._worker = Worker("heeler-exchange")
        self._failed: RankFault | None = None
        self.using_rule = threading.Lock()
        """Held while the rule is fed or solves, which the exchange's thread does."""
        self._times = {"exchange_seconds": 0.0, "solve_seconds": 0.0, "waited_seconds": 0.0}

    @property
    def is_host(self) -> bool:
        """Whether this rank runs the rule."""
        return self.group.rank == 0

    # What the handle and the sampler call

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        """Keep trained examples, (b,) indices and (b, K) vectors, until the next round."""
        if self.fault is None:
            self._waiting.append((indices + self.layout.offset(), vectors))

    def wants_early_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        """Whether a round is due, now that `trained` of `length` positions are done; all ranks agree on positions."""
        rounds = self._rounds if self._early else self._rounds - 1  # the last one waits for the epoch's end
        due = (self._rounds_begun + 1) / self._rounds * (EARLY_FROM if self._early else 1.0) * length
        return self.fault is None and self._rounds_begun < rounds and trained >= due

    def start_early(self) -> None:
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
            self.walk = random_walk(self.layout, len(self.rule.order), self.seed, self._turns)
            self.indices = self.layout.part(self.walk)
            self._waiting.clear()
        if self._peers is not None:
            tell_peers(self._peers, self.indices)
        self.closed, self._closing, self._rounds_begun, self._first_epoch = False, None, 0, False
        self._turns += 1
        self._times["waited_seconds"] = time.perf_counter() - started

    def forget(self, indices: IntArray) -> None:
        """Drop what was filed under `indices`, for it may be about other examples: here, and at the host."""
        numbers = indices + self.layout.offset()
        kept = [(rows, vectors, ~np.isin(rows, numbers)) for rows, vectors in self._waiting]
        self._waiting = [(rows[keep], vectors[keep]) for rows, vectors, keep in kept]
        self._forgotten.append(numbers)

    def consolidate(self) -> None:
        """Bring everything that any rank has seen to the host; every rank calls it, at the same step.

        For the orders it does not matter when a sketch arrives, so a run that saves is the run that does not.
        """
        if self.fault is not None:
            return
        try:
            # In the thread, so behind a solve that is under way: what is new is about the next one.
            self._begin_sending(first=False).result(4.0 * self.group.timeout)
        except (RankFault, FutureTimeout) as fault:
            logger.warning("the state lacks sketches that other ranks have seen: %s", fault or "no answer in time")

    def state_dict(self) -> dict[str, Any]:
        """The host's is the whole, and all that a restart needs, on any number of ranks; the others' says so."""
        if not self.is_host:
            return {"host": False}
        assert self.walk is not None  # the host knows the whole order
        # Never wait for another rank here: it may itself be waiting, at a barrier, for this one to have saved.
        with self.using_rule:
            if (
                self._table and self._closing is None
            ):  # the order of a table's rows does not matter; a solve's input does
                for indices, vectors in self._waiting:
                    self._feed(indices, vectors)
                self._waiting.clear()
            state = whole_state(self.rule, self.walk, self.closed, self.layout)
            stash = join(self._stash or [], self._dim)
            return {**state, "first_epoch": self._first_epoch, "stash": {"indices": stash[0], "vectors": stash[1]}}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on where the host's `state_dict` was taken; True if positions in the epoch still hold."""
        if "rule" not in state:
            raise ValueError("this state is not the host's: load what rank 0 saved, on every rank")
        walk, same = resumed_walk(state, self.layout)
        self.rule.load_state_dict(state["rule"])
        self.walk, self.indices = walk, self.layout.part(walk)
        self.closed = state["closed"]
        self._first_epoch = state.get("first_epoch", True)  # a state of a single process does not say
        if self._stash is not None:
            stash = state.get("stash", {"indices": [], "vectors": []})
            held = np.array(stash["indices"], np.int64), np.array(stash["vectors"], np.float32)
            self._stash = [held] if held[0].size else []
        self._waiting.clear()
        return same

    def numbers(self) -> dict[str, float]:
        """Seconds of the last epoch's exchange, solve and wait, and the bytes so far."""
        traffic = {"bytes_sent": self.group.bytes_sent, "bytes_received": self.group.bytes_received}
        return {**self._times, **{name: float(value) for name, value in traffic.items()}}

    # The epoch's end

    @property
    def _early(self) -> bool:
        return self._table and not self._first_epoch

    def _begin_round(self) -> None:
        first = self._rounds_begun == 0
        self._rounds_begun += 1
        self._begin_sending(first=first)

    def _begin_sending(self, *, first: bool) -> Future[None]:
        rows, gone = join(self._waiting, self._dim), _join_indices(self._forgotten)
        self._waiting, self._forgotten = [], []
        turn = self._turns
        return self._worker.submit(lambda: self._guarded(turn, lambda: self._round(rows, gone, first)))

    def _begin_close(self) -> None:
        turn = self._turns
        if self.closed:  # resumed from a state whose next order was known already
            known = self.layout.part(self.rule.order)
            self._closing = self._worker.submit(lambda: known)
            if self.is_host:
                self._worker.submit(lambda: self.group.decide(f"{turn}/verdict", "commit"))
            return
        self._closing = self._worker.submit(lambda: self._guarded(turn, lambda: self._close(turn)))

    def _take_agreed(self) -> None:
        """Use the new order if all have it."""
        assert self._closing is not None
        key = f"{self._turns}/verdict"
        # The host waits for a rank at most `timeout`; whoever waits for the host must be more patient than that.
        patience = (3.0 if self.is_host else 4.0) * self.group.timeout
        try:
            part = self._closing.result(patience)
            verdict = self.group.decided(key, patience, "abort 0 it reached no verdict in time")
        except RankFault as fault:
            # When a transfer fails, gloo closes every connection: the host knows best which rank was at fault.
            verdict = self.group.decided(key, self.group.timeout, _abort(fault))
        except FutureTimeout:
            verdict = self.group.decide(key, "abort 0 it did not answer in time")
        if verdict == "commit":
            self.indices = part
            self.walk = self.rule.order if self.is_host else None
            return
        _, rank, why = verdict.split(" ", 2)
        self.fault = RankFault(int(rank), why)
        logger.warning(
            "the workers could not agree on the next order, because of rank %s (%s): orders are random from now on, "
            "and training goes on. Restart from a checkpoint to have them coordinated again.",
            rank,
            why,
        )

    # In the thread

    def _guarded(self, turn: int, task: Callable[[], T]) -> T:
        """Do a task of this turn, unless one before it has failed: nobody waits twice for a rank that is lost."""
        if self._failed is None:
            try:
                return task()
            except RankFault as fault:
                self._failed = fault
            except Exception as error:
                self._failed = RankFault(self.group.rank, f"{type(error).__name__}: {error}")
            if self.is_host:
                self.group.decide(f"{turn}/verdict", _abort(self._failed))
        raise self._failed

    def _round(self, rows: Rows, gone: IntArray, first: bool) -> None:
        """Bring every rank's new sketches to the host."""
        started = time.perf_counter()
        if first:
            self._times["exchange_seconds"] = self._times["solve_seconds"] = 0.0
        if not self.is_host:
            self._parcels.send(rows, gone)
            self._times["exchange_seconds"] += time.perf_counter() - started
            return
        collected = [(rows, gone)] + [self._parcels.receive(rank) for rank in range(1, self.group.size)]
        bad = suspicious([vectors for (_, vectors), _ in collected])
        with self.using_rule:
            self._feed_all(collected, bad)
        self._times["exchange_seconds"] += time.perf_counter() - started

    def _feed_all(self, collected: list[tuple[Rows, IntArray]], bad: list[NDArray[np.bool_]]) -> None:
        for rank, (((indices, vectors), forgotten), rejected) in enumerate(zip(collected, bad, strict=True)):
            if rejected.any():
                self._tell_of(rank, int(rejected.sum()), rejected.size)
                if self._table:  # these examples keep the sketch they had
                    indices, vectors = indices[~rejected], vectors[~rejected]
                else:  # a pair's place must not be lost: as in the rules, they count as zero
                    vectors = np.where(rejected[:, None], np.float32(0), vectors)
            if forgotten.size:
                forget(self.rule, forgotten)
            self._feed(indices, vectors)

    def _feed(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        if not indices.size:
            return
        if self._stash is not None:
            self._stash.append((indices, vectors))
        else:
            self.rule.observe(indices, vectors)

    def _close(self, turn: int) -> IntArray:
        """This rank's part of the next order: the host finds it, and sends every rank its own."""
        if not self.is_host:
            part = torch.empty(self._length, dtype=self._parcels.number)
            self.group.receive([part], 0, patience=2.0)  # the host may itself wait for another rank
            self.group.count(f"{turn}/received")
            return part.numpy().astype(np.int64)
        started = time.perf_counter()
        with self.using_rule:
            if self._stash is not None:
                self._feed_in_order()
            order = self.rule.next_order()
            self.closed = True
        self._times["solve_seconds"] += time.perf_counter() - started
        started = time.perf_counter()
        for rank in range(1, self.group.size):
            part = torch.from_numpy(self.layout.part(order, rank)).to(self._parcels.number)
            self.group.send([part], rank)
        if self.group.counted(f"{turn}/received", self.group.size - 1):
            self.group.decide(f"{turn}/verdict", "commit")
        self._times["exchange_seconds"] += time.perf_counter() - started
        return self.layout.part(order)

    def _feed_in_order(self) -> None:
        """Give an online rule what all ranks saw, in the order of the walk."""
        assert self._stash is not None
        assert self.walk is not None
        indices, vectors = join(self._stash, self._dim)
        self._stash = []
        place = np.full(len(self.rule.order), -1)  # after a restart on other workers the walk is what was left
        place[self.walk] = np.arange(len(self.walk))
        sequence = np.argsort(place[indices], kind="stable")
        self.rule.observe(indices[sequence], vectors[sequence])

    def _tell_of(self, rank: int, rows: int, of: int) -> None:
        logger.warning(
            "rank %d sent %d sketches (of %d) that are not finite or far larger than other ranks': they are left out",
            rank,
            rows,
            of,
        )


def _abort(fault: RankFault) -> str:
    return f"abort {fault.rank} {fault.why}"


def _join_indices(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
