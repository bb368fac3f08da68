"""Where blocks of rows lie: in memory, or in a file whose parts are mapped into memory as they are used.

Both are a set of numbered slots of (size, K) float16. Which block lies in which slot is the table's business
(`heeler.levels.block_table`). `allocate` gives away a slot that is not in `used`, with anything in it, and a stamp that
no slot ever had; `view` is the slot's own memory, and raises if the slot does not bear the stamp.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.notices import warn

MAPPED = 6
"""Slots of a file that are mapped at a time. What is mapped and was touched counts as the process's memory; what is not
stays in the system's cache as long as there is room."""
_PAGE = 1 << 16
"""Slots begin at multiples of it, as mappings must on all systems."""

Rows = NDArray[np.float16]


class MemorySlots:
    """In memory."""

    def __init__(self, size: int, dim: int) -> None:
        self._shape, self._stamp = (size, dim), 0
        self._held: dict[int, tuple[Rows, int]] = {}

    def allocate(self, used: IntArray) -> tuple[int, int]:
        kept = set(used.tolist())
        held = {slot: found for slot, found in self._held.items() if slot in kept}
        slot = next(number for number in range(len(held) + 1) if number not in held)
        self._stamp += 1
        held[slot] = np.empty(self._shape, np.float16), self._stamp
        self._held = held  # at once, for a thread may be reading
        return slot, self._stamp

    def view(self, slot: int, stamp: int) -> Rows:
        rows, found = self._held.get(slot, (None, -1))
        if rows is None or found != stamp:
            raise ValueError(f"the rows in slot {slot} are no longer those that are looked for: an order of the past")
        return rows


class FileSlots:
    """In a file of its own, made at the first `allocate`. Each slot ends with its stamp.

    A stamp is drawn anew whenever a slot is given away, and a saved state names the stamps of its slots. So a state
    whose rows are no longer there is found out, whoever has written over them.
    """

    def __init__(self, path: str | os.PathLike[str], size: int, dim: int) -> None:
        self.path, self._shape = Path(path), (size, dim)
        self._bytes = -(-(2 * size * dim + 8) // _PAGE) * _PAGE
        self._lock = threading.Lock()
        self._mapped: OrderedDict[int, tuple[Rows, NDArray[np.int64]]] = OrderedDict()
        self._file: int | None = None
        self._opened = False

    def open(self, *, new: bool) -> None:
        """Open the file, or make it. A new run puts away what an earlier one has left."""
        if self._file is not None:
            return
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"there is no folder {self.path.parent} to keep the table {self.path.name} in")
        if new and not self._opened and self.path.exists() and self.path.stat().st_size:
            aside = self.path.with_name(self.path.name + ".old")
            os.replace(self.path, aside)
            warn(
                "the table's file %s is of an earlier run, whose state was not loaded: it is now %s. To go on with "
                "that run, load its state before the first step (put the file back first); else delete it",
                self.path,
                aside,
            )
        self._file, self._opened = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), True

    def close(self) -> None:
        """Close the file; it is opened again when a slot is asked for. Mappings go when nobody holds a view."""
        with self._lock:
            self._mapped.clear()
            if self._file is not None:
                os.close(self._file)
                self._file = None

    @property
    def count(self) -> int:
        """Slots that the file has room for."""
        assert self._file is not None
        return os.fstat(self._file).st_size // self._bytes

    def allocate(self, used: IntArray) -> tuple[int, int]:
        self.open(new=True)
        assert self._file is not None
        free = np.ones(self.count + 1, np.bool_)
        free[used[(used >= 0) & (used < free.size)]] = False
        slot = int(np.flatnonzero(free)[0])
        if slot == self.count:
            try:  # now, for a mapped file that has no room left would end the process
                reserve = getattr(os, "posix_fallocate", lambda file, start, size: os.ftruncate(file, start + size))
                reserve(self._file, slot * self._bytes, self._bytes)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error.strerror}: the table needs {self._bytes:,} bytes more; make room, and go on from the last "
                    "checkpoint",
                    str(self.path),
                ) from None
        stamp = int.from_bytes(os.urandom(8), "little") >> 1
        with self._lock:
            self._at(slot)[1][0] = stamp
        return slot, stamp

    def view(self, slot: int, stamp: int) -> Rows:
        if self._file is None and not self.path.exists():
            raise ValueError(f"there is no table {self.path}: a state needs the file that it was saved with, beside it")
        self.open(new=False)
        with self._lock:
            rows, found = self._at(slot)
        if found[0] != stamp:
            raise ValueError(
                f"the rows in slot {slot} of {self.path} are no longer those that are looked for: the table keeps what "
                "the last two saved states need, and another run has perhaps written to it. Load a newer state, or "
                "start anew with another file"
            )
        return rows

    def sync(self) -> None:
        """All that was written is on the disk."""
        if self._file is not None:
            os.fsync(self._file)

    def _at(self, slot: int) -> tuple[Rows, NDArray[np.int64]]:
        """Rows and stamp of a slot."""
        assert self._file is not None
        if slot not in self._mapped:
            if not 0 <= slot < self.count:
                raise ValueError(f"{self.path} has {self.count} slots, and slot {slot} is looked for: it was cut off")
            memory: Any = mmap.mmap(self._file, self._bytes, offset=slot * self._bytes)
            rows = np.frombuffer(memory, np.float16, self._shape[0] * self._shape[1]).reshape(self._shape)
            stamp = np.frombuffer(memory, np.int64, 1, offset=self._bytes - 8)
            self._mapped[slot] = rows, stamp
            while len(self._mapped) > MAPPED:  # unmapped as soon as nobody holds a view
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(slot)
        return self._mapped[slot]

    def __del__(self) -> None:
        self.close()
