"""What the rules share that balance vectors as they come, and keep none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.base import BaseRule, Common
from heeler.herding.validate import Array, IntArray

if TYPE_CHECKING:
    from typing import Unpack


class OnlineRule(BaseRule):
    """Takes each example's first finite vector of an epoch."""

    _state: ClassVar[tuple[str, ...]] = (*BaseRule._state, "_seen")

    def __init__(self, examples: int, dim: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(examples, dim, **common)
        self._seen = np.zeros(self.examples, np.bool_)

    def observe(self, indices: Any, vectors: Any) -> None:
        rows = self._rows(indices)
        if rows.size == 0:
            return
        rows, floats = self._finite(rows, self._floats(vectors, rows.size))
        keep = self._first_sights(rows)
        if keep is not None:
            rows, floats = rows[keep], floats[keep]
        if rows.size:
            self._take(rows, floats)

    def next_order(self) -> IntArray:
        self._seen[:] = False
        return super().next_order()

    def _take(self, rows: IntArray, floats: Array) -> None:
        """Take note of new, finite vectors; must keep copies only."""
        raise NotImplementedError

    def _floats(self, vectors: Any, count: int) -> Array:
        """(b, K) float32 or float64, C-contiguous and read-only; may be the caller's own memory."""
        floats = check.as_floats(vectors, "(b, K)")
        if floats.shape != (count, self.dim):
            raise ValueError(f"vectors must have shape {(count, self.dim)}, got {floats.shape}")
        if floats.dtype == np.float16:
            floats = floats.astype(np.float32)
        return check.frozen(np.ascontiguousarray(floats))

    def _finite(self, rows: IntArray, floats: Array) -> tuple[IntArray, Array]:
        with np.errstate(over="ignore", invalid="ignore"):
            if np.isfinite(floats.sum()):  # one number tells, nearly always, that all of them are finite
                return rows, floats
        good = np.isfinite(floats).all(axis=1)
        if good.all():
            return rows, floats
        self.screened += int(rows.size - np.count_nonzero(good))
        return rows[good], check.frozen(floats[good])

    def _first_sights(self, rows: IntArray) -> IntArray | None:
        """Mark rows as seen; positions of those that are new this epoch, None for all."""
        fresh = ~self._seen[rows]
        ordered = np.sort(rows)
        self._seen[rows] = True
        if fresh.all() and (ordered[1:] != ordered[:-1]).all():
            return None
        first = np.sort(np.unique(rows, return_index=True)[1])
        return first[fresh[first]]


class TwoListRule(OnlineRule):
    """Puts each example into its worker's front or back list, which grow from the two ends of the worker's stretch."""

    _state: ClassVar[tuple[str, ...]] = (*OnlineRule._state, "_places", "_left", "_right")

    def __init__(self, examples: int, dim: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(examples, dim, **common)
        self._places = np.zeros(self.examples, np.int64)
        self._left, self._right = self.offsets[:-1].copy(), self.offsets[1:] - 1

    def _take_lists(self) -> list[IntArray]:
        """Each worker's front list with its back list behind it; both are empty afterwards."""
        places = [
            np.concatenate([self._places[shard.start : left], self._places[right + 1 : shard.stop]])
            for shard, left, right in zip(self._shards(), self._left, self._right, strict=True)
        ]
        self._left, self._right = self.offsets[:-1].copy(), self.offsets[1:] - 1
        return places
