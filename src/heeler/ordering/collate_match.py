"""Which items may each row of one tensor of a batch be made of? Rows and items are compared, number by number.

A row may be an item's part as it is, padded, or cut, on either side and in any dimension. They are compared at a few
places, spread over each item's own extent; where several items agree at these, everywhere.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.ordering.collate_parts import Block, Shape, numbers_at, shape_of, to_type

PLACES = 16
"""Numbers of an item that are compared, at most."""
CUT = 4
"""Numbers that a row must have at least to be compared with the beginning or end of a longer item."""
MASKED = 0.5
"""Of the numbers of a row that has its item's only in part, such as a masked text, how many must be the item's."""
MARGIN = 0.2
"""And how many more than any other item's."""

Matrix = NDArray[np.bool_]
Index = tuple[Any, ...]


class Slot:
    """The same part of all items."""

    def __init__(self, leaves: list[Any]) -> None:
        self.leaves = leaves
        groups: dict[Shape, list[int]] = defaultdict(list)
        for i, leaf in enumerate(leaves):
            groups[shape_of(leaf)].append(i)
        self.by_shape: dict[Shape, IntArray] = {shape: np.array(members) for shape, members in groups.items()}
        """Which items have it in which shape."""
        self.size = max(math.prod(shape) for shape in self.by_shape)
        """Of the largest."""


def slots_of(leaves: list[dict[Any, Any]]) -> list[Slot]:
    """The parts that all items have, each as a list with an entry per item; and their lengths."""
    common = [path for path in leaves[0] if all(path in each for each in leaves)]
    slots = [Slot([each[path] for each in leaves]) for path in common]
    lengths = {tuple(_lengths(slot).tolist()) for slot in slots if () not in slot.by_shape}
    return slots + [Slot(list(each)) for each in lengths]


def _lengths(slot: Slot) -> IntArray:
    """(n,) of every item's part."""
    found = np.empty(len(slot.leaves), np.int64)
    for shape, members in slot.by_shape.items():
        found[members] = shape[0]
    return found


class Match(NamedTuple):
    """What one tensor says."""

    matrix: Matrix | None = None
    """(R, n) which items each row may be of; None if it says nothing."""
    is_strong: bool = False
    """Whether that is not by chance."""
    is_clear: bool = False
    """Whether there is one way only in which its rows can be made of the items."""
    slots: list[Slot] = []  # noqa: RUF012 - nobody writes to it
    """What they can be made of."""


def are_in_order(targets: list[Block], slots: list[Slot], count: int) -> bool:
    """Whether all is plain: rows of one size in the order of their items, which are all different. Mostly it is."""
    proven = False
    for target in targets:
        if target.rows != count:
            continue
        in_order = could_be = False
        for slot in slots:
            row, shape = next(iter(target.shapes)), next(iter(slot.by_shape))
            fit, is_one_size = _fit(shape, row, False, False), len(target.shapes) == len(slot.by_shape) == 1
            if is_one_size and fit is None:
                continue
            if target.is_ragged or not is_one_size or fit is None or not fit.shape == fit.extent == row:
                return False
            at, _ = _places(fit)
            numbers = numbers_at(slot.leaves, fit.shape, at)
            if numbers is None:
                continue
            of_items, of_rows = _keys(to_type(numbers, target.dtype)), _keys(target.parts[0][1][(slice(None), *at)])
            if of_items == of_rows:
                in_order = True
                is_strong = slot.size > 1 or target.is_fraction
                proven = proven or (is_strong and len(set(of_items)) == count)
            else:
                could_be = could_be or set(of_rows) <= set(of_items)
        if could_be and not in_order:
            return False
    return proven


def matched(target: Block, slots: list[Slot], count: int) -> Match:
    """What a tensor with rows says, by all parts of the items that it may be made of."""
    weak: list[tuple[Matrix, Slot]] = []
    strong: list[tuple[Matrix, Slot]] = []
    for slot in slots:
        is_weak = slot.size < 2 and not target.is_fraction
        (weak if is_weak else strong).extend((matrix, slot) for matrix in _compared(target, slot, count))
    found = strong or weak
    if not found:
        return Match(next((m for slot in slots if (m := _nearly(target, slot, count)) is not None), None), True)
    matrix = functools.reduce(np.logical_or, [each for each, _ in found])
    is_clear = all(np.array_equal(matrix, each) for each, _ in found)
    return Match(matrix, bool(strong), is_clear, [slot for _, slot in found])


