"""The table to choose from, checked: from an array, a `SketchTable`, a handle or a saved state, without a copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import SketchTable
from heeler.herding import validate as check
from heeler.herding.realized import row_squares
from heeler.herding.subset import Subset
from heeler.herding.validate import Array, IntArray
from heeler.selection import loops

Choose = Callable[[IntArray, int], tuple[IntArray, Any]]
"""What a method makes of a table: (ids of a class, k) → (k of them, their weights; one weight may stand for all)."""


@dataclass(frozen=True)
class Rows:
    """A table after checking: one finite row per example."""

    floats: Array
    """(N, K) float16, float32 or float64, as stored; contiguous."""
    squares: NDArray[np.float64]
    """(N,) ‖row‖²."""
    subset: Subset | None = None
    """Which examples of a dataset they are of, where they are a sampler's subset."""

    def __len__(self) -> int:
        return len(self.floats)

    @property
    def dim(self) -> int:
        return int(self.floats.shape[1])

    @property
    def precision(self) -> Any:
        """float32, or float64 for a float64 table: the type that blocks of rows are worked on in."""
        return np.float64 if self.floats.dtype == np.float64 else np.float32

    def take(self, rows: Any) -> Array:
        """(n, K) some rows in working precision: a new array for row numbers, perhaps a view for a slice."""
        return np.asarray(self.floats[rows]).astype(self.precision, copy=False)

    def project(self, rows: IntArray, vector: Array) -> Array:
        """(n,) ⟨row, vector⟩ in working precision."""
        return loops.project(self.floats, rows, vector.astype(self.precision))

    def total(self, rows: IntArray) -> NDArray[np.float64]:
        """(K,) Σ of the rows."""
        return loops.add_rows(self.floats, rows)


def rows_of(source: Any) -> Rows:
    """The table behind `source`, checked: every example has a row, and all are finite. Reads it once.

    Several selections from one source are faster from what this returns.
    """
    with opened(source) as rows:
        return rows


@contextmanager
def opened(source: Any) -> Iterator[Rows]:
    """`rows_of(source)`; while they are in use, nobody changes the table of a handle."""
    if isinstance(source, Rows):
        yield source
    elif not (hasattr(source, "session") and hasattr(source, "table")):
        yield _checked(*_parts(source))
    else:
        planner = source.session.planner
        if not planner.sees_all:
            raise ValueError(
                "this worker's table does not hold all examples: call heeler.selection.select_together(handle, k) on "
                "every rank, or select on rank 0 alone, after handle.consolidate()"
            )
        table = source.table  # before the lock is taken: a handle first stores what is under way, under the same lock
        if table is None:
            raise ValueError(
                "this order keeps no sketches of examples: train with Sampler(order='herd'), or give the rows"
            )
        with planner.reading():
            yield _checked(table.rows, table.seen, source.session.subset_of_table)


def _parts(source: Any) -> tuple[Any, Array | None, Subset | None]:
    """(rows (N, K), which were seen (N,), their subset) of anything but a handle; None: all seen, no subset."""
    if isinstance(source, SketchTable):
        return source.rows, source.seen, None
    if isinstance(source, (str, os.PathLike)):
        from heeler.ordering.checkpoint import read

        source = read(source)
    if not isinstance(source, dict):
        return source, None, None
    table: Any = source
    for name in ("session", "rule", "table"):
        if not isinstance(table, dict) or name not in table:
            raise ValueError(
                "the state holds no table of sketches: it must be that of a handle whose order keeps one, such as "
                "'herd' (heeler.save, or handle.state_dict())"
            )
        table = table[name]
    if "block" in table:
        raise ValueError(
            "the state's table lies in blocks (heeler.two_levels), which a state alone does not tell apart: load "
            "it into a handle, and select from that"
        )
    rows, seen = (check.as_numpy(check.entry(table, name), name) for name in ("rows", "seen"))
    session = source["session"]
    if "subset" not in session:
        return rows, seen, None
    if "chosen" not in session:
        raise ValueError(
            "the state is of subsets of several workers' own examples, and does not hold their indices: select from "
            "the handles, heeler.selection.select_together"
        )
    return rows, seen, Subset(int(check.entry(session, "dataset_length")), session["chosen"])


def _checked(table: Any, seen: Array | None, subset: Subset | None) -> Rows:
    floats = check.as_floats(table)
    if seen is not None and not seen.all():
        missing = np.flatnonzero(~seen)
        raise ValueError(
            f"{missing.size} of {len(floats)} examples have no sketch yet, {_named(missing)}: train until every "
            "example was seen in a sketched epoch (drop_last and early stops leave some out), or select among those "
            "seen: seen = np.flatnonzero(table.seen); seen[heeler.select(table.sketches(seen), k).indices]"
        )
    floats = np.ascontiguousarray(floats)
    squares = row_squares(floats)
    if not np.isfinite(squares).all():
        bad = np.flatnonzero(~np.isfinite(squares))
        raise ValueError(
            f"{bad.size} of {len(floats)} rows hold NaN or infinity, {_named(bad)}: a diverged step wrote them. "
            "Leave them out: good = np.flatnonzero(np.isfinite(rows).all(1)), and then "
            "good[heeler.select(rows[good], k).indices]"
        )
    return Rows(floats, squares, None if subset is None or subset.numbers is None else subset)


def _named(rows: IntArray) -> str:
    return "examples " + ", ".join(map(str, rows[:8])) + (", ..." if rows.size > 8 else "")
