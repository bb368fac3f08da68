"""The examples of a dataset that a sampler trains on: their numbers in the dataset, and their rows in the table."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import Array, IntArray, as_integers, as_numpy, frozen

ALL = "all"
"""The digest of what is no subset."""


class WeightedExamples(Protocol):
    """What `heeler.select` returns, as far as a sampler needs it."""

    @property
    def indices(self) -> IntArray: ...
    @property
    def weights(self) -> NDArray[np.float64]: ...


class Subset:
    """k of the N examples of a dataset, or all of them. A table has a row per chosen example, in ascending order.

    Args:
        length: N.
        chosen: a `heeler.Selection`; a mapping with `indices` and `weights`, such as its `as_dict()`; or the (k,)
            indices alone. None for all.
    """

    def __init__(self, length: int, chosen: Any = None) -> None:
        self.length = length
        """N, the dataset's."""
        self.numbers: IntArray | None = None
        """(k,) the chosen examples, ascending; None: all of them."""
        self.given_weights: NDArray[np.float64] | None = None
        """(k,) of the chosen, as they were given."""
        if chosen is not None:
            indices, weights = _parts(chosen)
            order = np.argsort(_checked(indices, length))
            self.numbers = frozen(indices[order])
            self.given_weights = frozen(_checked_weights(weights, indices.size)[order])

    def __len__(self) -> int:
        return self.length if self.numbers is None else self.numbers.size

    @property
    def digest(self) -> str:
        """A short text that differs where subsets, or their weights, do; the order of choice is no part of it."""
        if self.numbers is None or self.given_weights is None:
            return ALL
        return hashlib.sha256(self.numbers.tobytes() + self.given_weights.tobytes()).hexdigest()[:16]

    @property
    def total_weight(self) -> float:
        """Of the chosen, as they were given."""
        return float(self.length if self.given_weights is None else self.given_weights.sum())

    def numbers_of(self, rows: IntArray) -> IntArray:
        """The dataset's numbers of rows."""
        return rows if self.numbers is None else self.numbers[rows]

    def rows_of(self, numbers: IntArray) -> IntArray:
        """The rows of the dataset's examples, -1 for one that was not chosen."""
        if self.numbers is None:
            return numbers
        rows = np.minimum(np.searchsorted(self.numbers, numbers), len(self) - 1)
        return np.where(self.numbers[rows] == numbers, rows, -1)

    def check(self, numbers: IntArray) -> None:
        """Raise for examples that were not chosen."""
        strangers = numbers[self.rows_of(numbers) < 0]
        if strangers.size:
            raise ValueError(
                f"example {strangers[0]} is not in the sampler's subset of {len(self)}: passes over other examples "
                "belong into `with handle.paused():`"
            )

    def taken(self, values: Any, what: str) -> Array:
        """Those of the chosen, of (N,) values."""
        found = as_numpy(values, what)
        if found.shape != (self.length,):
            raise ValueError(
                f"{what} have shape {found.shape}, the dataset of this subset has {self.length} examples: give one per "
                "example of the dataset"
            )
        return found if self.numbers is None else found[self.numbers]

    def weights(self, mean: float) -> NDArray[np.float32]:
        """(N,) one per example of the dataset: the given one over `mean`, and 0 for one that was not chosen."""
        if self.numbers is None or self.given_weights is None:
            return np.ones(self.length, np.float32)
        out = np.zeros(self.length, np.float32)
        out[self.numbers] = self.given_weights / mean
        return out


def _parts(chosen: Any) -> tuple[IntArray, NDArray[np.float64]]:
    """(indices, weights); weights of 1 where none are given."""
    weights = None
    if hasattr(chosen, "indices") and hasattr(chosen, "weights"):
        chosen, weights = chosen.indices, chosen.weights
    elif isinstance(chosen, Mapping):
        if "indices" not in chosen:
            raise ValueError("the subset has no 'indices': give a Selection, its as_dict(), or the indices")
        chosen, weights = chosen["indices"], chosen.get("weights")
    if isinstance(chosen, (str, int, float)) or not hasattr(chosen, "__len__"):
        raise ValueError(
            f"subset must be what heeler.select returns, or the numbers of the chosen examples, got {chosen!r}: a "
            "fraction is for heeler.select(handle, 0.1), which needs a table of all examples first"
        )
    found = as_numpy(chosen, "subset")
    if found.dtype == np.bool_:
        raise ValueError("subset is a mask: give the numbers of the chosen examples, np.flatnonzero(mask)")
    indices = as_integers(found, "subset") if found.size else np.empty(0, np.int64)
    if indices.ndim != 1:
        raise ValueError(f"subset must have one dimension, one number per chosen example, got shape {indices.shape}")
    return indices, np.ones(indices.size) if weights is None else as_numpy(weights, "weights").astype(np.float64)


def _checked(indices: IntArray, length: int) -> IntArray:
    outside = indices[(indices < 0) | (indices >= length)]
    if outside.size:
        raise ValueError(
            f"subset names example {outside[0]}, the dataset has 0..{length - 1}: give the dataset that was selected "
            "from"
        )
    values, counts = np.unique(indices, return_counts=True)
    if values.size < indices.size:
        raise ValueError(
            f"subset names example {values[counts > 1][0]} more than once: an epoch has every chosen example once. "
            "Drop the repeats, np.unique(indices); weights say how much an example counts"
        )
    return indices


def _checked_weights(weights: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    if weights.shape != (size,):
        raise ValueError(f"the subset has {size} indices and weights of shape {weights.shape}: give one per index")
    if not np.isfinite(weights).all() or (weights < 0).any() or (size and not weights.any()):
        raise ValueError("the subset's weights must be finite, at least 0, and not all 0")
    return weights
