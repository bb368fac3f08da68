"""What one process has open of a stream: shards as they are asked for, their entries until they are used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from heeler.herding.validate import IntArray


class Reader:
    """Hands out entries of shards. Right in any order; quick in one that has few shards open at a time.

    An entry is let go when it is used, and a shard when all its entries are. Where more is held than there should be (a
    shard whose other entries belong to another reader), the shard that was used longest ago is closed; it is opened
    again if need be.

    Args:
        open_shard: opens a shard by number; may run in a thread.
        sizes: (S,) entries of each shard.
        open_shards: the shards whose entries may be held, besides those that are read ahead.
        plan: (S,) the shards that will be asked for, in order, then -1; shared memory that others write to. A hint.
    """

    def __init__(
        self, open_shard: Callable[[int], Sequence[Any]], sizes: IntArray, open_shards: int, plan: Tensor
    ) -> None:
        self._open_shard, self._sizes, self._plan = open_shard, sizes, plan
        self._ahead_of = max(1, open_shards // 2)
        some = sizes[sizes > 0]
        self._limit = int(open_shards * some.mean() + 3 * some.max())
        self._open: OrderedDict[int, _Open] = OrderedDict()
        self._ahead: dict[int, Future[Sequence[Any]]] = {}
        self._thread: Any = None
        self.opened = 0
        """Shards so far, each time that one was opened."""

    def take(self, shard: int, place: int) -> Any:
        """The entry at `place` of a shard."""
        entries = self._open.get(shard)
        if entries is None or entries.used[place]:
            entries = self._open[shard] = self._opened(shard)
            self._open.move_to_end(shard)
            self._close_some()
            self._read_ahead(shard)
        self._open.move_to_end(shard)
        entry = entries.take(place)
        if not entries.left:
            del self._open[shard]
        return entry

    @property
    def held(self) -> int:
        """Entries that are not used yet."""
        return sum(entries.left for entries in self._open.values())

    def _opened(self, shard: int) -> _Open:
        future = self._ahead.pop(shard, None)
        entries = self._open_shard(shard) if future is None else future.result()
        self.opened += 1
        if len(entries) != self._sizes[shard]:
            raise ValueError(
                f"shard {shard} has {len(entries)} examples, but had {self._sizes[shard]} when they were counted: an "
                "example's number must mean the same example for ever. Count anew, start a new run, and make sure that "
                "reading a shard gives the same examples every time (no random filters)."
            )
        return _Open(entries)

    def _close_some(self) -> None:
        while self.held > self._limit and len(self._open) > 1:
            self._open.popitem(last=False)

    def _read_ahead(self, shard: int) -> None:
        """Have a thread open what comes after `shard` by the plan."""
        at = np.flatnonzero(self._plan.numpy() == shard)
        if not at.size:
            return
        coming = self._plan[at[0] + 1 : at[0] + 1 + self._ahead_of].tolist()
        wanted = [other for other in coming if other >= 0 and other not in self._open]
        for other in [old for old in self._ahead if old not in wanted]:
            del self._ahead[other]
        for other in wanted:
            if other not in self._ahead:
                self._ahead[other] = self._submit(partial(self._open_shard, other))

    def _submit(self, task: Callable[[], Sequence[Any]]) -> Future[Sequence[Any]]:
        if self._thread is None:
            from heeler.ordering.background import BackgroundThread

            self._thread = BackgroundThread("heeler-read-ahead")
        future: Future[Sequence[Any]] = self._thread.submit(task)
        return future


class _Open:
    """An open shard."""

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries, self.used, self.left = entries, bytearray(len(entries)), len(entries)

    def take(self, place: int) -> Any:
        entry = self.entries[place]
        if isinstance(self.entries, list):
            self.entries[place] = None
        self.used[place] = True
        self.left -= 1
        return entry