def _compared(target: Block, slot: Slot, count: int) -> list[Matrix]:
    """(R, n) which rows are which items' part, for every alignment in which each row is somebody's."""
    found = []
    for alignment in _alignments(target, slot):
        matrix = np.zeros((target.rows, count), bool)
        for shape, members in slot.by_shape.items():
            _mark(target, slot, shape, members, matrix, *alignment)
        unclear = matrix.sum(1) > 1
        if slot.size > PLACES and unclear.any() and matrix.any(1).all():
            several, matrix[unclear] = matrix[unclear].any(0), False
            for shape, members in slot.by_shape.items():
                _mark(target, slot, shape, members[several[members]], matrix, *alignment, everywhere=unclear)
        if matrix.any(1).all() and (slot.size > 1 or _is_injective(matrix)):
            found.append(matrix)
    return found


def _is_injective(matrix: Matrix) -> bool:
    """Whether single numbers appear in no more rows than items."""
    rows = Counter(row.tobytes() for row in matrix)
    return all(times <= int(np.frombuffer(key, bool).sum()) for key, times in rows.items())


def _alignments(target: Block, slot: Slot) -> list[tuple[bool, bool]]:
    """On which sides rows may be padded and items cut off, as far as it makes a difference."""
    pads = cuts = False
    for shape in slot.by_shape:
        for row_shape in target.shapes:
            if len(shape) == len(row_shape):
                pads = pads or any(s < r for s, r in zip(shape, row_shape, strict=True))
                cuts = cuts or any(s > r for s, r in zip(shape, row_shape, strict=True))
    return [(p, c) for c in ((False, True) if cuts else (False,)) for p in ((False, True) if pads else (False,))]


def _mark(
    target: Block,
    slot: Slot,
    shape: Shape,
    members: IntArray,
    matrix: Matrix,
    pad_left: bool,
    cut_left: bool,
    everywhere: Matrix | None = None,
) -> None:
    """Set where a row is the part of one of these items, whose parts have one shape.

    everywhere: (R,) the rows to compare not at some places but at all; the others are left alone.
    """
    if not len(members):
        return
    for places, rows in target.parts:
        if everywhere is not None:
            places, rows = places[everywhere[places]], rows[everywhere[places]]
        fit = _fit(shape, rows.shape[1:], pad_left, cut_left)
        if fit is None or not len(rows) or (target.is_ragged and fit.shape != rows.shape[1:]):
            continue
        at_rows, at_items = _places(fit) if everywhere is None else _slices(fit)
        found = numbers_at([slot.leaves[i] for i in members], fit.shape, at_items)
        if found is None:
            continue
        numbers, is_padded = to_type(found, target.dtype), fit.extent != rows.shape[1:]
        if len(members) < len(rows) // 8 and everywhere is None and numbers.shape[1] > 2:
            likely = _likely(rows, numbers, at_rows)  # many lengths: most rows are of another one
            if not len(likely):
                continue
            places, rows = places[likely], rows[likely]
        codes: dict[bytes, int] = {}
        of_items = np.array([codes.setdefault(key, len(codes)) for key in _keys(numbers)])
        of_rows = np.array([codes.get(key, -1) for key in _keys(rows[(slice(None), *at_rows)])])
        if is_padded:
            for j in np.flatnonzero(of_rows >= 0).tolist():
                of_rows[j] = of_rows[j] if _rest_is_padding(rows[j], fit) else -1
        matrix[np.ix_(places, members)] |= of_rows[:, None] == of_items


