"""Shards that can be read by number in place: map-style datasets, or stretches of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from heeler.streams.stream import Stream


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
