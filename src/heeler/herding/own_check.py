"""Does a sketch know its own example? A check that needs no reference.

When an example gets a new sketch, is that nearer to the example's own old one than to the old one of another example?
By cosine: lengths change faster than directions. If rows are stored under their own examples and gradients last from
one refresh to the next, its own is nearer more often than not; if rows are stored under other examples, or gradients do
not last, as often as not. Either way no order can help then.

Where strata are known, it is also compared with another example of its stratum. That is the harder test, and the one
that is reported. Dropout and large steps can bring it near chance although rows are right (0.52, where 0.9 know their
own among all examples), so sketches are given up only if they fail both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.validate import IntArray
from heeler.native import loops

PER_EPOCH = 1024
"""Comparisons in an epoch, about: a sample that costs next to nothing, and enough to be sure (see `SURE`)."""
CHANCE = 0.55
"""A share below this is as good as chance. Measured (`python -m benchmarks know-own`): among all examples 0.9 and more
where rows are right, 0.5 where all are misfiled."""
SURE = 3.0
"""Standard deviations of the share that make sure: at 0.5, some 900 comparisons do."""
ENOUGH = 256
"""Comparisons below which nothing is sure."""
REFRESHES = 2
"""Refreshes that must have been seen before sketches are given up: a network that has just begun changes so fast that
the first one may be no better than chance (a ResNet: 0.54 within classes, then 0.72, 0.80, 0.84)."""
EQUAL = 2.0**-11
"""Cosines that differ by less cannot be told apart: rows are stored in half precision."""
SLOTS = 1024
"""Strata whose last old row is kept; further ones share these places."""
_GOLDEN = 0.6180339887498949


class Share(NamedTuple):
    """How often a new sketch was nearer to its own old one."""

    wins: float
    comparisons: float

    @property
    def value(self) -> float:
        return self.wins / max(self.comparisons, 1.0)

    @property
    def spread(self) -> float:
        """So far the value may be from the truth."""
        return SURE * 0.5 / max(self.comparisons, 1.0) ** 0.5

    @property
    def at_chance(self) -> bool:
        """It is below `CHANCE`, for sure."""
        return self.comparisons >= ENOUGH and self.value + self.spread < CHANCE

    @property
    def is_right(self) -> bool:
        """It is above, for sure."""
        return self.comparisons >= ENOUGH and self.value - self.spread > CHANCE


NONE = Share(0.0, 0.0)


def wins_of(new: NDArray[Any], own: NDArray[Any], other: NDArray[Any]) -> tuple[int, int]:
    """How many rows of `new` (m, K) point more to `own` than to `other`, both (m, K), and of how many that can be told.

    Of two that are as near, and of rows of zeros, which point nowhere, it cannot: where many examples are alike, or
    have no gradient any more, that must not look like chance.
    """
    own, other = (np.ascontiguousarray(each, np.float16) for each in (own, other))
    to_own, to_other, *squares = loops.compare_rows(np.ascontiguousarray(new, np.float32), own, other)
    lengths = np.sqrt(squares)
    there = (lengths > 0).all(axis=0)
    of_new, of_own, of_other = np.where(there, lengths, 1.0)
    nearer = (to_own / of_own - to_other / of_other) / of_new
    told = there & (np.abs(nearer) > EQUAL)
    return int((nearer[told] > 0).sum()), int(told.sum())


class OwnCheck:
    """Compares a sample of the rows that a table replaces.

    A row is compared with the old row of the one that was compared before it, and with that of the one before it in its
    stratum: chosen without a look at the rows, and as old as its own. Comparisons are pooled over epochs until they are
    sure of one or the other.

    strata: (N,) codes, if known.
    """

    def __init__(self, examples: int, dim: int, strata: IntArray | None = None) -> None:
        self._examples, self._rate = examples, min(1.0, PER_EPOCH / examples)
        self._strata = strata
        # The example that was compared last, and the row that it had: of all, then of each stratum.
        slots = 1 if strata is None else 1 + min(int(strata.max()) + 1, SLOTS)
        self._last, self._rows = np.full(slots, -1, np.int64), np.zeros((slots, dim), np.float16)
        self._count = 0  # rows replaced so far
        # Among all and within strata: the comparisons since one was sure, and those that were.
        self._pools: tuple[Share, ...] = (NONE,) if strata is None else (NONE, NONE)
        self._found: tuple[Share, ...] = self._pools
        self._refreshes = 0  # in the pools, up to the last close, and how many comparisons there were then
        self._closed = 0.0

    @property
    def share(self) -> Share:
        """What was found last, or what there is so far; within strata where they are known."""
        return self._pools[-1] if _at_chance(self._pools) or not self._found[-1].comparisons else self._found[-1]

    @property
    def at_chance(self) -> bool:
        """Sketches do not know their own examples, for sure."""
        return _at_chance(self._found) or (_at_chance(self._pools) and self._refreshed() >= REFRESHES)

    def _refreshed(self) -> int:
        return self._refreshes + (self._pools[0].comparisons > self._closed)

    def close_epoch(self) -> None:
        """If the pools are sure, new ones begin: a fault that comes later must not drown in what was right before."""
        self._refreshes, self._closed = self._refreshed(), self._pools[0].comparisons
        right = any(pool.is_right for pool in self._pools)
        if right or (_at_chance(self._pools) and self._refreshes >= REFRESHES):
            self._found, self._pools = self._pools, (NONE,) * len(self._pools)
            self._refreshes, self._closed = 0, 0.0

    def sample(self, rows: int) -> IntArray:
        """Which of the next `rows` rows to compare: spread evenly, at no fixed place of a batch."""
        begin, self._count = self._count, self._count + rows
        if self._rate >= 1.0:
            return np.arange(rows)
        return np.flatnonzero(((begin + np.arange(rows)) * _GOLDEN) % 1.0 < self._rate)

    def compare(self, examples: IntArray, old: NDArray[np.float16], new: NDArray[np.float32]) -> None:
        """Rows `new` (m, K) replace `old` (m, K) of `examples` (m,)."""
        if not len(examples):
            return
        found = self._compared(np.zeros_like(examples), examples, old, new)
        pools = [_sum(self._pools[0], found)]
        if self._strata is not None:
            found = self._compared(1 + self._strata[examples] % (len(self._last) - 1), examples, old, new)
            pools.append(_sum(self._pools[1], found))
        self._pools = tuple(pools)

    def _compared(
        self, slots: IntArray, examples: IntArray, old: NDArray[np.float16], new: NDArray[np.float32]
    ) -> Share:
        """Each with the one before it in its slot (m,)."""
        sequence = np.argsort(slots, kind="stable")
        first = np.r_[True, np.diff(slots[sequence]) != 0]  # of its slot: the one before it is kept from the last call
        before = np.where(first, -1, np.r_[-1, sequence[:-1]])
        partner = np.where(first, self._last[slots[sequence]], examples[before])
        rows = old[before]
        rows[first] = self._rows[slots[sequence[first]]]
        fits = (partner >= 0) & (partner != examples[sequence])
        if self._strata is not None and slots[0] > 0:  # strata that share a slot
            fits &= self._strata[partner] == self._strata[examples[sequence]]
        own = sequence[fits]
        last = sequence[np.r_[first[1:], True]]
        self._last[slots[last]], self._rows[slots[last]] = examples[last], old[last]
        return Share(*wins_of(new[own], old[own], rows[fits]))

    # State

    def state_dict(self) -> dict[str, Any]:
        """Arrays only."""
        shares = [number for each in (*self._pools, *self._found) for number in each]
        counts = np.array([self._count, self._refreshes, self._closed, *shares], np.float64)
        return {"own_counts": counts, "own_last": self._last.copy(), "own_rows": self._rows.copy()}

    def check_state(self, state: dict[str, Any]) -> None:
        """A ValueError for a state that `restore` must not see. Those of 0.2 have nothing of this."""
        if "own_counts" not in state:
            return
        counts = check.stored_array(state, "own_counts", [np.float64], (-1,))
        check.stored_array(state, "own_rows", [np.float16], (-1, self._rows.shape[1]))
        last = check.stored_array(state, "own_last", [np.int64], (-1,))
        damaged = (
            counts.size != (7 if last.size == 1 else 11) or counts.min() < 0 or (counts[3::2] > counts[4::2]).any()
        )
        if damaged or _outside(last, self._examples):
            raise ValueError("the state's own_counts or own_last is out of range: it is damaged")

    def restore(self, state: dict[str, Any]) -> None:
        self._last[:], self._count, self._refreshes, self._closed = -1, 0, 0, 0.0
        self._pools = self._found = (NONE,) * len(self._pools)
        if "own_counts" not in state or len(state["own_last"]) != len(self._last):  # of 0.2, or of other strata
            return
        count, refreshes, self._closed, *numbers = check.as_numpy(state["own_counts"], "own_counts").tolist()
        shares = tuple(Share(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True))
        self._pools, self._found = shares[: len(self._pools)], shares[len(self._pools) :]
        self._count, self._refreshes = int(count), int(refreshes)
        np.copyto(self._last, check.as_numpy(state["own_last"], "own_last"))
        np.copyto(self._rows, check.as_numpy(state["own_rows"], "own_rows"))


def _sum(one: Share, other: Share) -> Share:
    return Share(one.wins + other.wins, one.comparisons + other.comparisons)


def _at_chance(shares: tuple[Share, ...]) -> bool:
    return all(share.at_chance for share in shares)


def _outside(numbers: IntArray, examples: int) -> bool:
    return bool(((numbers < -1) | (numbers >= examples)).any())
