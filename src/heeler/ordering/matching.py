"""Which examples are these? A pass's inputs, compared with the batches that the loader has handed out.

A loop may skip a batch, repeat it, permute it, run another data set's batch first, or fetch the next batch between
forward and backward. None of that can be told by counting. But most models are called with rows of the batch as they
came, or with a copy of them on another device, with windows of them (`ids[:, :-1]`) or with rows cut into several:
then the rows themselves tell, by their hashes. A pass is known only if each of its rows is.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding.validate import IntArray
from heeler.ordering.fingerprint import LEADING, PLACES, Floats, bands_of, dense, keys_in, keys_of, places_of
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample
from heeler.torch_private import version

TENSORS = 8
"""Of a batch, at most, that a model's input is looked for in."""
SMALL = 1 << 16
"""Numbers of a tensor that is copied as it is handed out: the loop may write to it."""
LARGE = 1 << 22
"""Numbers of a tensor in which no window is looked for any more."""
OFFSETS = 8
"""Places in a row, at most, at which a window is tried."""
FEW = 8
"""Single numbers in a row that may be alike by chance."""
AMBIGUOUS = -1
"""In the place of an example, where several have the same row."""


@dataclass(frozen=True)
class Look:
    """What a pass's input looked like. prints: (n, PRINT). size: numbers in a row."""

    prints: Floats
    size: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Match:
    """indices: (n,) the examples of a pass's rows, AMBIGUOUS where several have that row. rivals: those that have."""

    indices: IntArray
    rivals: frozenset[int] = frozenset()


class HeldTensor:
    """A tensor of a batch, with a row per example, as it was handed out.

    part: takes it out of a tensor with several rows per example. slot: it has row `slot` of each.
    """

    def __init__(
        self, whole: Tensor, keeps: bool, part: Callable[[Tensor], Tensor] | None = None, slot: int | None = None
    ) -> None:
        self.slot = slot
        tensor = whole if part is None else part(whole)
        on_host = tensor.device.type == "cpu"
        # On the host it is kept, to be compared with copies; a GPU's memory is not ours to fill.
        self.kept = tensor if keeps and on_host else None
        self._ref, self._part = weakref.ref(whole), part
        self._version = version([tensor])
        self.size, self.dtype = tensor.shape[1:].numel(), tensor.dtype
        self.is_read = keeps and on_host and tensor.numel() > 0 and is_plain(tensor)
        """Whether its rows can be compared with others."""
        self._copy = _bytes(tensor.detach()).copy() if self.is_read and tensor.numel() <= SMALL else None
        self._places = places_of(_flat(tensor)).numpy() if self.is_read and self._copy is None else None
        self._keys: dict[tuple[torch.dtype, int, int | None], IntArray] = {}
        self._bands: Floats | None = None

    @property
    def tensor(self) -> Tensor | None:
        """None where it is gone."""
        if self.kept is not None:
            return self.kept
        whole = self._ref()
        return whole if whole is None or self._part is None else self._part(whole)

    @property
    def places(self) -> Floats:
        """(n, PLACES), of one that is read."""
        if self._places is None:
            self._places = places_of(self._copied_rows()).numpy()
        return self._places

    @property
    def unchanged(self) -> bool:
        """Whether nobody has written to it. NumPy and `.data` leave no trace but in the numbers."""
        tensor = self.tensor
        if tensor is None or version([tensor]) != self._version:
            return False
        if self._copy is not None:
            return np.array_equal(_bytes(tensor.detach()), self._copy)
        return not self.is_read or np.array_equal(places_of(_flat(tensor)), self.places)

    @property
    def rows(self) -> Tensor | None:
        """(n, size) as they were handed out; None where that is lost."""
        if self._copy is not None:
            return self._copied_rows()
        tensor = self.tensor
        return None if tensor is None or not self.is_read or not self.unchanged else _flat(tensor)

    def _copied_rows(self) -> Tensor:
        assert self._copy is not None
        return torch.from_numpy(self._copy).view(self.dtype).view(-1, self.size)

    @property
    def bands(self) -> Floats | None:
        """(n, BANDS); None where that is lost."""
        if self._bands is None and (rows := self.rows) is not None:
            self._bands = bands_of(rows.detach()).numpy()
        return self._bands

    def keys(self, dtype: torch.dtype, size: int, offset: int | None = None) -> IntArray | None:
        """(n·k,) the hashes of parts of its rows, as a copy of type `dtype` has them; None where that is lost.

        Of the k pieces of `size` numbers that a row is cut into; or (n,) of the windows at `offset`.
        """
        kind = (dtype, size, offset)
        if kind not in self._keys and (rows := self.rows) is not None:
            part = rows.detach() if offset is None else rows.detach()[:, offset : offset + size]
            self._keys[kind] = keys_of(part.to(dtype).reshape(-1, size))
        return self._keys.get(kind)

    def can_be(self, dtype: torch.dtype) -> bool:
        """Whether a copy may have this type and still be known."""
        return dtype.is_floating_point or not self.dtype.is_floating_point


