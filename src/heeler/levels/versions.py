"""One version of a table in blocks: where each block's rows are, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.persistence import bins_of
from heeler.herding.realized import row_squares
from heeler.herding.validate import IntArray
from heeler.levels import block_loops
from heeler.levels.halves import Blocks
from heeler.levels.scatter import Scatter
from heeler.levels.slots import FileSlots, MemorySlots, Rows

_FIELDS = {"slots": np.int64, "stamps": np.int64, "scales": np.float64, "counts": np.int64}


@dataclass
class Version:
    """Where each block's rows are; (B,) each."""

    slots: IntArray
    """-1 where no example of the block has a sketch."""
    stamps: IntArray
    scales: NDArray[np.float64]
    """What the stored numbers are to be divided by."""
    counts: IntArray
    """Examples with a sketch."""
    deals: int = 0
    """How often the rows were dealt out to other blocks."""

    @classmethod
    def empty(cls, blocks: int, deals: int = 0) -> Version:
        zeros = np.zeros(blocks, np.int64)
        return cls(np.full(blocks, -1), zeros, np.ones(blocks), zeros.copy(), deals)

    def copy(self) -> Version:
        return replace(self, **{name: getattr(self, name).copy() for name in _FIELDS})

    def state(self) -> dict[str, Any]:
        return {**{name: getattr(self, name).copy() for name in _FIELDS}, "deals": self.deals}

    @classmethod
    def from_state(cls, state: Any, shape: Blocks) -> Version:
        """What `state` returned; a ValueError if no table of this shape can have it."""
        arrays: dict[str, Any] = {
            name: np.array(check.stored_array(state, name, [kind], (shape.count,))) for name, kind in _FIELDS.items()
        }
        version = cls(**arrays, deals=check.stored_count(state, "deals"))
        lengths = np.array([shape.length(block) for block in range(shape.count)])
        outside = (version.counts < 0) | (version.counts > lengths) | (version.scales <= 0) | (version.slots < -1)
        if outside.any() or version.deals > 2**32:
            raise ValueError("the state's blocks are out of range: it is damaged")
        return version


@dataclass(frozen=True)
class Placement:
    """At which place an example's row lies: scattered, and then dealt out so many times."""

    scatter: Scatter
    shape: Blocks
    deals: int

    def places(self, examples: IntArray) -> IntArray:
        """(b,) the places of examples (b,)."""
        places = self.scatter.places(examples)
        for _ in range(self.deals):
            places = self.shape.dealt(places)
        return places

    def examples(self, places: IntArray) -> IntArray:
        """(b,) the examples at places (b,)."""
        for _ in range(self.deals):
            places = self.shape.undealt(places)
        return self.scatter.examples(places)


@dataclass(frozen=True)
class Snapshot:
    """The rows of one version."""

    shape: Blocks
    slots: MemorySlots | FileSlots
    version: Version
    dim: int
    weights: NDArray[np.float32] | None
    """(bins,) what rows predict, see `Persistence.closed_weights`."""

    def stored(self, block: int) -> Rows | None:
        """(n, K) stored numbers, NaN for the unseen; None if all are."""
        slot = int(self.version.slots[block])
        if slot < 0:
            return None
        return self.slots.view(slot, int(self.version.stamps[block]))[: self.shape.length(block)]

    def centred(self, block: int, mean: NDArray[np.float64]) -> NDArray[np.float32]:
        """(n, K) sketches as predictions minus `mean` (K,), zeros for the unseen."""
        stored = self.stored(block)
        if stored is None:
            return np.zeros((self.shape.length(block), self.dim), np.float32)
        return block_loops.centre(stored, self._factors(block, stored), mean.astype(np.float32))

    def _factors(self, block: int, stored: Rows) -> NDArray[np.float32]:
        """(n,) what stored numbers are to be multiplied with: true sketches, times what they predict."""
        scale = self.version.scales[block]
        plain = np.full(len(stored), 1 / scale, np.float32)
        if self.weights is None:
            return plain
        return plain * self.weights[bins_of(np.nan_to_num(row_squares(stored)) / scale**2)]

    def sum_of(self, block: int) -> NDArray[np.float64]:
        """(K,) Σ of the sketches of a block, as predictions."""
        stored = self.stored(block)
        return np.zeros(self.dim) if stored is None else block_loops.add_up(stored, self._factors(block, stored))
