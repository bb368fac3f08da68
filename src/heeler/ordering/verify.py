"""Is it working? Some examples' gradients once more, one by one, beside what is filed under their numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding import SketchTable
from heeler.herding.validate import IntArray
from heeler.sketch import Sketcher


@dataclass(frozen=True)
class Verification:
    """What `handle.verify` found; `print` it."""

    examples: IntArray
    """(n,) the examples that were looked at."""
    cosines: NDArray[np.float64]
    """(n,) of what is filed under an example and its gradient at the present weights. They fall as the weights move."""
    filed_right: float
    """The share of them whose own gradient, of all n, is the nearest to what is filed under them."""

    def __str__(self) -> str:
        low, middle, high = np.quantile(self.cosines, (0.1, 0.5, 0.9))
        return (
            f"{self.filed_right:.0%} of {len(self.examples)} examples are filed right (by chance "
            f"{1 / len(self.examples):.0%}); cosines with their gradients now: median {middle:.3f}, "
            f"80% between {low:.3f} and {high:.3f}"
        )


def verify(
    sketcher: Sketcher,
    table: SketchTable,
    loss_of: Callable[[int], Tensor],
    examples: int,
    seed: int,
    numbers_of: Callable[[IntArray], IntArray],
) -> Verification:
    """Compare some rows of the table with the sketches of single examples' gradients, taken by autograd alone.

    numbers_of: the dataset's numbers of rows.
    """
    known = np.flatnonzero(table.seen)
    if known.size < 2 or examples < 2:
        raise ValueError(
            f"{known.size} examples have a sketch: train a few steps first, and look at two examples at least"
        )
    picked = np.sort(np.random.default_rng(seed).permutation(known)[:examples])
    numbers = numbers_of(picked)
    true = np.stack([sketcher.sketch_of(loss_of(int(i))).double().cpu().numpy() for i in numbers])
    cosines = _unit(table.sketches(picked).astype(np.float64)) @ _unit(true).T
    nearest = cosines.argmax(1) == np.arange(len(picked))
    return Verification(numbers, np.diag(cosines).copy(), float(nearest.mean()))


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)
