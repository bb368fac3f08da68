"""The newest sketch of every example, in host memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heeler.herding import validate as check
from heeler.herding.own_check import OwnCheck
from heeler.herding.persistence import Persistence
from heeler.herding.validate import IntArray
from heeler.native import loops

_CHUNK = 1 << 16
_LARGEST = float(np.finfo(np.float16).max)
_SMALLEST_SCALE, _LARGEST_SCALE = 2.0**-120, 2.0**120
_LOW, _HIGH = 2.0**-8, 2.0**10
"""Where a typical row's largest stored number may lie. Half precision is at its full 11 bits from 2⁻¹⁴ to 2¹⁶; with a
typical row near 1, rows of a thousandth and of ten thousand times its size keep them too."""
_USUAL = (2.0**-5, 2.0**6)
"""As long as the root mean square of a batch's stored numbers lies here, its typical row is not looked for: a look
costs more than all the rest."""


class SketchTable:
    """N × K sketches in half precision, overwritten as examples come.

    rows: (N, K) float16, the stored numbers, true sketch × scale. Memory is touched only where rows are written.
    seen: (N,) bool. scale: one power of two for all rows, chosen from the first sketches and changed, with all stored
    rows, when sketches have drifted far. dropped: how many rows were refused because they were not finite. own: whether
    new rows know the examples that they are stored under. persistence: what old rows say about new ones.

    strata: (N,) codes of the examples' strata, if known.
    """

    def __init__(self, examples: int, dim: int, strata: IntArray | None = None) -> None:
        if examples < 1 or dim < 1:
            raise ValueError(f"a table needs at least one example and one column, not {examples} × {dim}")
        self.rows: NDArray[np.float16] = np.zeros((examples, dim), np.float16)
        self.seen: NDArray[np.bool_] = np.zeros(examples, np.bool_)
        self._start(strata)

    def _start(self, strata: IntArray | None = None) -> None:
        self.own = OwnCheck(len(self), self.dim, strata)
        self.persistence = Persistence(len(self))
        self.scale, self.dropped, self._scaled = 1.0, 0, False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        return int(self.rows.shape[1])

    @property
    def share_seen(self) -> float:
        """Of the examples, those with a sketch."""
        return float(np.mean(self.seen))

    def close_epoch(self) -> None:
        """An epoch is over: what it has replaced counts from now on."""
        self.persistence.close_epoch()
        self.own.close_epoch()

    def put(self, indices: Any, vectors: Any) -> None:
        """Store copies of vectors (b, K), NumPy or CPU torch, as the newest of examples `indices` (b,).

        Of two with the same index the later counts. An example whose newest vector is not finite has none.
        """
        where, given = check.as_rows(indices, len(self)), check.as_numpy(vectors, "vectors")
        if where.size == 0:
            return
        if given.shape != (where.size, self.dim):
            raise ValueError(
                f"put takes indices (b,) and vectors (b, {self.dim}), got shapes {where.shape} and {given.shape}: "
                "every vector needs its index"
            )
        values = np.ascontiguousarray(given, np.float32)
        square = float(np.vdot(values, values))
        if not math.isfinite(square):  # one number tells that all of them are finite; huge ones may overflow it
            finite = np.isfinite(values).all(axis=1)
            self.dropped += int((~finite).sum())
            self.forget(where[~finite])  # the one of before lacks what made this one useless
            where, values = where[finite], values[finite]
        if where.size == 0:
            return
        if not self._scaled or not _USUAL[0] <= math.sqrt(square / values.size) * self.scale <= _USUAL[1]:
            self._follow(values)
        self._file(where, values)

    def forget(self, indices: IntArray) -> None:
        """Examples `indices` (b,) have no sketch any more."""
        self.seen[indices] = False

    def sketches(self, indices: ArrayLike) -> NDArray[np.float32]:
        """The true sketches of some examples, (b, K) float32; zeros for those not seen."""
        return np.asarray(self.rows[np.asarray(indices)].astype(np.float32) / np.float32(self.scale))

    def state_dict(self) -> dict[str, Any]:
        """Arrays only. They are the table's own, not copies: write them out before the next `put`."""
        return {"rows": self.rows, "seen": self.seen, **self._numbers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hold what the state held, as a copy. A state that does not fit, or is damaged, is refused before a change."""
        self.check_state(state)
        self.restore(state)

    def check_state(self, state: dict[str, Any]) -> None:
        """A ValueError for a state that `restore`, which checks nothing, must not see."""
        check.stored_array(state, "rows", [np.float16], self.rows.shape)
        check.stored_array(state, "seen", [np.bool_], self.seen.shape)
        self._check_numbers(state)

    def restore(self, state: dict[str, Any]) -> None:
        np.copyto(self.rows, check.as_numpy(state["rows"], "rows"))
        np.copyto(self.seen, check.as_numpy(state["seen"], "seen"))
        self._restore_numbers(state)

    def _numbers(self) -> dict[str, Any]:
        """What a state holds besides rows."""
        scale = np.array([self.scale, float(self._scaled)])
        numbers = {"scale": scale, "dropped": np.array(self.dropped, np.int64)}
        return {**numbers, **self.persistence.state_dict(), **self.own.state_dict()}

    def _check_numbers(self, state: dict[str, Any]) -> None:
        scale, scaled = check.stored_array(state, "scale", [np.float64], (2,)).tolist()
        if not _SMALLEST_SCALE <= scale <= _LARGEST_SCALE or math.frexp(scale)[0] != 0.5 or scaled not in (0, 1):
            raise ValueError(f"the state's scale is {scale}, which no table has: it is damaged")
        if check.stored_array(state, "dropped", [np.int64], ()) < 0:
            raise ValueError("the state's dropped is below 0: it is damaged")
        self.persistence.check_state(state)
        self.own.check_state(state)

    def _restore_numbers(self, state: dict[str, Any]) -> None:
        scale, scaled = check.as_numpy(state["scale"], "scale").tolist()
        self.scale, self._scaled, self.dropped = scale, bool(scaled), int(state["dropped"])
        self.persistence.restore(state)
        self.own.restore(state)

    def _file(self, where: IntArray, values: NDArray[np.float32]) -> None:
        """Put finite vectors (b, K) in their places."""
        self._compare(self.rows, self.seen[where], where, where, values)
        self._store(self.rows, where, values)
        self.seen[where] = True

    def _compare(
        self,
        rows: NDArray[np.float16],
        known: NDArray[np.bool_],
        where: IntArray,
        examples: IntArray,
        values: NDArray[np.float32],
    ) -> None:
        """Before `values` (b, K) of `examples` (b,) replace rows[where], of which some are `known` (b,): compare."""
        self.persistence.stored += where.size
        if not known.any():
            return
        if not known.all():
            where, examples, values = where[known], examples[known], np.ascontiguousarray(values[known])
        self.persistence.add(loops.compare_halves(rows, where, values, self.scale, _LARGEST), self.scale)
        picked = self.own.sample(where.size)
        self.own.compare(examples[picked], rows[where[picked]], values[picked])

    def _store(self, rows: NDArray[np.float16], where: IntArray, values: NDArray[np.float32]) -> None:
        """rows[where] = values, scaled, clipped and rounded."""
        loops.store_halves(rows, where, values, self.scale, _LARGEST)

    def _follow(self, values: NDArray[np.float32]) -> None:
        """Keep typical rows in the middle of half precision's range."""
        sizes = np.abs(values).max(axis=1)
        sizes = sizes[sizes > 0]
        if not len(sizes):
            return
        typical = float(np.median(sizes))
        if self._scaled and _LOW <= typical * self.scale <= _HIGH:
            return
        wanted = 2.0 ** -round(math.log2(typical))
        wanted = min(max(wanted, _SMALLEST_SCALE), _LARGEST_SCALE)
        self._rescale(wanted)
        self.scale, self._scaled = wanted, True

    def _rescale(self, wanted: float) -> None:
        """Bring stored rows to another scale, in place, a chunk at a time; pages never written stay untouched."""
        for start in range(0, len(self), _CHUNK):
            part = np.flatnonzero(self.seen[start : start + _CHUNK]) + start
            scaled = self.rows[part].astype(np.float64) * (wanted / self.scale)
            self.rows[part] = np.clip(scaled, -_LARGEST, _LARGEST)
