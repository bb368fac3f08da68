"""Online balance of differences: PairBalance and what is built on it, alone or coordinated over workers."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.lockstep import Lockstep
from heeler.herding.rules.online import OnlineRule
from heeler.herding.validate import Array, IntArray
from heeler.native import online


class Pair(OnlineRule):
    """PairBalance (arXiv 2302.00845): neighbours' difference D, added to S with the sign that keeps ⟨S, D⟩ ≤ 0.

    Examples go into their worker's front or back list, which grow from the two ends of the worker's stretch of
    `_places`. With shards every worker has its own S: ID-GraB.
    """

    _state = (*OnlineRule._state, "_places", "_left", "_right", "_running", "_waiting", "_waiting_row", "_knobs")
    _shared_sum: ClassVar[bool] = False
    _sign_rule: ClassVar[int] = 0
    """As `online.observe_pairs` numbers them."""

    def __init__(self, examples: int, dim: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        width = self.dim or 0
        self._places = np.zeros(self.examples, np.int64)
        self._left, self._right = self.offsets[:-1].copy(), self.offsets[1:] - 1
        self._group = np.zeros(self.workers, np.int64) if self._shared_sum else np.arange(self.workers)
        self._running = np.zeros((1 if self._shared_sum else self.workers, width))
        self._waiting, self._waiting_row = np.zeros((self.workers, width)), np.full(self.workers, -1, np.int64)
        self._knobs = np.zeros(3)

    def _take(self, rows: IntArray, floats: Array) -> None:
        self._balance(rows, self._worker(rows), floats)

    def _balance(self, rows: IntArray, worker: IntArray, floats: Array) -> None:
        sums = (self._group, self._running, self._waiting, self._waiting_row)
        lists = (self._places, self._left, self._right)
        signs = (self._sign_rule, self._uniforms(worker), self._knobs)
        online.observe_pairs(floats, rows, worker, *sums, *lists, *signs)

    def _uniforms(self, worker: IntArray) -> Array:
        """One random number for each pair that these vectors complete, so that batches may be cut anywhere."""
        if self._sign_rule == 0:
            return np.empty(0)
        arrived = np.bincount(worker, minlength=self.workers)
        return self._rng.random(int(np.sum((arrived + (self._waiting_row >= 0)) // 2)))

    def _held(self) -> list[IntArray]:
        """The front list, the back list behind it, and last an odd example, which keeps its place."""
        shards = zip(self._shards(), self._left, self._right, np.split(self._waiting_row, self.workers), strict=True)
        return [
            np.concatenate([self._places[own.start : left], self._places[right + 1 : own.stop], odd[odd >= 0]])
            for own, left, right, odd in shards
        ]

    def _close(self) -> IntArray:
        lists = self._held()
        self._left, self._right = self.offsets[:-1].copy(), self.offsets[1:] - 1
        self._running[:] = 0.0
        self._waiting_row[:] = -1
        return self._with_unseen(lists)

    def _check(self) -> None:
        outside = (self._left < self.offsets[:-1]) | (self._left > self._right + 1) | (self._right >= self.offsets[1:])
        if outside.any() or (self._knobs < 0).any():
            raise ValueError("the state's left, right or knobs are out of range: it is damaged")
        super()._check()


class CdGrab(Pair):
    """CD-GraB (arXiv 2302.00845): one S for all, pair i of every worker in turn, whatever way their batches arrive."""

    coordinates_shards = True
    _shared_sum = True

    def __init__(self, examples: int, dim: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self._queue = Lockstep(np.diff(self.offsets), self.dim or 0)

    def _take(self, rows: IntArray, floats: Array) -> None:
        if self.workers == 1:
            super()._take(rows, floats)
            return
        self._queue.put(rows, self._worker(rows), floats)
        if ready := self._queue.take(everything=False):
            self._balance(*ready)

    def _close(self) -> IntArray:
        if ready := self._queue.take(everything=True):
            self._balance(*ready)
        self._queue.clear()
        return super()._close()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "queue": self._queue.state_dict()}

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        return {**super()._read(state), "_queue": self._queue.loaded(check.entry(state, "queue"))}

    def _held(self) -> list[IntArray]:
        return [np.concatenate(own) for own in zip(super()._held(), self._queue.rows(), strict=True)]


class Walk(CdGrab):
    """Self-balancing walk (arXiv 2006.14009) on CD-GraB's differences: +1 with probability ½ − ⟨S, D⟩/(2c).

    Args:
        c: the walk's constant. By default the largest ‖D‖² met so far; the theorem's c is larger by a logarithm, and
            then the signs are nearly fair coins.
    """

    coordinates_shards = False
    _sign_rule = 1

    def __init__(self, examples: int, dim: int | None = None, *, c: float | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        if c is not None and not (c > 0 and math.isfinite(c)):
            raise ValueError(f"c must be a positive number, got {c!r}")
        self._knobs[0] = c or 0.0


class KernelHalving(CdGrab):
    """KH-SGD (Low-Rank Thinning, arXiv 2502.12063): pairs and places as in CD-GraB, signs by kernel halving, δ = ½.

    Args:
        epochs: T, for how many epochs the failure probability is shared out.
    """

    coordinates_shards = False
    _sign_rule = 2

    def __init__(self, examples: int, dim: int | None = None, *, epochs: int = 100, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.epochs = check.check_positive(epochs, "epochs")
        self._start_epoch(1)

    def _start_epoch(self, k: int) -> None:
        pairs = max(int(np.sum(np.diff(self.offsets) // 2)), 1)
        self._knobs[:] = 0.0, 0.0, (4 / 0.5) * k * (1 + math.log(self.epochs)) * (1 + math.log(pairs))

    def _close(self) -> IntArray:
        following = super()._close()
        self._start_epoch(self.epoch + 2)  # epochs count from 1, and this one is not yet closed
        return following
