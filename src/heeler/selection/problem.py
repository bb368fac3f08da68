"""What a method is given: checked rows, strata, target rows, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from heeler.herding.validate import Array, IntArray
from heeler.selection.result import Chosen
from heeler.selection.source import Rows


@dataclass(frozen=True)
class Problem:
    rows: Rows
    strata: list[tuple[IntArray, int]]
    """Each class's examples, ascending, and how many of them to choose; all in one without labels."""
    labelled: bool
    target: Array | None
    """(V, K) rows of a validation set, in the units of `rows.floats`, working precision."""
    rng: np.random.Generator

    def each(self, choose: Callable[[IntArray, int], tuple[IntArray, Any]]) -> Chosen:
        """Join what `choose(ids, k) -> (indices, weights)` takes of each class; one weight may stand for all."""
        parts = [choose(ids, k) for ids, k in self.strata]
        indices = np.concatenate([own for own, _ in parts])
        weights = np.concatenate([np.broadcast_to(np.asarray(w, np.float64), own.shape) for own, w in parts])
        return Chosen(indices, weights)

    def needs_labels(self, method: str) -> None:
        if not self.labelled:
            raise ValueError(f"method {method!r} selects by class: give labels=, one per example")

    def needs_target(self, method: str) -> Array:
        if self.target is None:
            raise ValueError(
                f"method {method!r} selects for a validation set: give target=, an array (V, {self.rows.dim}) of its "
                "examples' gradients, sketched as the table's are"
            )
        return self.target


LEAST_ROUNDS = 16
OPERATIONS = 1e11
"""Some seconds of one core."""


def rounds_for(k: int, work: float, share: float) -> int:
    """In how many rounds a greedy method takes k examples of a class, each round its part of k.

    work: operations of one round, as matrix products count them; share: the class's of all examples. One example per
    round while OPERATIONS · share are enough for that, and never fewer than LEAST_ROUNDS.
    """
    return int(min(k, max(LEAST_ROUNDS, OPERATIONS * share // work)))
