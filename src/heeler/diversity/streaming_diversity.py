"""Diversity while training goes: sums that are updated at every step, and that add up across workers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from heeler.diversity.estimators import bound_from_sums
from heeler.diversity.measured import Diversity, from_bound, unknown
from heeler.diversity.sketch_error import Layouts, checked_layouts, moments, sketch_error
from heeler.diversity.vectors import Floats, as_rows, to_floats

MOMENT_ROWS = 2
"""Rows of a batch that the sketch's moments are taken from: they only enter its bias and the interval."""
FOLD = 32
"""Updates whose rows are kept, to take their moments at once."""


class StreamingDiversity:
    """Updated with every batch's vectors, (b, K); O(b·K) work per step, O(K) memory. `reset` it once per epoch.

    All it keeps are sums, so those of several workers add up: `merge` is associative and commutative, and the merged
    object gives what one that had seen all batches would give. The weights move between updates, so the gradients' sum
    is shorter, and the bound larger, than at any one point.

    sketch: as for `batch_size_bound`.
    """

    def __init__(self, dim: int, *, sketch: Layouts | None = None) -> None:
        if dim < 1:
            raise ValueError(f"dim must be positive, not {dim}")
        self.dim, self.layouts = dim, checked_layouts(sketch, dim)
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        self._count, self._squares, self._total = 0, 0.0, np.zeros(self.dim)
        self._moment = moments(np.zeros((0, self.dim)), self.layouts)
        self._picked: list[Floats] = []

    def update(self, vectors: Any) -> None:
        """Take in a batch's vectors, (b, K) NumPy or torch. Batches with nan or inf are left out: a skipped step."""
        found = as_rows(vectors)
        if found.shape[1] != self.dim:
            raise ValueError(f"vectors must be (b, {self.dim}), not {tuple(found.shape)}")
        batch = to_floats(found, single=True)
        squares = float(np.vdot(batch, batch))
        if not math.isfinite(squares):
            return
        self._count += len(batch)
        self._squares += squares
        self._total += batch.sum(axis=0)
        if self.layouts:
            self._picked.append(batch[:: -(-len(batch) // MOMENT_ROWS)].astype(np.float64))
            if len(self._picked) == FOLD:
                self._fold()

    def merge(self, other: StreamingDiversity) -> StreamingDiversity:
        """A new one with what both have seen."""
        if (self.dim, self.layouts) != (other.dim, other.layouts):
            raise ValueError("only streams of the same dim and sketch can be merged")
        merged = StreamingDiversity(self.dim, sketch=self.layouts)
        one, two = self.state_dict(), other.state_dict()
        merged.load_state_dict({name: one[name] + two[name] for name in one})
        return merged

    def measured(self) -> Diversity:
        """Diversity, bound and noise scale of the examples that came in since `reset`."""
        self._fold()
        if self._count == 0:
            return from_bound(unknown("no batch has come in yet"), 1, moving=True)
        whole, error = float(self._total @ self._total), sketch_error(self._moment, self._total, self.layouts)
        return from_bound(bound_from_sums(whole, self._squares, self._count, error), self._count, moving=True)

    def state_dict(self) -> dict[str, Any]:
        """Arrays only, as copies. To merge across processes, add them up."""
        self._fold()
        numbers = np.array([self._count, self._squares])
        return {"numbers": numbers, "total": self._total.copy(), "moment": self._moment.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises, and changes nothing, if it does not fit."""
        total, moment = (np.asarray(state[name]).astype(np.float64) for name in ("total", "moment"))  # copies
        if (total.shape, moment.shape) != (self._total.shape, self._moment.shape):
            raise ValueError("the state is of vectors of another length or layout: resume with the same dim and sketch")
        count, squares = (float(number) for number in state["numbers"])
        self._count, self._squares = int(count), squares
        self._total, self._moment, self._picked = total, moment, []

    def _fold(self) -> None:
        """Take the moments of the rows that were kept."""
        if self._picked:
            self._moment += moments(np.concatenate(self._picked), self.layouts)
            self._picked.clear()
