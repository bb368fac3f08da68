"""Which example is each row of a collated batch about? The batch is compared with the items that it was made of.

A collate function may sort, drop, pad, cut or convert what it is given. Where numbers of an item appear again in a row,
they tell whose row it is: in every batch, without running anything of the user's. A tensor with a row per example is
compared with one part ("slot") of all items at a few places, spread over each item's own extent; where several items
agree at these, everywhere. Single numbers (classes, lengths) are alike by chance, so they only decide between items
that agree otherwise.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.ordering.collate_parts import Block, leaves_of, numbers_at, shape_of, targets_of, to_type

PLACES = 32
"""Numbers of an item that are compared, at most."""
CUT = 4
"""Numbers that a row must have at least to be compared with the beginning or end of a longer item."""
MASKED = 0.5
"""Of the numbers of a row that has its item's only in part, such as a masked text, how many must be the item's."""
MARGIN = 0.2
"""And how many more than any other item's."""

KNOWN, SILENT, DISAGREE = "known", "silent", "disagree"

Matrix = NDArray[np.bool_]


class Proof(NamedTuple):
    """What the items say about the rows of their batch."""

    items: int
    """How many there were."""
    rows: IntArray | None
    """(R,) of every row the item that it was made of; None where that is not known."""
    why: str
    """KNOWN; SILENT: nothing speaks for another order than the items', nor for theirs; DISAGREE: something does."""


def watch_items(items: Any) -> Callable[[Any], Proof]:
    """Note what a batch will be made of, before the collate function changes it; returns what looks at the batch."""
    if not isinstance(items, (list, tuple)):
        return lambda batch: Proof(-1, None, SILENT)
    leaves, count = [leaves_of(item) for item in items], len(items)
    return lambda batch: _proof(leaves, count, batch)


def rows_of_items(items: list[Any], batch: Any) -> IntArray | None:
    """(R,) of every row of the batch the position of its item; None where that is not certain."""
    return watch_items(items)(batch).rows


def _proof(leaves: list[dict[Any, Any]], count: int, batch: Any) -> Proof:
    if count == 1:  # there is nobody else
        one = any(target.rows == 1 for target in targets_of(batch, 1))
        return Proof(1, np.zeros(1, np.int64) if one else None, KNOWN if one else SILENT)
    slots = _slots(leaves)
    proof = _proof_by(targets_of(batch, count), slots, count)
    if proof.why == SILENT:  # sequences may lie with their steps first
        turned = _proof_by(targets_of(batch, count, turned=True), slots, count)
        return turned if turned.why == KNOWN else proof
    return proof


def _proof_by(targets: list[Block], slots: list[list[Any]], count: int) -> Proof:
    found = [(target, *_matched(target, slots, count)) for target in targets]
    strong = [(target, matrix) for target, matrix, is_strong in found if matrix is not None and is_strong]
    if not strong:
        return Proof(count, None, SILENT)
    size = max(target.rows for target, _ in strong)
    of_size = [(target, matrix) for target, matrix, _ in found if target.rows == size]
    matrix = np.ones((size, count), bool)
    for _, other in of_size:
        if other is not None:
            matrix &= other
    if not matrix.any(1).all():
        return Proof(count, None, DISAGREE)
    rows = _chosen(matrix, [target for target, _ in of_size], all(m is not None for _, m in of_size), slots)
    if rows is not None:
        return Proof(count, rows, KNOWN)
    in_order = size == count and bool(np.diagonal(matrix).all())
    return Proof(count, None, SILENT if in_order else DISAGREE)


def _slots(leaves: list[dict[Any, Any]]) -> list[list[Any]]:
    """The parts that all items have, each as a list with an entry per item; and the lengths of those that vary."""
    common = [path for path in leaves[0] if all(path in each for each in leaves)]
    slots = [[each[path] for each in leaves] for path in common]
    lengths = {tuple(shape[0] for shape in shapes) for slot in slots if all(shapes := [shape_of(x) for x in slot])}
    return slots + [list(each) for each in lengths if len(set(each)) > 1]