class HandedOut:
    """One batch as the loader handed it out: the numbers of its examples, and the tensors that hold them.

    indices: (n,) in the order of the batch's rows; None where that is not known. start: its place in the epoch.
    """

    def __init__(
        self, indices: IntArray | None, data: Any, start: int, size: int, per: RowsPerExample = ONE_ROW
    ) -> None:
        self.indices, self.start, self.size = indices, start, size
        keeps = torch.is_grad_enabled()  # without gradients a batch is evaluated on: nothing of it is kept
        found = [t for t in _tensors(data) if t.ndim and len(t) in (size, size * per.number)][:TENSORS]
        if per.number == 1:
            self.held = [HeldTensor(tensor, keeps) for tensor in found]
        else:
            self.held = [HeldTensor(t, keeps, p, slot) for t in found for slot, p in _parts(t, size, per).items()]

    def only(self, slot: int) -> HandedOut:
        """The same batch with nothing but row `slot` of each example."""
        found = copy.copy(self)
        found.held = [held for held in self.held if held.slot == slot]
        return found

    @staticmethod
    def lengths(data: Any) -> list[int]:
        """Of all tensors in a batch."""
        return [len(t) for t in _tensors(data) if t.ndim]


def _parts(x: Tensor, size: int, per: RowsPerExample) -> dict[int | None, Callable[[Tensor], Tensor] | None]:
    """What of a batch's tensor a pass may hold: all of it, or the examples' first rows, their second ones and so on."""
    if len(x) > size:
        return {j: partial(per.part, j=j) for j in range(per.number)}
    stacked = x.ndim > 1 and x.shape[1] == per.number
    return {None: None} | {j: partial(torch.select, dim=1, index=j) for j in range(per.number if stacked else 0)}


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Of a tensor on the host, for NumPy: to wake PyTorch's threads for so little takes longer than the work."""
    return dense(tensor.reshape(-1)).view(torch.uint8).numpy()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(len(tensor), -1)


def is_plain(x: Tensor) -> bool:
    """Whether it is made of numbers, one behind the other, that can be compared."""
    return x.layout is torch.strided and not (x.is_nested or x.is_quantized or x.is_complex() or x.is_neg())


def same_memory(x: Tensor, batches: list[HandedOut]) -> IntArray | None:
    """The examples of an input that is a batch's own tensor, or a view of some of its rows; None if it is not.

    One that was written to since it was handed out may hold other rows, and proves nothing.
    """
    for batch in batches:
        for held in batch.held:
            if held.kept is x or (held.kept is None and held.tensor is x):
                return batch.indices if held.unchanged else None
    pointer = x.untyped_storage().data_ptr()
    known = [(b.indices, held, t) for b in batches for held in b.held if (t := held.tensor) is not None]
    for indices, held, tensor in known if pointer else ():
        if tensor.untyped_storage().data_ptr() != pointer or tensor.dtype != x.dtype or indices is None:
            continue
        stride = tensor.stride(0)
        if stride <= 0 or x.stride(0) != stride:
            continue
        first, inside = divmod(x.data_ptr() - tensor.data_ptr(), stride * tensor.element_size())
        if first < 0 or first + len(x) > len(tensor) or inside // tensor.element_size() + _reach(x) > _reach(tensor):
            continue
        return indices[first : first + len(x)] if held.unchanged else None
    return None


def _reach(x: Tensor) -> int:
    """How much memory a row spans, in numbers."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True))


def same_rows(look: Look, batches: list[HandedOut], slot: int | None = None) -> Match | None:
    """The examples that a pass's rows are of, by content; None if some row is of none.

    slot: which of each example's rows they should be; those are looked at first.
    """
    if slot is not None:
        found = same_rows(look, [batch.only(slot) for batch in batches])
        if found is not None:
            return found
    known = [batch for batch in batches if batch.indices is not None]
    for forms in (list(_pieces(look, known)), list(_windows(look, known))):
        found = _found(keys_in(look.prints), look.size, forms) if forms else None
        if found is not None:
            return found
    return _found_by_places(look, known)


def agreed(matches: Iterable[Match | None]) -> Match | None:
    """What the examples' first rows, their second ones and so on say together; None where they contradict."""
    found: Match | None = None
    for each in matches:
        if each is None:
            return None
        if found is None:
            found = each
            continue
        mine, theirs = found.indices, each.indices
        rivals = found.rivals | each.rivals
        both = (mine != AMBIGUOUS) & (theirs != AMBIGUOUS)
        one = (mine != AMBIGUOUS) ^ (theirs != AMBIGUOUS)
        indices = np.where(mine == AMBIGUOUS, theirs, mine)
        if (mine != theirs)[both].any() or not rivals.issuperset(indices[one].tolist()):
            return None
        found = Match(indices, rivals if (indices == AMBIGUOUS).any() else frozenset())
    return found


