"""Where rows come from: an array, a table, a handle or a saved state, each as one (N, K) table without a copy."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding import SketchTable
from heeler.herding import validate as check
from heeler.herding.subset import Subset
from heeler.herding.validate import Array, IntArray


@dataclass(frozen=True)
class Rows:
    """A table after checking: one finite row per example."""

    floats: Array
    """(N, K) float16, float32 or float64, as stored."""
    bits: Array
    """The same, as the kernels read it."""
    squares: NDArray[np.float64]
    """(N,) ‖row‖², as stored."""
    scale: float
    """Stored numbers are true ones times this."""
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
        from heeler.selection import kernels

        out = np.empty(rows.size, self.precision)
        kernels.project(self.bits, check.frozen(rows), vector.astype(self.precision), out)
        return out

    def total(self, rows: IntArray) -> NDArray[np.float64]:
        """(K,) Σ of the rows."""
        from heeler.selection import kernels

        out = np.zeros(self.dim)
        kernels.add_rows(self.bits, check.frozen(rows), out)
        return out


def rows_of(source: Any) -> Rows:
    """The table behind `source`, checked: every example has a row, and all are finite. Reads it once.

    Several selections from one source are faster from what this returns.
    """
    if isinstance(source, Rows):
        return source
    floats, seen, scale, subset = _parts(opened(source)[0])
    if seen is not None and not seen.all():
        missing = np.flatnonzero(~seen)
        raise ValueError(
            f"{missing.size} of {len(floats)} examples have no sketch yet, {_named(missing)}: train until every "
            "example was seen in a sketched epoch (drop_last and early stops leave some out), or select among those "
            "seen: seen = np.flatnonzero(table.seen); seen[heeler.select(table.sketches(seen), k).indices]"
        )
    return checked(floats, scale, subset=subset)


def opened(source: Any) -> tuple[Any, AbstractContextManager[Any]]:
    """A handle's table and what to hold while it is read; anything else as it is.

    The table is asked for before the lock is: a handle first files what is under way, which takes the same lock.
    """
    if not (hasattr(source, "session") and hasattr(source, "table")):
        return source, nullcontext()
    planner = source.session.planner
    if not planner.sees_all:
        raise ValueError(
            "this worker's table does not hold all examples: call heeler.selection.select_together(handle, k) on every "
            "rank, or select on rank 0 alone, after handle.consolidate()"
        )
    table = source.table
    if table is None:
        raise ValueError("this order keeps no sketches of examples: train with Sampler(order='herd'), or give the rows")
    return _Attached(table, source.session.subset_of_table), planner.reading()


def checked(floats: Any, scale: float = 1.0, what: str = "", subset: Subset | None = None) -> Rows:
    """Rows of an (N, K) array, finite."""
    from heeler.selection import kernels

    floats = check.as_floats(floats)
    bits, squares = check.as_bits(floats), np.empty(len(floats))
    kernels.survey(bits, squares)
    if not np.isfinite(squares).all():
        bad = np.flatnonzero(~np.isfinite(squares))
        raise ValueError(
            f"{bad.size} of {len(floats)} {what}rows hold NaN or infinity, {_named(bad)}: a diverged step wrote them. "
            "Leave them out: good = np.flatnonzero(np.isfinite(rows).all(1)), and then "
            "good[heeler.select(rows[good], k).indices]"
        )
    return Rows(floats, bits, squares, scale, None if subset is None or subset.numbers is None else subset)


class _Attached(NamedTuple):
    """A handle's table, and which examples its rows are of."""

    table: SketchTable
    subset: Subset


def _parts(source: Any) -> tuple[Any, Any, float, Subset | None]:
    """(rows (N, K), seen (N,) or None, scale, the subset that they are of)."""
    if isinstance(source, (str, os.PathLike)):
        from heeler.ordering.checkpoint import read

        source = read(source)
    if isinstance(source, dict):
        return _stored(source)
    table, subset = source if isinstance(source, _Attached) else (source, None)
    if isinstance(table, SketchTable):
        return table.rows, table.seen, table.scale, subset
    return table, None, 1.0, None


def _stored(state: dict[str, Any]) -> tuple[Any, Any, float, Subset | None]:
    """The table in what `handle.state_dict()` returned."""
    table: Any = state
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
    rows = check.as_numpy(check.entry(table, "rows"), "rows")
    seen = check.as_numpy(check.entry(table, "seen"), "seen")
    return rows, seen, float(check.as_numpy(check.entry(table, "scale"), "scale")[0]), _stored_subset(state["session"])


def _stored_subset(session: dict[str, Any]) -> Subset | None:
    if "subset" not in session:
        return None
    if "chosen" not in session:
        raise ValueError(
            "the state is of subsets of several workers' own examples, whose numbers it does not hold: select from the "
            "handles, heeler.selection.select_together"
        )
    return Subset(int(check.entry(session, "dataset_length")), session["chosen"])


def _named(rows: IntArray) -> str:
    return "examples " + ", ".join(map(str, rows[:8])) + (", ..." if rows.size > 8 else "")
