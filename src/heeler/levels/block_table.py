"""A table of sketches in blocks: what an epoch writes is apart from what its order is read from.

Every block has two versions. The *read* version is as the last epoch left it, and does not change: this epoch's order
is expanded from it, at any time and with the same result. What comes in goes to the *write* version: a block is copied
to a free slot before its first row is written to (copy on write), and at the epoch's end the written version is the
next one to read, in other blocks.

In other blocks, because examples of one block are trained on at about the same time. While weights move, so do all
gradients, and a block's sum would tell when it was sketched rather than what is in it. So at the end of an epoch that
has brought sketches the rows are dealt out again (`Blocks.dealt`): each new block holds as many rows of every old one.

A saved state names the slots of both versions, and from then on these slots are not written to: the next row of such a
block goes to a new copy. So a state stays right whatever the run does after it, and a process that is killed while it
writes leaves nothing half done that any state refers to. A file keeps the slots of the last two states: the one before
is still needed while the newest is on its way to the disk.

An example without a sketch is a row of NaN.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from heeler.herding import validate as check
from heeler.herding.table import SketchTable
from heeler.herding.validate import IntArray
from heeler.levels.halves import Blocks
from heeler.levels.scatter import Scatter
from heeler.levels.slots import FileSlots, MemorySlots, Rows
from heeler.levels.versions import Placement, Snapshot, Version

STATES = 2
"""Saved states whose rows a file keeps."""
DEALT = 1 << 25
"""Numbers of the blocks that are filled at a time when rows are dealt out."""
LARGEST_COPY = 1 << 32
"""Bytes up to which the whole table is copied for those who want it in one piece."""


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
        self._slots = MemorySlots(shape.size, dim) if path is None else FileSlots(path, shape.size, dim)
        self._read = Version.empty(shape.count)
        self._write = self._read.copy()
        self._own = np.zeros(shape.count, np.bool_)  # the written version has a slot to itself
        self._kept: deque[IntArray] = deque(maxlen=STATES)
        self._start()

    def __len__(self) -> int:
        return self.shape.examples

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def snapshot(self) -> Snapshot:
        """What the last epoch left."""
        return self._snapshot(self._read)

    @property
    def _newest(self) -> Snapshot:
        return self._snapshot(self._write)

    def _snapshot(self, version: Version) -> Snapshot:
        return Snapshot(self.shape, self._slots, version, self.dim, self.persistence.closed_weights)

    @property
    def share_seen(self) -> float:
        return float(self._write.counts.sum()) / len(self)

    @property
    def placement(self) -> Placement:
        """Where rows lie, in both versions."""
        return Placement(self._scatter, self.shape, self._read.deals)

    def close(self) -> None:
        """Let go of the file until it is needed again."""
        if isinstance(self._slots, FileSlots):
            self._slots.close()

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
        old, new = self.snapshot, Version.empty(count, self._read.deals + 1)
        group = max(1, DEALT // (size * self.dim))
        for first in range(0, count, group):
            start, stop = first * size, min((first + group) * size, len(self))
            rows = np.full((stop - start, self.dim), np.nan, np.float16)
            for block in range(count):
                stored = old.stored(block)
                if stored is None:
                    continue
                a, b = self.shape.rows_dealt(block, start, stop)
                ratio = self.scale / self._read.scales[block]
                part = stored[a:b] if ratio == 1 else _rescaled(stored[a:b], ratio)
                rows[self.shape.dealt(block * size + np.arange(a, b)) - start] = part
            for block in range(first, min(first + group, count)):
                own = rows[(block - first) * size :][: self.shape.length(block)]
                new.counts[block] = np.count_nonzero(~np.isnan(own[:, 0]))
                if new.counts[block]:
                    self._fill(new, block, own)
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
        for block, rows, which in self._by_block(self.placement.places(where)):
            stored = self._newest.stored(block)
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
        return _rescaled(self.sketches(np.arange(len(self))), self.scale).astype(np.float16)

    @property
    def seen(self) -> NDArray[np.bool_]:  # type: ignore[override]
        """(N,) a copy: which examples have a sketch."""
        out = np.zeros(len(self), np.bool_)
        for block in range(self.shape.count):
            stored = self._newest.stored(block)
            if stored is not None:
                place = block * self.shape.size + np.flatnonzero(~np.isnan(stored[:, 0]))
                out[self.placement.examples(place)] = True
        return out

    def _file(self, where: IntArray, values: NDArray[np.float32]) -> None:
        for block, rows, which in self._by_block(self.placement.places(where)):
            stored = self._writable(block)
            if self._write.scales[block] != self.scale:
                stored[:] = _rescaled(stored, self.scale / self._write.scales[block])
                self._write.scales[block] = self.scale
            old, new = stored[rows], np.ascontiguousarray(values[which])
            known = ~np.isnan(old[:, 0])
            self._compare(old, known, np.arange(rows.size), where[which], new)
            self._write.counts[block] += np.unique(rows[~known]).size
            self._store(stored, rows, new)

    def _rescale(self, wanted: float) -> None:
        """Blocks follow one by one, as they are written to."""

    def _by_block(self, places: IntArray) -> Iterator[tuple[int, IntArray, Any]]:
        """Blocks, with the rows in them that `places` (b,) name, and which of the b these are, in their order."""
        blocks, rows = np.divmod(places, self.shape.size)
        sequence = np.argsort(blocks, kind="stable")
        cuts = np.flatnonzero(np.diff(blocks[sequence])) + 1
        for which in np.split(sequence, cuts) if blocks.size else []:
            yield int(blocks[which[0]]), rows[which], which

    def _writable(self, block: int) -> Rows:
        """(n, K) the written version of a block, in a slot to itself."""
        before = self._newest.stored(block)
        if self._own[block] and before is not None:
            return before
        if before is None:
            self._write.scales[block] = self.scale
        self._own[block] = True
        return self._fill(self._write, block, before)[: self.shape.length(block)]

    def _fill(self, version: Version, block: int, rows: Rows | None) -> Rows:
        """(size, K) a new slot for a block of a version, with these rows in it, NaN for the rest."""
        slot, stamp = self._slots.allocate(np.concatenate([self._read.slots, version.slots, *self._kept]))
        out = self._slots.view(slot, stamp)
        count = 0 if rows is None else len(rows)
        if rows is not None:
            out[:count] = rows
        out[count:] = np.nan
        version.slots[block], version.stamps[block] = slot, stamp
        return out

    # State

    def state_dict(self) -> dict[str, Any]:
        """What both versions are made of. Of a table in memory, with all rows, as a copy; of a file, where they are."""
        state: dict[str, Any] = {"block": self.shape.size, **self._numbers()}
        state |= {"read": self._read.state(), "write": self._write.state()}
        versions = (self._read, self._write)
        used = np.unique(np.concatenate([version.slots for version in versions]))
        used = used[used >= 0]
        if isinstance(self._slots, FileSlots):
            if not self._kept or not np.array_equal(self._kept[-1], used):
                self._kept.append(used)
            self._own[:] = False  # from here on these slots are not written to
            self._slots.sync()
            return state
        stamps = {slot: stamp for v in versions for slot, stamp in zip(v.slots, v.stamps, strict=True)}
        state["rows"] = np.empty((used.size, self.shape.size, self.dim), np.float16)
        for number, slot in enumerate(used):
            state["rows"][number] = self._slots.view(int(slot), int(stamps[slot]))
        for name in ("read", "write"):
            slots = state[name]["slots"]
            slots[slots >= 0] = np.searchsorted(used, slots[slots >= 0])
        return state

    def check_state(self, state: dict[str, Any]) -> None:
        if check.stored_count(state, "block") != self.shape.size:
            raise ValueError(f"the state's blocks are of {state['block']} examples, these of {self.shape.size}")
        self._check_numbers(state)
        in_file = "rows" not in state
        if in_file != isinstance(self._slots, FileSlots):
            was, now = ("in a file", "in memory") if in_file else ("in memory", "in a file")
            raise ValueError(
                f"the state's table lies {was}, this one's {now}: give heeler.two_levels(table=...) the path that the "
                "state was saved with" + (", and keep the file beside the checkpoint" if in_file else ", none")
            )
        versions = [Version.from_state(check.entry(state, name), self.shape) for name in ("read", "write")]
        if versions[0].deals != versions[1].deals:
            raise ValueError("the state's versions are not of one epoch: it is damaged")
        if not in_file:
            rows = check.as_numpy(state["rows"], "rows")
            if rows.dtype != np.float16 or rows.shape[1:] != (self.shape.size, self.dim):
                raise ValueError(f"the state's rows are {rows.dtype} {rows.shape}: go on with the same dataset and dim")
            if max(version.slots.max() for version in versions) >= len(rows):
                raise ValueError("the state names blocks that are not there: it is damaged")
            return
        for version in versions:
            for block in range(self.shape.count):
                self._snapshot(version).stored(block)  # raises if it is not there

    def restore(self, state: dict[str, Any]) -> None:
        self._read, self._write = (Version.from_state(state[name], self.shape) for name in ("read", "write"))
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
        self._restore_numbers(state)


def _rescaled(rows: NDArray[Any], ratio: float) -> NDArray[Any]:
    """Rows times a power of two, within half precision's range; NaN stays."""
    largest = float(np.finfo(np.float16).max)
    with np.errstate(over="ignore"):
        return np.clip(rows.astype(np.float32) * np.float32(ratio), -largest, largest)
