"""A table of sketches in blocks: what an epoch writes is apart from what its order is read from.

Every block has two versions. The *read* version is as the last epoch left it, and does not change: this epoch's order
is expanded from it, at any time and with the same result. What comes in goes to the *write* version: a block is copied
to a free slot before its first row is written to (copy on write), and at the epoch's end the written version is the
next one to read, in other blocks.

In other blocks, because examples of one block are trained on at about the same time. While weights move, so do all
gradients, and a block's sum would tell when it was sketched rather than what is in it. So at the end of an epoch that
has brought sketches the rows are dealt out anew (`Blocks.dealt`): each new block holds as many rows of every old one.

A saved state names the slots of both versions, and from then on these slots are not written to: the next row of such a
block goes to a new copy. So a state stays right whatever the run does after it, and a process that is killed while it
writes leaves nothing half done that any state refers to. A file keeps the slots of the last two states: the one before
is still needed while the newest is on its way to the disk.

An example without a sketch is a row of NaN.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heeler.herding import validate as check
from heeler.herding.table import SketchTable
from heeler.herding.validate import IntArray
from heeler.levels.halves import Blocks
from heeler.levels.scatter import Scatter
from heeler.levels.slots import FileSlots, MemorySlots, Rows, Slots

STATES = 2
"""Saved states whose rows a file keeps."""
DEALT = 1 << 25
"""Numbers of the blocks that are filled at a time when rows are dealt out."""
LARGEST_COPY = 1 << 32
"""Bytes up to which the whole table is copied for those who want it in one piece."""
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
    """How often the rows were dealt out anew."""

    @classmethod
    def empty(cls, blocks: int, deals: int = 0) -> Version:
        zeros = np.zeros(blocks, np.int64)
        return cls(np.full(blocks, -1), zeros, np.ones(blocks), zeros.copy(), deals)

    def copy(self) -> Version:
        return replace(self, **{name: getattr(self, name).copy() for name in _FIELDS})

    def state(self) -> dict[str, Any]:
        return {**{name: getattr(self, name).copy() for name in _FIELDS}, "deals": self.deals}


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
    """One version of all rows, which does not change."""

    shape: Blocks
    slots: Slots
    version: Version
    dim: int

    def stored(self, block: int) -> Rows | None:
        """(n, K) stored numbers, NaN for the unseen; None if all are."""
        slot = int(self.version.slots[block])
        if slot < 0:
            return None
        return self.slots.view(slot, int(self.version.stamps[block]))[: self.shape.length(block)]

    def centred(self, block: int, mean: NDArray[np.float64]) -> NDArray[np.float32]:
        """(n, K) true sketches minus `mean` (K,), zeros for the unseen."""
        from heeler.levels import block_kernels as kernels

        stored = self.stored(block)
        if stored is None:
            return np.zeros((self.shape.length(block), self.dim), np.float32)
        out = np.empty(stored.shape, np.float32)
        factor = np.float32(1 / self.version.scales[block])
        kernels.centre(check.as_bits(stored), factor, check.frozen(mean.astype(np.float32)), out)
        return out

    def sum_of(self, block: int) -> NDArray[np.float64]:
        """(K,) Σ of the true sketches of a block."""
        from heeler.levels import block_kernels as kernels

        total, stored = np.zeros(self.dim), self.stored(block)
        if stored is not None:
            kernels.add_up(check.as_bits(stored), total)
        return total / self.version.scales[block]


class BlockTable(SketchTable):
    """N × K sketches in half precision, in blocks, in memory or in a file.

    Args:
        shape: how places are cut into blocks.
        dim: K.
        scatter: at which place an example's row lies.
        path: of a file to keep rows in; None: in memory.
    """

    def __init__(self, shape: Blocks, dim: int, scatter: Scatter, path: str | os.PathLike[str] | None = None) -> None:
        self.shape, self._dim, self._scatter = shape, check.check_positive(dim, "dim"), scatter
        self._slots: Slots = MemorySlots(shape.size, dim) if path is None else FileSlots(path, shape.size, dim)
        self._read = Version.empty(shape.count)
        self._write = self._read.copy()
        self._own = np.zeros(shape.count, np.bool_)  # the written version has a slot to itself
        self._kept: deque[IntArray] = deque(maxlen=STATES)
        self.scale, self.dropped, self._scaled, self._half = 1.0, 0, False, True
        self._agreed = np.zeros((2, 3))

    def __len__(self) -> int:
        return self.shape.examples

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def snapshot(self) -> Snapshot:
        """What the last epoch left."""
        return Snapshot(self.shape, self._slots, self._read, self.dim)

    @property
    def share_seen(self) -> float:
        return float(self._write.counts.sum()) / len(self)

    @property
    def placement(self) -> Placement:
        """Where rows lie, in both versions."""
        return Placement(self._scatter, self.shape, self._read.deals)

    def close_epoch(self) -> None:
        """What was written is what is read from now on; where anything was, in other blocks."""
        super().close_epoch()
        if not np.array_equal(self._write.stamps, self._read.stamps):
            self._read = self._write  # what the epoch's order was read from is not needed any more
            self._write = self._dealt()
        self._read = self._write.copy()
        self._own[:] = False

    def _dealt(self) -> Version:
        """The written version, dealt out to other blocks: some of them at a time, each old block read in sequence."""
        count, size = self.shape.count, self.shape.size
        old, new = Snapshot(self.shape, self._slots, self._read, self.dim), Version.empty(count, self._read.deals + 1)
        largest, group = float(np.finfo(np.float16).max), max(1, DEALT // (size * self.dim))
        for first in range(0, count, group):
            start, stop = first * size, min((first + group) * size, len(self))
            rows = np.full((stop - start, self.dim), np.nan, np.float16)
            for block in range(count):
                stored = old.stored(block)
                if stored is None:
                    continue
                a, b = self.shape.rows_dealt(block, start, stop)
                ratio = np.float32(self.scale / self._read.scales[block])
                part = stored[a:b] if ratio == 1 else np.clip(stored[a:b].astype(np.float32) * ratio, -largest, largest)
                rows[self.shape.dealt(block * size + np.arange(a, b)) - start] = part
            for block in range(first, min(first + group, count)):
                own = rows[(block - first) * size :][: self.shape.length(block)]
                new.counts[block] = np.count_nonzero(~np.isnan(own[:, 0]))
                if new.counts[block]:
                    used = np.concatenate([self._read.slots, new.slots, *self._kept])
                    new.slots[block], new.stamps[block] = self._slots.allocate(used)
                    view = self._slots.view(int(new.slots[block]), int(new.stamps[block]))
                    view[: len(own)], view[len(own) :] = own, np.nan
                    new.scales[block] = self.scale
        return new

    # Rows

    def forget(self, indices: IntArray) -> None:
        """Examples `indices` (b,) have no sketch any more."""
        for block, rows, _ in self._by_block(self.placement.places(indices)):
            if self._write.slots[block] >= 0:
                stored = self._writable(block)
                self._write.counts[block] -= np.unique(rows[~np.isnan(stored[rows, 0])]).size
                stored[rows] = np.nan

    def sketches(self, indices: ArrayLike) -> NDArray[np.float32]:
        where = check.as_integers(np.atleast_1d(np.asarray(indices)), "indices")
        out = np.zeros((where.size, self.dim), np.float32)
        newest = Snapshot(self.shape, self._slots, self._write, self.dim)
        for block, rows, which in self._by_block(self.placement.places(where)):
            stored = newest.stored(block)
            if stored is not None:
                out[which] = stored[rows].astype(np.float32) / np.float32(self._write.scales[block])
        return np.nan_to_num(out, copy=False, nan=0.0)

    @property
    def rows(self) -> NDArray[Any]:  # type: ignore[override]
        """(N, K) a copy of the newest sketches × `scale`, by example, zeros for the unseen."""
        if 2 * len(self) * self.dim > LARGEST_COPY:
            raise ValueError(
                f"the table's {len(self)} × {self.dim} numbers lie in blocks, and are too many to be copied into one "
                "array: read the sketches of some examples with table.sketches(indices)"
            )
        with np.errstate(over="ignore"):
            largest = float(np.finfo(np.float16).max)
            found = self.sketches(np.arange(len(self))) * np.float32(self.scale)
            return np.clip(found, -largest, largest).astype(np.float16)

    @property
    def seen(self) -> NDArray[np.bool_]:  # type: ignore[override]
        """(N,) a copy: which examples have a sketch."""
        out = np.zeros(len(self), np.bool_)
        newest = Snapshot(self.shape, self._slots, self._write, self.dim)
        for block in range(self.shape.count):
            stored = newest.stored(block)
            if stored is not None:
                place = block * self.shape.size + np.flatnonzero(~np.isnan(stored[:, 0]))
                out[self.placement.examples(place)] = True
        return out

    def _file(self, where: IntArray, values: NDArray[np.float32]) -> None:
        for block, rows, which in self._by_block(self.placement.places(where)):
            stored = self._writable(block)
            if self._write.scales[block] != self.scale:
                ratio, largest = self.scale / self._write.scales[block], float(np.finfo(np.float16).max)
                stored[:] = np.clip(stored.astype(np.float32) * np.float32(ratio), -largest, largest)
                self._write.scales[block] = self.scale
            old, new = stored[rows], np.ascontiguousarray(values[which])
            known = ~np.isnan(old[:, 0])
            self._agreed[0] += self._compared(old, known, np.arange(rows.size), new)
            self._write.counts[block] += np.unique(rows[~known]).size
            self._store(stored, rows, new)

    def _rescale(self, wanted: float) -> None:
        """Blocks follow one by one, as they are written to."""

    def _by_block(self, places: IntArray) -> Iterator[tuple[int, IntArray, Any]]:
        """Blocks, with the rows in them that `places` (b,) name, and which of the b these are, in their order."""
        blocks, rows = np.divmod(places, self.shape.size)
        if blocks.size and (blocks == blocks[0]).all():
            yield int(blocks[0]), rows, slice(None)
            return
        sequence = np.argsort(blocks, kind="stable")
        cuts = np.flatnonzero(np.diff(blocks[sequence])) + 1
        for which in np.split(sequence, cuts) if blocks.size else []:
            yield int(blocks[which[0]]), rows[which], which

    def _writable(self, block: int) -> Rows:
        """(n, K) the written version of a block, in a slot to itself."""
        version = self._write
        before = Snapshot(self.shape, self._slots, version, self.dim).stored(block)
        if self._own[block] and before is not None:
            return before
        used = np.concatenate([self._read.slots, version.slots, *self._kept])
        slot, stamp = self._slots.allocate(used)
        rows = self._slots.view(slot, stamp)
        if before is None:
            rows[:] = np.nan
            version.scales[block] = self.scale
        else:
            rows[: len(before)], rows[len(before) :] = before, np.nan
        version.slots[block], version.stamps[block], self._own[block] = slot, stamp, True
        return rows[: self.shape.length(block)]

    # State

    def state_dict(self) -> dict[str, Any]:
        """What both versions are made of. Of a table in memory, with all rows, as a copy; of a file, where they are."""
        used = np.unique(np.concatenate([self._read.slots, self._write.slots]))
        used = used[used >= 0]
        state: dict[str, Any] = {
            "block": self.shape.size,
            "read": self._read.state(),
            "write": self._write.state(),
            "scale": np.array([self.scale, float(self._scaled)]),
            "dropped": np.array(self.dropped, np.int64),
            "agreed": self._agreed.copy(),
        }
        if isinstance(self._slots, FileSlots):
            if not self._kept or not np.array_equal(self._kept[-1], used):
                self._kept.append(used)
            self._own[:] = False  # from here on these slots are not written to
            self._slots.sync()
            return state
        versions = (self._read, self._write)
        stamps = {
            slot: stamp for v in versions for slot, stamp in zip(v.slots.tolist(), v.stamps.tolist(), strict=True)
        }
        state["rows"] = np.stack(
            [np.zeros((self.shape.size, self.dim), np.float16)]
            + [self._slots.view(slot, stamps[slot]) for slot in used.tolist()]
        )[1:]
        for name in ("read", "write"):
            slots = state[name]["slots"]
            slots[slots >= 0] = np.searchsorted(used, slots[slots >= 0])
        return state

    def check_state(self, state: dict[str, Any]) -> None:
        blocks = self.shape.count
        if check.stored_count(state, "block") != self.shape.size:
            raise ValueError(f"the state's blocks are of {state['block']} examples, these of {self.shape.size}")
        scale, scaled = check.stored_array(state, "scale", [np.float64], (2,)).tolist()
        check.stored_array(state, "agreed", [np.float64], (2, 3))
        if not 0 < scale < math.inf or scaled not in (0, 1):
            raise ValueError(f"the state's scale is {scale}, {scaled}: it is damaged")
        if check.stored_array(state, "dropped", [np.int64], ()) < 0:
            raise ValueError("the state's dropped is below 0: it is damaged")
        in_file = "rows" not in state
        if in_file != isinstance(self._slots, FileSlots):
            was, now = ("in a file", "in memory") if in_file else ("in memory", "in a file")
            raise ValueError(
                f"the state's table lies {was}, this one's {now}: make the sampler with the table= that the state was "
                "saved with" + (", and keep the file beside the checkpoint" if in_file else ", none")
            )
        count = None
        if not in_file:
            rows = check.as_numpy(state["rows"], "rows")
            if rows.dtype != np.float16 or rows.shape[1:] != (self.shape.size, self.dim):
                raise ValueError(f"the state's rows are {rows.dtype} {rows.shape}: go on with the same dataset and dim")
            count = len(rows)
        for name in ("read", "write"):
            version = self._version(check.entry(state, name))
            if (version.slots < -1).any() or (count is not None and (version.slots >= count).any()):
                raise ValueError(f"the state's {name} names blocks that are not there: it is damaged")
            if version.deals != check.stored_count(state["read"], "deals") or version.deals > 2**32:
                raise ValueError("the state's versions are not of one epoch: it is damaged")
            lengths = np.array([self.shape.length(block) for block in range(blocks)])
            if (version.counts < 0).any() or (version.counts > lengths).any() or (version.scales <= 0).any():
                raise ValueError(f"the state's {name} is out of range: it is damaged")
            if in_file:
                for block in np.flatnonzero(version.slots >= 0).tolist():
                    Snapshot(self.shape, self._slots, version, self.dim).stored(block)  # raises if it is not there

    def restore(self, state: dict[str, Any]) -> None:
        self._read, self._write = self._version(state["read"]), self._version(state["write"])
        if isinstance(self._slots, FileSlots):
            self._slots.open(new=False)
            self._kept.append(np.unique(np.concatenate([self._read.slots, self._write.slots])))
        else:
            self._slots = MemorySlots(self.shape.size, self.dim)
            rows = check.as_numpy(state["rows"], "rows")
            stamps = np.zeros(len(rows) + 1, np.int64)
            for number, block in enumerate(rows):
                slot, stamps[number] = self._slots.allocate(np.arange(number))
                self._slots.view(slot, int(stamps[number]))[:] = block
            for version in (self._read, self._write):
                version.stamps = stamps[version.slots]
        self._own[:] = False
        scale, scaled = check.as_numpy(state["scale"], "scale").tolist()
        self.scale, self._scaled, self.dropped = scale, bool(scaled), int(state["dropped"])
        self._agreed = np.array(check.as_numpy(state["agreed"], "agreed"))

    def _version(self, state: Any) -> Version:
        shape = (self.shape.count,)
        arrays: dict[str, Any] = {
            name: np.array(check.stored_array(state, name, [kind], shape)) for name, kind in _FIELDS.items()
        }
        return Version(**arrays, deals=check.stored_count(state, "deals"))
