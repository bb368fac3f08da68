"""What a selection is, and how it compares with chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray


class Spread(NamedTuple):
    """Mean and standard deviation of ten random subsets."""

    mean: float
    sd: float


class Chosen(NamedTuple):
    """What a method returns: indices (k,), weights (k,), and scores (N,) where it has them."""

    indices: IntArray
    weights: NDArray[np.float64]
    scores: NDArray[np.float64] | None = None


@dataclass(frozen=True, eq=False)
class Selection:
    """A subset of examples with weights; made by `heeler.select`."""

    method: str
    indices: IntArray
    """(k,) the chosen examples, in the order of choice; class by class where there are labels."""
    weights: NDArray[np.float64]
    """(k,) how many examples each stands for: their sum is N, but for `match`."""
    scores: NDArray[np.float64] | None
    """(N,) every example's score, where the method has one."""
    error: float
    """‖Σ w_i g_i − G‖ / ‖G‖ with G the sum of all rows."""
    mmd: float
    """Maximum mean discrepancy between the weighted subset and all rows, Gaussian kernel."""
    random_error: Spread
    """`error` of ten random subsets of this size, weights N/k."""
    random_mmd: Spread
    """`mmd` of the same ten."""

    def __len__(self) -> int:
        return len(self.indices)

    def __str__(self) -> str:
        return (
            f"{self.method}: {len(self)} examples, weights {self.weights.min():.4g} to {self.weights.max():.4g}; "
            f"error {self.error:.3g} (random {self.random_error.mean:.3g} ± {self.random_error.sd:.1g}), "
            f"mmd {self.mmd:.3g} (random {self.random_mmd.mean:.3g} ± {self.random_mmd.sd:.1g})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "method": self.method,
            "indices": self.indices.tolist(),
            "weights": self.weights.tolist(),
            "scores": None if self.scores is None else self.scores[self.indices].tolist(),
            "error": self.error,
            "mmd": self.mmd,
            "random_error": self.random_error._asdict(),
            "random_mmd": self.random_mmd._asdict(),
        }