def _matched(target: Block, slots: list[list[Any]], count: int) -> tuple[Matrix | None, bool]:
    """(R, n) which items each row may be of by this tensor, None if it says nothing; and whether that is much."""
    weak: list[Matrix] = []
    strong: list[Matrix] = []
    for slot in slots:
        matrix, is_single = _compared(target, slot, count)
        if matrix is not None:
            (weak if is_single and not target.is_fraction else strong).append(matrix)
    found = strong or weak
    if not found:
        near = next((m for slot in slots if (m := _nearly(target, slot, count)) is not None), None)
        return near, True
    return functools.reduce(np.logical_or, found), bool(strong)


def _compared(target: Block, slot: list[Any], count: int) -> tuple[Matrix | None, bool]:
    """(R, n) which rows are which items' part, None if some row is nobody's; and whether that is a single number."""
    if target.words is not None or isinstance(slot[0], (str, bytes)):
        if target.words is None or not all(isinstance(x, (str, bytes)) for x in slot):
            return None, False
        matrix = np.array([[word == x for x in slot] for word in target.words])
        return (matrix if matrix.any(1).all() else None), False
    groups = _by_shape(slot)
    for pad_left, cut_left in _alignments(target, groups):
        matrix = np.zeros((target.rows, count), bool)
        for shape, members in groups.items():
            _mark(target, slot, shape, np.array(members), matrix, pad_left, cut_left)
        if not matrix.any(1).all():
            continue
        unclear = matrix.sum(1) > 1
        if unclear.any():
            several, matrix[unclear] = matrix[unclear].any(0), False
            for shape, members in groups.items():
                few = np.array([i for i in members if several[i]], np.int64)
                _mark(target, slot, shape, few, matrix, pad_left, cut_left, everywhere=unclear)
            if not matrix.any(1).all():
                continue
        single = max(int(np.prod(shape)) for shape in groups) < 2
        if single and not _is_injective(matrix):
            return None, True
        return matrix, single
    return None, False


def _by_shape(slot: list[Any]) -> dict[tuple[int, ...], list[int]]:
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, leaf in enumerate(slot):
        groups[shape_of(leaf)].append(i)
    return groups


def _is_injective(matrix: Matrix) -> bool:
    """Whether single numbers appear in no more rows than items."""
    rows = Counter(row.tobytes() for row in matrix)
    return all(times <= int(np.frombuffer(key, bool).sum()) for key, times in rows.items())


def _alignments(target: Block, groups: dict[tuple[int, ...], list[int]]) -> list[tuple[bool, bool]]:
    """On which sides rows may be padded and items cut off, as far as it makes a difference: the usual one first."""
    pads = cuts = False
    for shape in groups:
        for row_shape in target.shapes:
            if len(shape) == len(row_shape):
                pads = pads or any(s < r for s, r in zip(shape, row_shape, strict=True))
                cuts = cuts or any(s > r for s, r in zip(shape, row_shape, strict=True))
    return [(p, c) for c in ((False, True) if cuts else (False,)) for p in ((False, True) if pads else (False,))]


