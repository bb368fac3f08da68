"""Several passes over the same examples before a step: the example's gradient is their sum.

Truncated backpropagation, a backward per loss, two views of a batch. Passes belong together between two steps of the
optimizer; after a step the newest one counts.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray

Rows = tuple[IntArray, NDArray[np.float32]]
"""(b,) examples and (b, K) their sketches."""

HELD = 1 << 20
"""Numbers that are held for further passes, at most, besides the newest pass."""
WINDOWS = 1 << 10
"""Steps whose examples are remembered, for passes that are known later."""
REMEMBERED = 1 << 16
"""Examples that are known to be let go, at most."""


class _Block:
    """The sums of the examples of one pass."""

    def __init__(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        self.indices, self.vectors = indices, vectors
        self.is_new = True

    def add(self, places: list[int], vectors: NDArray[np.float32]) -> None:
        self.vectors = self.vectors.copy()  # they may be a view of what a device has sent
        self.vectors[places] += vectors
        self.is_new = True

    def take(self, spoiled: set[int]) -> list[Rows]:
        """What has changed since the last time, but for what is spoiled."""
        was, self.is_new = self.is_new, False
        if not was:
            return []
        if not spoiled:
            return [(self.indices, self.vectors)]
        good = np.array([index not in spoiled for index in self.indices.tolist()], bool)
        return [(self.indices[good], self.vectors[good])] if good.any() else []


class StepSums:
    """The sums of the window that is open: passes come in the order of their windows."""

    def __init__(self) -> None:
        self.lost = 0
        """Rows that came when their example's sum had been let go."""
        self._window: tuple[Any, int] | None = None
        self._blocks: deque[_Block] = deque()
        self._held = 0
        self._where: dict[int, tuple[_Block, int]] = {}
        self._gone: set[int] = set()
        self._spoiled: set[int] = set()
        self.regretted: set[int] = set()
        """Examples whose sums were spoiled when they had been taken."""
        self._past: OrderedDict[int, tuple[list[IntArray], set[int]]] = OrderedDict()
        """By window, of this iteration: the examples that had sums in it, and those that were spoiled."""

    def add(self, of: Any, window: int, indices: IntArray, vectors: NDArray[np.float32]) -> list[Rows]:
        """A pass over distinct examples. Returns what is complete by now.

        of: the iteration that it belongs to. In another one, as after a step, the newest pass counts.
        """
        if self._window is not None and self._window[0] is of and window < self._window[1]:
            return self._late(window, indices, vectors)
        done = self._turn(of, window)
        found = [self._where.get(index) for index in indices.tolist()]
        fresh = np.array([place is None for place in found], bool)
        for block in {id(place[0]): place[0] for place in found if place is not None}.values():
            rows, places = zip(
                *((r, p[1]) for r, p in enumerate(found) if p is not None and p[0] is block), strict=True
            )
            block.add(list(places), vectors[list(rows)])
        if self._gone:
            gone = np.array([index in self._gone for index in indices.tolist()], bool)
            self.lost += int(gone.sum())
            fresh &= ~gone
        if fresh.any():
            self._hold(_Block(indices, vectors) if fresh.all() else _Block(indices[fresh], vectors[fresh]))
        while len(self._blocks) > 1 and self._held > HELD:
            done += self._let_go()
        return done

    def spoil(self, of: Any, window: int, examples: Iterable[int]) -> list[Rows]:
        """A pass was left out that may have been about these: without it their sums are not whole."""
        if self._window is not None and self._window[0] is of and window < self._window[1]:
            self.regret(of, window, examples)
            return []
        done = self._turn(of, window)
        self._spoiled.update(examples)
        for block in self._blocks:
            if not block.is_new:
                self.regretted.update(self._spoiled.intersection(block.indices.tolist()))
        return done

    def _late(self, window: int, indices: IntArray, vectors: NDArray[np.float32]) -> list[Rows]:
        """A pass that waited for proof while steps went by: whole unless others of its step were stored, or spoiled."""
        sums, spoiled = self._past.setdefault(window, ([], set()))
        stored = np.isin(indices, np.concatenate([*sums, np.empty(0, np.int64)]))
        self.regretted.update(indices[stored].tolist())
        good = ~stored & ~np.isin(indices, list(spoiled))
        sums.append(indices)
        return [(indices[good], vectors[good])] if good.any() else []

    def regret(self, of: Any, window: int, examples: Iterable[int]) -> None:
        """A pass that may have been about these is left out when its step is over, or is the last one."""
        if self._window is None or self._window[0] is not of:
            return
        if window >= self._window[1]:
            self.spoil(of, window, examples)
            return
        sums, spoiled = self._past.setdefault(window, ([], set()))
        spoiled.update(examples)
        self.regretted.update(spoiled.intersection(index for each in sums for index in each.tolist()))

    def _turn(self, of: Any, window: int) -> list[Rows]:
        if self._window is not None and self._window[0] is of and self._window[1] == window:
            return []
        same = self._window is not None and self._window[0] is of
        done = self.close()
        if not same:
            self._past.clear()
        self._window = of, window
        return done

    def _hold(self, block: _Block) -> None:
        self._blocks.append(block)
        self._held += block.vectors.size
        self._where.update({index: (block, row) for row, index in enumerate(block.indices.tolist())})

    def _let_go(self) -> list[Rows]:
        """The oldest. What further passes would add to its examples cannot be stored."""
        block = self._blocks.popleft()
        self._held -= block.vectors.size
        for index in block.indices.tolist():
            del self._where[index]
        if len(self._gone) < REMEMBERED:
            self._gone.update(block.indices.tolist())
        return block.take(self._spoiled)

    def flush(self) -> list[Rows]:
        """What has changed. If further passes follow, the whole sums will come once more."""
        return [rows for block in self._blocks for rows in block.take(self._spoiled)]

    def close(self) -> list[Rows]:
        """What has changed; nothing will be added to it."""
        done = self.flush()
        if self._window is not None:
            self._past[self._window[1]] = [block.indices for block in self._blocks], set(self._spoiled)
            while len(self._past) > WINDOWS:
                self._past.popitem(last=False)
        self._blocks.clear()
        self._where.clear()
        self._gone.clear()
        self._spoiled.clear()
        self._held, self._window = 0, None
        return done
