"""A stream as a map-style dataset: every example has a number, and few shards are open at a time.

Example i is the k-th of shard s, with shards in the order of their list: i = sizes[0] + ... + sizes[s − 1] + k. So
numbers are the same in every epoch, run, rank and loader worker, and the sampler says which are read: it is PyTorch's
own way for an order that is decided in the training process. A `Reader` in every loader worker holds what is open.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from heeler.herding import RuleSpec
from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.streams.reader import Reader
from heeler.streams.shard_order import OPEN, check_sizes
from heeler.streams.shard_rules import sharded


class Stream(Dataset[Any]):
    """Examples in shards, by number. Made by the functions of `heeler.streams`; a subclass defines `open`.

    Args:
        sizes: (S,) examples of each shard, 0 or more.
        num_workers: the DataLoader's. Each of its workers then reads other shards.
        accumulate: the DataLoader's batches per step of the optimizer, if several: then the sampler's batch is as many.
        open_shards: the shards whose examples a loader worker may hold at a time.
    """

    def __init__(self, sizes: Any, *, num_workers: int = 0, accumulate: int = 1, open_shards: int = OPEN) -> None:
        self.sizes: IntArray = check_sizes(sizes)
        """(S,) examples of each shard."""
        given = ("num_workers", num_workers, 0), ("accumulate", accumulate, 1), ("open_shards", open_shards, 1)
        for name, value, least in given:
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        self.num_workers, self.accumulate, self.open_shards = num_workers, accumulate, open_shards
        self._ends = np.cumsum(self.sizes)
        # Shared with the loader workers: which shards each of them opens next. Only a hint, to read ahead.
        self._plan = torch.full((max(1, num_workers), self.sizes.size), -1, dtype=torch.int64).share_memory_()
        self._reader: Reader | None = None
        self._process = 0
        self._warned = False

    @abstractmethod
    def open(self, shard: int) -> Sequence[Any]:
        """What shard number `shard` holds, in order. A list is emptied as its entries are used."""

    def example(self, entry: Any) -> Any:
        """An example from what `open` has of it."""
        return entry

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(f"example {number} of a stream of {len(self)}")
        shard = int(np.searchsorted(self._ends, number, side="right"))
        return self.example(self._own_reader().take(shard, int(number - self._ends[shard] + self.sizes[shard])))

    def order_spec(self, order: str | RuleSpec) -> RuleSpec:
        """The rule that stands for the sampler's `order` where examples lie in shards."""
        readers = {"workers": max(1, self.num_workers), "accumulate": self.accumulate, "open_shards": self.open_shards}
        return sharded(order, self.sizes, **readers)

    def announce(self, numbers: IntArray, batch_size: int, loader: tuple[int | None, int] | None) -> None:
        """The sampler's word at an epoch's beginning: this rank reads examples `numbers`, (n,), in this order.

        batch_size: the sampler's, examples per step. loader: batch size and workers of the loader that will read, as
        far as they are known.
        """
        planned = batch_size // self.accumulate
        found, workers = loader or (None, self.num_workers)
        found = found or planned
        readers = max(workers, self.num_workers)
        if not self._warned and (workers != self.num_workers or (found != planned and readers > 1)):
            self._warned = True
            warn(
                "the stream was made for %d loader workers and batches of %d, but the loader has %d workers and "
                "batches of %d: its workers will open each other's shards. Say num_workers=%d%s where the stream is "
                "made.",
                *(self.num_workers, planned, workers, found, workers),
                "" if found == planned or batch_size % found else f", accumulate={batch_size // found}",
            )
        plan = np.full(self._plan.shape, -1, np.int64)
        shards = np.searchsorted(self._ends, numbers, side="right")
        lanes = np.arange(numbers.size) // found % len(plan)
        for lane, own in enumerate(plan):
            opened, first = np.unique(shards[lanes == lane], return_index=True)
            own[: opened.size] = opened[np.argsort(first)]
        self._plan.copy_(torch.from_numpy(plan))

    def close(self) -> None:
        """Let go of what this process has open; it is opened again when it is asked for."""
        self._reader = None

    def _own_reader(self) -> Reader:
        if self._reader is None or self._process != os.getpid():  # a forked loader worker starts with nothing open
            info = get_worker_info()
            lane = 0 if info is None else info.id % len(self._plan)
            self._reader, self._process = Reader(self.open, self.sizes, self.open_shards, self._plan[lane]), os.getpid()
        return self._reader

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reader": None}


class Parts(Stream):
    """Map-style datasets, one behind the other."""

    def __init__(self, parts: Sequence[Any], **options: Any) -> None:
        self._parts = list(getattr(parts, "datasets", parts))  # a ConcatDataset's own
        for part in self._parts:
            if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
                raise TypeError(
                    f"a part is a {type(part).__name__}, which has no length or cannot be read by number: its examples "
                    "have no numbers, and there is nothing to file gradients under. Give map-style datasets"
                )
        if not self._parts:
            raise ValueError("there are no parts: give at least one dataset")
        super().__init__([len(part) for part in self._parts], **options)

    def open(self, shard: int) -> Sequence[Any]:
        return InPlace(self._parts[shard], 0, len(self._parts[shard]))


class InPlace(Sequence[Any]):
    """`size` examples of a map-style dataset from number `start` on, read when they are asked for."""

    def __init__(self, dataset: Any, start: int, size: int) -> None:
        self._dataset, self._start, self._size = dataset, start, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, place: Any) -> Any:
        return self._dataset[self._start + place]