def _mark(
    target: Block,
    slot: list[Any],
    shape: tuple[int, ...],
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
        numbers = numbers_at([slot[i] for i in members], fit.shape, at_items)
        if numbers is None:
            continue
        owners: dict[bytes, list[int]] = defaultdict(list)
        for i, key in zip(members.tolist(), _keys(to_type(numbers, target.dtype)), strict=True):
            owners[key].append(i)
        for j, key in enumerate(_keys(rows[(slice(None), *at_rows)])):
            if key in owners and _rest_is_padding(rows[j], fit):
                matrix[places[j], owners[key]] = True


class _Fit(NamedTuple):
    """How an item's part lies in a row."""

    shape: tuple[int, ...]
    """The part's, with as many dimensions as the row."""
    extent: tuple[int, ...]
    """Of what both have."""
    row_offset: tuple[int, ...]
    item_offset: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def _fit(shape: tuple[int, ...], row: tuple[int, ...], pad_left: bool, cut_left: bool) -> _Fit | None:
    """None where one cannot be the other, padded or cut."""
    if len(shape) != len(row):
        if int(np.prod(shape)) != int(np.prod(row)):
            return None
        shape = row
    extent = tuple(min(s, r) for s, r in zip(shape, row, strict=True))
    if extent != shape and int(np.prod(extent)) < CUT:
        return None
    row_offset = tuple(r - e if pad_left else 0 for r, e in zip(row, extent, strict=True))
    item_offset = tuple(s - e if cut_left else 0 for s, e in zip(shape, extent, strict=True))
    return _Fit(shape, extent, row_offset, item_offset)


Index = tuple[Any, ...]


@functools.lru_cache(maxsize=512)
def _places(fit: _Fit) -> tuple[Index, Index]:
    """Some places of what row and item both have, in either: the first ones, and more to the end."""
    if not fit.extent:
        return (), ()
    size = int(np.prod(fit.extent))
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
    flat = np.ascontiguousarray(numbers.reshape(len(numbers), -1))
    if not flat.shape[1]:
        return [b""] * len(flat)
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


def _nearly(target: Block, slot: list[Any], count: int) -> Matrix | None:
    """(R, n) whose numbers each row has for the most part, as a masked text has its own; None if that is not clear."""
    if target.kind not in "iu" or target.is_ragged or isinstance(slot[0], (str, bytes)):
        return None
    groups, rows = _by_shape(slot), target.parts[0][1]
    for pad_left, cut_left in _alignments(target, groups):
        share = np.zeros((target.rows, count))
        for shape, members in groups.items():
            fit = _fit(shape, rows.shape[1:], pad_left, cut_left)
            if fit is None or int(np.prod(fit.extent)) < 2 * CUT:
                continue
            at_rows, at_items = _places(fit)
            numbers = numbers_at([slot[i] for i in members], fit.shape, at_items)
            if numbers is not None:
                own = rows[(slice(None), *at_rows)][:, None]
                share[:, members] = (own == to_type(numbers, target.dtype)[None]).mean(2)
        best = share.max(1, keepdims=True)
        if (best >= MASKED).all():
            matrix: Matrix = share > best - MARGIN
            return matrix
    return None


def _chosen(matrix: Matrix, targets: list[Block], all_matched: bool, slots: list[list[Any]]) -> IntArray | None:
    """(R,) one item for every row, its own place's if it can be; None where it matters which of several it is.

    It does not matter between items that are the same, nor between rows that are.
    """
    choices = matrix.sum(1)
    rows = matrix.argmax(1)
    open_rows = np.flatnonzero(choices > 1)
    taken = set(rows[choices == 1].tolist())
    for j in sorted(open_rows.tolist(), key=lambda j: (j >= matrix.shape[1] or not matrix[j, j], choices[j])):
        free = [i for i in np.flatnonzero(matrix[j]).tolist() if i not in taken]
        if not free:
            return None
        rows[j] = j if j in free else free[0]
        taken.add(int(rows[j]))
    holder = {int(i): j for j, i in enumerate(rows)}
    for j in open_rows.tolist():
        for other in np.flatnonzero(matrix[j]).tolist():
            if other == rows[j] or _same_items(slots, int(rows[j]), other):
                continue
            same = all(target.same_rows(j, holder[other]) for target in targets) if other in holder else all_matched
            if not same:
                return None
    return rows.astype(np.int64)


def _same_items(slots: list[list[Any]], i: int, k: int) -> bool:
    """Whether two items are the same in all that can be compared."""
    return all(_same(slot[i], slot[k]) for slot in slots)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (str, bytes)) or isinstance(b, (str, bytes)):
        return bool(a == b)
    return np.array_equal(*(np.asarray(x.detach().cpu().float() if isinstance(x, torch.Tensor) else x) for x in (a, b)))
