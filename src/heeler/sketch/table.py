"""The newest sketch of every example, in host memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from heeler.sketch.courier import Courier

_CHUNK = 1 << 16
_LARGEST = float(np.finfo(np.float16).max)
_LOW, _HIGH = 2.0**-8, 2.0**10
"""Where a typical row's largest stored number may lie. Half precision is at its full 11 bits from 2⁻¹⁴ to 2¹⁶; with a
typical row near 1, rows of a thousandth and of ten thousand times its size keep them too."""
_USUAL = (2.0**-5, 2.0**6)
"""As long as the root mean square of a batch's stored numbers lies here, its typical row is not looked for: a look
costs more than all the rest."""


class SketchTable:
    """N × K sketches, in half precision by default, overwritten as examples come.

    rows: (N, K), the stored numbers, true sketch × scale. Memory is touched only where rows are written.
    seen: (N,) bool. scale: a power of two for the whole table, chosen from the first sketches and changed, with all
    stored rows, when sketches have drifted far. dropped: how many rows were refused because they were not finite.
    """

    def __init__(self, examples: int, dim: int, dtype: DTypeLike = np.float16) -> None:
        if examples < 1 or dim < 1:
            raise ValueError(f"a table needs at least one example and one column, not {examples} × {dim}")
        if np.dtype(dtype) not in (np.dtype(np.float16), np.dtype(np.float32)):
            raise ValueError(f"dtype must be float16 or float32, not {np.dtype(dtype)}")
        self.rows: NDArray[Any] = np.zeros((examples, dim), dtype=dtype)
        self.seen: NDArray[np.bool_] = np.zeros(examples, dtype=bool)
        self.scale = 1.0
        self.dropped = 0
        self._scaled = False
        self._courier = Courier()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        return int(self.rows.shape[1])

    def put(self, indices: ArrayLike, sketches: torch.Tensor | ArrayLike) -> None:
        """Store sketches (b, K) as the newest of examples `indices` (b,).

        From a GPU this only starts the copy; rows are written by later calls, once they have arrived, or by `flush`.
        """
        where = np.asarray(indices)
        if where.size and (where.min() < 0 or where.max() >= len(self)):
            raise IndexError(f"indices must lie in 0..{len(self) - 1}, not {where.min()}..{where.max()}")
        if sketches.ndim != 2 or sketches.shape[1] != self.dim:  # type: ignore[union-attr]
            raise ValueError(f"sketches must be (b, {self.dim})")
        if not len(self._courier) and len(sketches) == len(where):  # type: ignore[arg-type]
            if isinstance(sketches, torch.Tensor) and not sketches.is_cuda:
                sketches = sketches.detach().float().numpy()
            if isinstance(sketches, np.ndarray):
                self._store(where, sketches.astype(np.float32, copy=False))  # here already: no need of a copy
                return
        self._courier.send(where, sketches if isinstance(sketches, torch.Tensor) else np.array(sketches))
        self._write(wait=False)

    def flush(self) -> None:
        """Wait for what is under way, and write it."""
        self._write(wait=True)

    def sketches(self, indices: ArrayLike) -> NDArray[np.float32]:
        """The true sketches of some examples, (b, K) float32; zeros for those not seen."""
        return np.asarray(self.rows[np.asarray(indices)].astype(np.float32) / np.float32(self.scale))

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Arrays only. They are the table's own, not copies: write them out before the next `put`."""
        self.flush()
        return {
            "rows": self.rows,
            "seen": self.seen,
            "scale": np.array([self.scale, float(self._scaled)]),
            "dropped": np.array(self.dropped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rows = np.asarray(state["rows"])
        if rows.shape != self.rows.shape or rows.dtype != self.rows.dtype:
            raise ValueError(
                f"the saved table is {rows.shape} {rows.dtype}, this one {self.rows.shape} {self.rows.dtype}: "
                "resume with the same dataset, dim and dtype"
            )
        self.flush()
        np.copyto(self.rows, rows)
        np.copyto(self.seen, np.asarray(state["seen"]))
        self.scale, scaled = (float(v) for v in np.asarray(state["scale"]))
        self._scaled = bool(scaled)
        self.dropped = int(np.asarray(state["dropped"]))

    def _write(self, wait: bool) -> None:
        for where, values in self._courier.receive(wait):
            self._store(where, values)

    def _store(self, where: NDArray[Any], values: NDArray[np.float32]) -> None:
        values = np.ascontiguousarray(values)
        square = float(np.vdot(values, values))
        if not math.isfinite(square):  # one number tells that all of them are finite; huge ones may overflow it
            finite = np.isfinite(values).all(axis=1)
            self.dropped += int((~finite).sum())
            where, values = where[finite], values[finite]
        if not len(where):
            return
        if self.rows.dtype == np.float16:
            if not (self._scaled and _USUAL[0] <= math.sqrt(square / values.size) * self.scale <= _USUAL[1]):
                self._follow(values)
            single = torch.from_numpy(values) if self.scale == 1.0 else torch.from_numpy(values) * self.scale
            if not math.sqrt(square) * self.scale < _LARGEST:
                single = single.clamp(-_LARGEST, _LARGEST)
            self.rows[where] = single.half().numpy()  # torch casts four times faster
        else:
            self.rows[where] = values
        self.seen[where] = True  # of an index that occurs twice the last one stays

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
        wanted = min(max(wanted, 2.0**-120), 2.0**120)
        self._rescale(wanted / self.scale)
        self.scale, self._scaled = wanted, True

    def _rescale(self, factor: float) -> None:
        """Multiply the stored rows in place, a chunk at a time; pages never written stay untouched."""
        for start in range(0, len(self), _CHUNK):
            part = np.flatnonzero(self.seen[start : start + _CHUNK]) + start
            if len(part):
                scaled = self.rows[part].astype(np.float64) * factor
                self.rows[part] = np.clip(scaled, -_LARGEST, _LARGEST)