Form = tuple[IntArray, IntArray]
"""Hashes of parts of a batch's rows, and the example of each."""


def _pieces(look: Look, batches: list[HandedOut]) -> Iterator[Form]:
    """Whole rows, and rows cut into pieces of the input's size."""
    for indices, held in _candidates(look, batches):
        count, rest = divmod(held.size, look.size)
        if rest or (count > 1 and look.size < 2):
            continue
        keys = held.keys(look.dtype, look.size)
        if keys is not None:
            yield keys, np.repeat(indices, count)


def _windows(look: Look, batches: list[HandedOut]) -> Iterator[Form]:
    """The windows of rows that begin as the input's rows do."""
    if look.size < 2:
        return
    for indices, held in _candidates(look, batches):
        rows = held.rows if held.size > look.size else None
        if rows is None or rows.numel() > LARGE:
            continue
        for offset in _offsets(look, rows.detach().to(look.dtype).float()):
            keys = held.keys(look.dtype, look.size, offset)
            if keys is not None:
                yield keys, indices


def _candidates(look: Look, batches: list[HandedOut]) -> Iterator[tuple[IntArray, HeldTensor]]:
    for batch in batches:
        assert batch.indices is not None
        for held in batch.held:
            if held.is_read and held.size >= look.size and held.can_be(look.dtype):
                yield batch.indices, held


def _offsets(look: Look, rows: Tensor) -> list[int]:
    """Where in `rows` (n, longer) the numbers stand with which the input's most varied row begins."""
    leading = look.prints[:, : min(LEADING, look.size)]
    begin = max(leading, key=lambda row: len(np.unique(row)))
    room = rows.shape[1] - look.size + 1
    stands = torch.ones(len(rows), room, dtype=torch.bool)
    for place, number in enumerate(begin.tolist()):
        stands &= rows[:, place : place + room] == number
    return [int(offset) for offset in stands.any(0).nonzero()[:OFFSETS, 0]]


def _found(rows: IntArray, size: int, forms: list[Form]) -> Match | None:
    """rows: (n,) hashes of a pass's rows. If they are one block of a batch in order, their places decide."""
    blocks: dict[bytes, IntArray] = {}
    for keys, indices in forms:
        last = len(keys) - len(rows)
        if last < 0 or (size < 2 and last and len(rows) < FEW):
            continue
        for start in np.flatnonzero(keys[: last + 1] == rows[0]):
            if np.array_equal(keys[start : start + len(rows)], rows):
                part = indices[start : start + len(rows)]
                blocks[part.tobytes()] = part
            if len(blocks) > 1:
                break
    if len(blocks) == 1:
        return Match(next(iter(blocks.values())))
    if size < 2:  # single numbers, such as classes, are alike by chance: in another order they tell nothing
        return None
    if not np.isin(rows, np.concatenate([keys for keys, _ in forms])).all():
        return None
    owners: dict[int, set[int]] = {}
    for keys, indices in forms:
        for key, index in zip(keys.tolist(), indices.tolist(), strict=True):
            owners.setdefault(key, set()).add(index)
    return _looked_up(rows.tolist(), owners)


def _found_by_places(look: Look, batches: list[HandedOut]) -> Match | None:
    """Of large tensors that were written to, some numbers are left: enough, if no row is like another."""
    owners: dict[bytes, set[int]] = {}
    for indices, held in _candidates(look, batches):
        if held.size == look.size and held.dtype == look.dtype and held.size > PLACES and held.rows is None:
            for row, index in zip(held.places, indices.tolist(), strict=True):
                owners.setdefault(row.tobytes(), set()).add(index)
    found = _looked_up([row.tobytes() for row in np.ascontiguousarray(look.prints[:, :PLACES])], owners)
    return None if found is None or found.rivals else found


def _looked_up(keys: list[Any], owners: dict[Any, set[int]]) -> Match | None:
    """The owner of each; None if one has none."""
    found = [owners.get(key) for key in keys]
    sets = [each for each in found if each is not None]
    if len(sets) < len(found):
        return None
    indices = np.array([next(iter(each)) if len(each) == 1 else AMBIGUOUS for each in sets], np.int64)
    return Match(indices, frozenset().union(*(each for each in sets if len(each) > 1)))


def _tensors(data: Any, depth: int = 0) -> list[Tensor]:
    if isinstance(data, Tensor):
        return [data]
    found: list[Tensor] = []
    if depth < 4:
        parts = data.values() if isinstance(data, Mapping) else data if isinstance(data, (tuple, list)) else ()
        for part in list(parts)[:64]:
            found += [part] if isinstance(part, Tensor) else _tensors(part, depth + 1)
    return found
