"""What old sketches say about new ones: learnt at each refresh, from the rows that a table replaces.

An order is made from the newest sketches there are and used on gradients that come later. What counts is therefore what
a row predicts. Where a network fits its examples, the largest rows shrink the most, and a few huge rows of yesterday
would rule an order in which they are small. So every refresh fits one factor per group of rows of similar length, by
least squares: new ≈ factor · old, with factor = Σ⟨new, old⟩ / Σ‖old‖², at least 0. Orders are made from rows times
their factors (`benchmarks.realized` has what that is worth).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check

_LEAST, _BINS = -128, 256
"""Rows are counted by the binary exponent of their squared length, from this one on: two bins per doubling."""
_COLUMNS = 4
"""Of each bin: rows, Σ⟨new, old⟩, Σ‖old‖² and Σ‖new‖‖old‖, in the gradients' own units."""
ENOUGH = 16
"""Rows of a group with a factor of its own, at least: neighbouring bins with fewer are one group."""
WORTH = 0.02
"""The share of the predictions' squares that one factor for all would leave wrong, from which groups are worth it."""
LARGEST, PARTS = 4, 16
"""A group's factor over that of all rows, at most; and parts of 1 that it is rounded to. Rows of almost nothing can
only grow, and must not dwarf the others; finer parts cannot be told from noise. Weights are that divided by LARGEST, so
that no row grows beyond half precision, and small whole numbers stay exact."""


def bins_of(squares: NDArray[np.floating[Any]]) -> NDArray[np.int64]:
    """(m,) the bin of each row, from its squared length."""
    exponents = np.frexp(np.asarray(squares, np.float64))[1].astype(np.int64)
    return np.where(squares > 0, np.clip(exponents - _LEAST, 0, _BINS - 1), 0)


class Persistence:
    """Compares rows with those that they replace. A table of so many examples owns one."""

    def __init__(self, examples: int) -> None:
        self._examples = examples
        self.stored = 0
        """Rows stored since the epoch began, with an old one to compare with or not."""
        self._now, self._last = np.zeros((2, _BINS, _COLUMNS))
        self.closed_weights: NDArray[np.float32] | None = None
        """(bins,) what rows are to be multiplied with, from the last refresh that is over; None where all are alike."""

    def add(self, products: NDArray[np.floating[Any]], scale: float) -> None:
        """products: (3, m) ⟨new, old⟩, ‖old‖² and ‖new‖² of rows, stored numbers; `scale` times the true ones."""
        inner, old, new = np.asarray(products, np.float64) / scale**2
        bins = bins_of(old)
        for column, values in enumerate((None, inner, old, np.sqrt(old * new))):
            self._now[:, column] += np.bincount(bins, values, _BINS)

    def close_epoch(self) -> None:
        """An epoch is over. If it has replaced few rows, they are left to count with the next ones."""
        self.stored = 0
        if self._is_enough:
            self._last, self._now = self._now, np.zeros((_BINS, _COLUMNS))
            self.closed_weights = _weights(self._last)

    @property
    def _is_enough(self) -> bool:
        return bool(2 * self._now[:, 0].sum() >= self._examples)

    @property
    def is_refreshed(self) -> bool:
        """Whether this epoch has stored new rows of half of the examples or more."""
        return 2 * self.stored >= self._examples

    @property
    def agreement(self) -> float | None:
        """Σ⟨new, old⟩ / Σ‖new‖‖old‖, the mean cosine, weighted by length, so that rows of almost nothing do not count.

        Of the last epoch that replaced half of the rows or more and is over; None before there was one.
        """
        _, inner, _, product = self._last.sum(axis=0).tolist()
        return inner / product if product > 0 else None

    def weights(self, squares: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float32] | None, int]:
        """(N,) the factors of rows of these squared lengths, and how many times too short they make the rows.

        None where all are alike. From the newest refresh, which may be that of the epoch that goes on.
        """
        by_bin = _weights(self._now) if self._is_enough else self.closed_weights
        return (None, 1) if by_bin is None else (by_bin[bins_of(squares)], LARGEST)

    # State

    def state_dict(self) -> dict[str, Any]:
        return {"pairs": np.stack([self._now, self._last]), "stored": np.array(self.stored, np.int64)}

    def check_state(self, state: dict[str, Any]) -> None:
        """A ValueError for a state that `restore` must not see. Those of 0.2 have nothing of this."""
        if "pairs" not in state:
            return
        rows, inner, old, product = np.moveaxis(
            check.stored_array(state, "pairs", [np.float64], (2, _BINS, _COLUMNS)), 2, 0
        )
        damaged = min(rows.min(), old.min()) < 0 or (np.abs(inner) > 1.001 * product + 1e-300).any()
        if damaged or check.stored_array(state, "stored", [np.int64], ()) < 0:
            raise ValueError("the state's pairs or stored is out of range: it is damaged")

    def restore(self, state: dict[str, Any]) -> None:
        self._now, self._last, self.stored = *np.zeros((2, _BINS, _COLUMNS)), 0
        if "pairs" in state:
            self._now, self._last = np.array(check.as_numpy(state["pairs"], "pairs"))
            self.stored = int(state["stored"])
        self.closed_weights = _weights(self._last)


def _weights(sums: NDArray[np.float64]) -> NDArray[np.float32] | None:
    """(_BINS,) the weight of each bin from its sums (_BINS, _COLUMNS); None where one factor for all is as good."""
    rows, inner, old, _ = sums.T
    groups, count, left = np.zeros(_BINS, np.int64), 0.0, rows.sum()
    for b in range(1, _BINS):
        count, left = count + rows[b - 1], left - rows[b - 1]
        groups[b] = groups[b - 1]
        if count >= ENOUGH and left >= ENOUGH:
            groups[b], count = groups[b] + 1, 0.0
    squares = np.bincount(groups, old)
    factors = np.maximum(np.bincount(groups, inner) / np.where(squares > 0, squares, 1.0), 0.0)
    whole = inner.sum() / max(old.sum(), 1e-300)
    with np.errstate(over="ignore", invalid="ignore"):  # the sums of a state may be anything
        if whole <= 0 or not squares @ (factors - whole) ** 2 >= WORTH * (squares @ factors**2):
            return None
    parts = np.round(np.minimum(factors / whole, LARGEST) * PARTS) / (PARTS * LARGEST)
    return parts.astype(np.float32)[groups]
