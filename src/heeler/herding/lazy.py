"""Orders that are expanded where they are read, and never held as N numbers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray

_CHUNK = 1 << 14


class LazyOrder(ABC):
    """Like an array (N,) of int64 that cannot be written to: `len`, `order[a:b]`, iteration; `np.asarray` makes one."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def part(self, start: int, stop: int) -> IntArray:
        """(stop − start,) the examples at these positions, 0 ≤ start ≤ stop ≤ N; not to be written to."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(len(self))
            if step != 1:
                raise ValueError(f"an order that is expanded where it is read has no steps of {step}: read order[a:b]")
            return self.part(start, max(start, stop))
        position = range(len(self))[key]  # raises for one that is not there
        return int(self.part(position, position + 1)[0])

    def __iter__(self) -> Iterator[int]:
        for start in range(0, len(self), _CHUNK):
            yield from self[start : start + _CHUNK].tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        whole = self.part(0, len(self))
        return whole.astype(dtype or np.int64, copy=True)

    def renumbered(self, numbers: IntArray) -> LazyOrder:
        """The same order of numbers[0], numbers[1], ..."""
        return _Renumbered(self, numbers)


class _Renumbered(LazyOrder):
    def __init__(self, order: LazyOrder, numbers: IntArray) -> None:
        self._order, self._numbers = order, numbers

    def __len__(self) -> int:
        return len(self._order)

    def part(self, start: int, stop: int) -> IntArray:
        return self._numbers[self._order.part(start, stop)]


Order: TypeAlias = IntArray | LazyOrder
"""(N,) examples in their order: an array, or what is read like one: `len`, `order[a:b]`, iteration."""
