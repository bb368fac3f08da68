"""How to choose, said before there is anything to choose from: for `Sampler(subset=..., reselect_every=...)`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from heeler.herding import SketchTable
from heeler.notices import warn
from heeler.selection.api import METHODS, select
from heeler.selection.parts import count_of
from heeler.selection.result import Selection

ENOUGH = 0.9
"""The share of examples that must have a sketch to be chosen from."""
TARGETED = ("glister", "influence")


@dataclass(frozen=True, eq=False)
class Selector:
    """The arguments of `heeler.select` but its source: a sampler that has one chooses when it has all sketches.

        sampler = heeler.Sampler(dataset, batch_size=16, subset=heeler.Selector(0.1, labels=y), reselect_every=5)

    Args:
        k: how many, or which fraction of all (of all workers' examples together).
        method: as for `select`, but for `glister` and `influence`: the gradients of validation examples, which they
            need, change as the model does.
        labels: (N,) a class per example of the dataset; of this worker's own, where it has its own.
        seed: of the first selection; each one after it has the next.
    """

    k: int | float
    method: str = "halve"
    labels: Any = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"there is no method {self.method!r}: choose among {', '.join(METHODS)}")
        if self.method in TARGETED:
            raise ValueError(
                f"{self.method!r} needs the gradients of validation examples, which change as the model does: use "
                "another method, or select by hand, heeler.select(handle, k, method, target=rows)"
            )
        count_of(self.k, 2**62)

    def choose(self, table: SketchTable, labels: Any, turn: int) -> Selection | None:
        """The `turn`-th selection (0, 1, ...) from a table; None if too few of its examples have a sketch.

        labels: (N,) a class per row, or None. Rows without a sketch are not chosen, and that is said.
        """
        rows, seen = len(table.seen), np.flatnonzero(table.seen)
        if seen.size < ENOUGH * rows:
            return None
        if seen.size == rows:
            return select(table, self.k, self.method, labels=labels, seed=self.seed + turn)
        warn(
            "%d of %d examples have no sketch yet, because the loader dropped them: the subset is chosen among the "
            "others",
            rows - seen.size,
            rows,
        )
        known = None if labels is None else np.asarray(labels)[seen]
        k = min(count_of(self.k, rows), seen.size)
        found = select(table.sketches(seen), k, self.method, labels=known, seed=self.seed + turn)
        scores = None
        if found.scores is not None:
            scores = np.full(rows, np.nan)
            scores[seen] = found.scores
        return replace(found, indices=seen[found.indices], scores=scores)
