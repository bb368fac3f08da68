"""What travels between ranks: examples' numbers and their sketches, as tensors, and nothing pickled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.ordering.distributed.transport import RankFault, Transport

Rows = tuple[IntArray, NDArray[np.float32]]
"""(b,) numbers of examples and (b, K) their sketches."""
_HEADER = 5


class News(NamedTuple):
    """What a rank has seen since the last round."""

    rows: Rows
    late: int
    """So many of the rows, the first ones, are of the epoch before: other ranks may have newer ones."""
    forgotten: IntArray
    """Numbers of examples whose earlier sketches shall be forgotten."""


class Wire:
    """Sends sketches of `dim` numbers of some of `examples` examples to rank 0 of the group, and receives them there.

    halves: send half precision. A table stores no more; an online rule sums what it gets, and gets it in full.
    """

    def __init__(self, transport: Transport, examples: int, dim: int, *, halves: bool) -> None:
        self._transport, self._examples, self._dim = transport, examples, dim
        self.number = torch.int32 if examples < 2**31 else torch.int64
        """The type in which numbers of examples travel."""
        self.payload = torch.float16 if halves else torch.float32

    def send(self, news: News, trained: int = -1) -> None:
        """Send what is new, and how far this rank has come."""
        (indices, vectors), late, forgotten = news
        values, exponent = pack(vectors, self.payload)
        header = torch.tensor([indices.size, late, forgotten.size, exponent, trained], dtype=torch.int64)
        numbers = torch.from_numpy(np.concatenate([indices, forgotten])).to(self.number)
        # The leader receives from one rank after the other, and may wait for each: be more patient than that.
        self._transport.send([header], 0, patience=2.0)
        self._transport.send([numbers, values], 0, patience=2.0)

    def receive(self, ranks: Sequence[int], patience: Callable[[], float]) -> list[tuple[News, int]]:
        """What each of `ranks` sent. patience: how many timeouts are left for them all."""
        # From all at once: with many ranks on few cores, each takes its time to wake up.
        headers = [torch.empty(_HEADER, dtype=torch.int64) for _ in ranks]
        announced = list(zip(ranks, headers, strict=True))
        self._transport.receive_each([(rank, [header]) for rank, header in announced], patience=patience())
        bodies = [self._room(rank, header) for rank, header in announced]
        self._transport.receive_each(list(zip(ranks, bodies, strict=True)), patience=patience())
        return [self._unpacked(*each) for each in zip(ranks, headers, bodies, strict=True)]

    def _room(self, rank: int, header: torch.Tensor) -> list[torch.Tensor]:
        """For the numbers and sketches that a header announces."""
        count, late, forgotten, _, _ = header.tolist()
        limit = 4 * self._examples + 1024  # padded epochs and late rows: more than once per example, not much more
        if not 0 <= late <= count <= limit or not 0 <= forgotten <= limit:
            raise RankFault(rank, f"it announced {count} sketches, which cannot be")
        return [torch.empty(count + forgotten, dtype=self.number), torch.empty(count, self._dim, dtype=self.payload)]

    def _unpacked(self, rank: int, header: torch.Tensor, body: list[torch.Tensor]) -> tuple[News, int]:
        (count, late, _, exponent, trained), (numbers, values) = header.tolist(), body
        indices = numbers.numpy().astype(np.int64)
        if indices.size and (indices.min() < 0 or indices.max() >= self._examples):
            raise RankFault(rank, "it sent numbers of examples that do not exist")
        vectors = values.float().mul_(math.ldexp(1.0, -exponent)).numpy()
        return News((indices[:count], vectors), late, indices[count:]), trained


def join_indices(parts: list[IntArray]) -> IntArray:
    """All indices in one array."""
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def join(rows: list[Rows], dim: int) -> Rows:
    """All rows in one."""
    if not rows:
        return np.empty(0, np.int64), np.empty((0, dim), np.float32)
    return np.concatenate([i for i, _ in rows]), np.concatenate([v for _, v in rows])


def without(rows: list[Rows], numbers: IntArray) -> list[Rows]:
    """The rows of all other examples."""
    kept = [(indices, vectors, ~np.isin(indices, numbers)) for indices, vectors in rows]
    return [(indices[keep], vectors[keep]) for indices, vectors, keep in kept]


def _median(sizes: NDArray[np.float32]) -> float:
    """As NumPy's, whose first call imports a package: a tenth of a second, of every rank, at the same moment."""
    middle = np.sort(sizes)[(sizes.size - 1) // 2 : sizes.size // 2 + 1]
    return float(middle.mean())


def pack(vectors: NDArray[np.float32], dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """(b, K) in the payload's precision, times 2 to the returned power, which brings half precision into its range."""
    values = torch.from_numpy(vectors)
    if dtype != torch.float16 or not vectors.size:
        return values.to(dtype), 0
    sizes = np.abs(vectors).max(axis=1)
    largest = sizes.max()  # not a number if any is not
    sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
    typical = _median(sizes) if sizes.size else 1.0
    exponent = -round(math.log2(typical))
    limit = torch.finfo(torch.float16).max
    scaled = torch.from_numpy(np.ldexp(vectors, exponent))
    if np.ldexp(largest, exponent) <= limit:  # nearly always, and then there is nothing to look at
        return scaled.to(dtype), exponent
    return torch.where(scaled.isfinite(), scaled.clamp(-limit, limit), scaled).to(dtype), exponent


def gathered(transport: Transport, arrays: dict[str, NDArray[Any]]) -> list[dict[str, NDArray[Any]]]:
    """On rank 0 what all other ranks have, of the same names, types and lengths; nothing on these."""
    own = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in arrays.items()}
    if transport.rank:
        transport.send(list(own.values()), 0, patience=2.0)
        return []
    room = [[torch.empty_like(each) for each in own.values()] for _ in range(1, transport.size)]
    transport.receive_each(list(zip(range(1, transport.size), room, strict=True)))
    return [{name: each.numpy() for name, each in zip(own, theirs, strict=True)} for theirs in room]


def united(transport: Transport, numbers: IntArray) -> IntArray:
    """On all ranks, the numbers that any of them has; ascending."""
    if transport.rank:
        transport.send([torch.tensor([numbers.size])], 0, patience=2.0)
        transport.send([torch.from_numpy(numbers)], 0, patience=2.0)
        transport.receive([size := torch.empty(1, dtype=torch.int64)], 0, patience=2.0)
        transport.receive([found := torch.empty(int(size), dtype=torch.int64)], 0, patience=2.0)
        return found.numpy()
    others = range(1, transport.size)
    sizes = [torch.empty(1, dtype=torch.int64) for _ in others]
    transport.receive_each([(rank, [size]) for rank, size in zip(others, sizes, strict=True)])
    parts = [torch.empty(int(size), dtype=torch.int64) for size in sizes]
    transport.receive_each([(rank, [part]) for rank, part in zip(others, parts, strict=True)])
    whole = np.unique(np.concatenate([numbers, *(part.numpy() for part in parts)]))
    transport.send_each([(rank, [torch.tensor([whole.size])]) for rank in others])
    transport.send_each([(rank, [torch.from_numpy(whole)]) for rank in others])
    return whole