def _likely(rows: NDArray[Any], numbers: NDArray[Any], at_rows: Index) -> IntArray:
    """The rows that are like one of the items at the first, middle and last place."""
    few = [0, numbers.shape[1] // 2, -1]
    own, other = rows[(slice(None), *(c[few] for c in at_rows))][:, None], numbers[None, :, few]
    return np.flatnonzero(((own == other) | ((own != own) & (other != other))).all(2).any(1))


class _Fit(NamedTuple):
    """How an item's part lies in a row."""

    shape: Shape
    """The part's, with as many dimensions as the row."""
    extent: Shape
    """Of what both have."""
    row_offset: Shape
    item_offset: Shape


@functools.lru_cache(maxsize=4096)
def _fit(shape: Shape, row: Shape, pad_left: bool, cut_left: bool) -> _Fit | None:
    """None where one cannot be the other, padded or cut."""
    if len(shape) != len(row):
        if math.prod(shape) != math.prod(row):
            return None
        shape = row
    extent = tuple(min(s, r) for s, r in zip(shape, row, strict=True))
    if extent != shape and math.prod(extent) < CUT:
        return None
    row_offset = tuple(r - e if pad_left else 0 for r, e in zip(row, extent, strict=True))
    item_offset = tuple(s - e if cut_left else 0 for s, e in zip(shape, extent, strict=True))
    return _Fit(shape, extent, row_offset, item_offset)


@functools.lru_cache(maxsize=4096)
def _places(fit: _Fit) -> tuple[Index, Index]:
    """Some places of what row and item both have, in either: the first ones, and more to the end."""
    if not fit.extent or not math.prod(fit.extent):
        return _slices(fit)
    size = math.prod(fit.extent)
    flat = np.arange(size)
    if size > PLACES:
        flat = np.unique(np.r_[flat[: PLACES // 4], np.linspace(0, size - 1, PLACES - PLACES // 4).astype(np.int64)])
    at = np.unravel_index(flat, fit.extent)
    return tuple(c + o for c, o in zip(at, fit.row_offset, strict=True)), tuple(
        c + o for c, o in zip(at, fit.item_offset, strict=True)
    )


def _slices(fit: _Fit) -> tuple[Index, Index]:
    """All of them."""
    return tuple(slice(o, o + e) for o, e in zip(fit.row_offset, fit.extent, strict=True)), tuple(
        slice(o, o + e) for o, e in zip(fit.item_offset, fit.extent, strict=True)
    )


def _keys(numbers: NDArray[Any]) -> list[bytes]:
    """Of every row of numbers, something to look it up by."""
    if not numbers.size:
        return [b""] * len(numbers)
    flat = np.ascontiguousarray(numbers.reshape(len(numbers), -1))
    keys: list[bytes] = flat.view(f"V{flat.itemsize * flat.shape[1]}").ravel().tolist()
    return keys


def _rest_is_padding(row: NDArray[Any], fit: _Fit) -> bool:
    """Whether what an item leaves of a row is one number."""
    first = None
    for axis, (size, extent, offset) in enumerate(zip(row.shape, fit.extent, fit.row_offset, strict=True)):
        if extent == size:
            continue
        rest = row[(*(slice(None),) * axis, slice(0, offset) if offset else slice(extent, None))]
        if rest.size:
            first = rest.flat[0] if first is None else first
            if not ((rest == first) | (rest != rest)).all():
                return False
    return True


def _nearly(target: Block, slot: Slot, count: int) -> Matrix | None:
    """(R, n) whose numbers each row has for the most part, as a masked text has its own; None if that is not clear."""
    if target.kind not in "iu" or target.is_ragged or slot.size < 2 * CUT:
        return None
    rows = target.parts[0][1]
    for pad_left, cut_left in _alignments(target, slot):
        share = np.zeros((target.rows, count))
        for shape, members in slot.by_shape.items():
            fit = _fit(shape, rows.shape[1:], pad_left, cut_left)
            if fit is None or math.prod(fit.extent) < 2 * CUT:
                continue
            at_rows, at_items = _places(fit)
            numbers = numbers_at([slot.leaves[i] for i in members], fit.shape, at_items)
            if numbers is not None:
                own = rows[(slice(None), *at_rows)][:, None]
                share[:, members] = (own == to_type(numbers, target.dtype)[None]).mean(2)
        best = share.max(1, keepdims=True)
        if (best >= MASKED).all():
            matrix: Matrix = share > best - MARGIN
            return matrix
    return None
