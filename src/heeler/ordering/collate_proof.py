"""Which example is each row of a collated batch about? The batch is compared with the items that it was made of.

A collate function may sort, drop, pad, cut or convert what it is given. Where numbers of an item appear again in a row,
they tell whose row it is: in every batch, without running anything of the user's. Single numbers (classes, lengths) are
alike by chance, so they only decide between items that agree otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from heeler.herding.validate import IntArray
from heeler.ordering.collate_match import Match, Matrix, Slot, are_in_order, matched, slots_of
from heeler.ordering.collate_parts import Block, leaves_of, shape_of, targets_of
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample

LARGE = 2048
"""Of more items than these no other order than their own is looked for: that takes long."""

KNOWN, SILENT, DISAGREE = "known", "silent", "disagree"


class Proof(NamedTuple):
    """What the items say about the rows of their batch."""

    items: int
    """How many there were."""
    rows: IntArray | None
    """(R,) of every row the item that it was made of; None where that is not known."""
    why: str
    """KNOWN; SILENT: nothing speaks for another order than the items', nor for theirs; DISAGREE: something does."""


def watch_items(items: Any, per: RowsPerExample = ONE_ROW) -> Callable[[Any], Proof]:
    """Note what a batch will be made of, before the collate function changes it; returns what looks at the batch."""
    if isinstance(items, list):
        leaves = [_with_rows(leaves_of(item), per.number) for item in items]
    else:  # a dataset's `__getitems__` has made a batch: its rows are in the order that it was asked for
        columns = {path: leaf for path, leaf in leaves_of(items).items() if _has_rows(leaf)}
        lengths = {len(leaf) for leaf in columns.values()}
        if len(lengths) != 1:
            return lambda batch: Proof(-1, None, SILENT)
        leaves = [{path: leaf[i] for path, leaf in columns.items()} for i in range(lengths.pop())]
    return lambda batch: _proof(leaves, len(leaves), per.apart(batch, len(leaves)))


def _with_rows(leaves: dict[Any, Any], rows: int) -> dict[Any, Any]:
    """And the rows of arrays that have as many as an example."""
    several = {path: leaf for path, leaf in leaves.items() if rows > 1 and shape_of(leaf)[:1] == (rows,)}
    return leaves | {(*path, j): leaf[j] for path, leaf in several.items() for j in range(rows)}


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > 0


def rows_of_items(items: Any, batch: Any) -> IntArray | None:
    """(R,) of every row of the batch the position of its item; None where that is not certain."""
    return watch_items(items)(batch).rows


def _proof(leaves: list[dict[Any, Any]], count: int, batch: Any) -> Proof:
    if count == 1:  # there is nobody else
        one = any(target.rows == 1 for target in targets_of(batch, 1))
        return Proof(1, np.zeros(1, np.int64) if one else None, KNOWN if one else SILENT)
    slots, targets = slots_of(leaves), targets_of(batch, count)
    if are_in_order(targets, slots, count):
        return Proof(count, np.arange(count), KNOWN)
    if count > LARGE:
        return Proof(count, None, SILENT)
    proof = _proof_by(targets, slots, count)
    if proof.why == SILENT:  # sequences may lie with their steps first
        turned = _proof_by(targets_of(batch, count, turned=True), slots, count)
        return turned if turned.why == KNOWN else proof
    return proof


def _proof_by(targets: list[Block], slots: list[Slot], count: int) -> Proof:
    found = [(target, matched(target, slots, count)) for target in targets]
    size = max((target.rows for target, match in found if match.matrix is not None and match.is_strong), default=0)
    if not size:
        return Proof(count, None, SILENT)
    of_size = [(target, match) for target, match in found if target.rows == size]
    matrix = np.ones((size, count), bool)
    for _, match in of_size:
        if match.matrix is not None:
            matrix &= match.matrix
    if not matrix.any(1).all():
        return Proof(count, None, DISAGREE)
    rows = _chosen(matrix, of_size, slots)
    if rows is not None:
        return Proof(count, rows, KNOWN)
    in_order = size == count and bool(np.diagonal(matrix).all())
    return Proof(count, None, SILENT if in_order else DISAGREE)


def _chosen(matrix: Matrix, found: list[tuple[Block, Match]], slots: list[Slot]) -> IntArray | None:
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
    is_clear = all(match.is_clear for _, match in found)
    shown = [slot for _, match in found for slot in match.slots]
    holder = {int(i): j for j, i in enumerate(rows)}
    for j in open_rows.tolist():
        for other in np.flatnonzero(matrix[j]).tolist():
            if other == rows[j] or _same_items(slots, int(rows[j]), other):
                continue
            if other in holder:
                is_same = all(target.same_rows(j, holder[other]) for target, _ in found)
            else:  # it was dropped, or the chosen one was
                is_same = is_clear and _same_items(shown, int(rows[j]), other)
            if not is_same:
                return None
    return rows.astype(np.int64)


def _same_items(slots: list[Slot], i: int, k: int) -> bool:
    """Whether two items are the same in all that can be compared."""
    return all(_same(slot.leaves[i], slot.leaves[k]) for slot in slots)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (str, bytes)) or isinstance(b, (str, bytes)):
        return bool(a == b)
    first, second = (np.asarray(x.detach().cpu().float() if isinstance(x, torch.Tensor) else x) for x in (a, b))
    return np.array_equal(first, second)
