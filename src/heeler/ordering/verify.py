"""Is it working? Some examples' gradients once more, one by one, beside what is stored for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.herding import SketchTable
from heeler.herding.validate import IntArray
from heeler.sketch import Sketcher
from heeler.sketch.preserve_state import preserve_state

EQUAL = 0.99
"""At unchanged weights a cosine below this is not half precision's."""
FEW = 0.05
"""The share of examples that may be off."""
SAME_LENGTH = 1.02
FAR_OFF = 100.0
"""Lengths change as weights do, but not by such factors."""


@dataclass(frozen=True)
class Verification:
    """What `handle.verify` found; `print` it."""

    examples: IntArray
    """(n,) the examples that were looked at."""
    cosines: NDArray[np.float64]
    """(n,) of what is stored for an example and its gradient at the present weights. They fall as the weights move."""
    lengths: NDArray[np.float64]
    """(n,) the length of what is stored over that gradient's; NaN for a gradient of zero."""
    filed_right: float
    """The share of them whose own gradient, of all n, is the nearest to what is stored for them."""
    same_weights: bool
    """The weights are those that the sketches were taken at, so that cosines and lengths must be 1."""

    def __str__(self) -> str:
        cosine, length = (np.nanquantile(each, (0.5, 0.1, 0.9)) for each in (self.cosines, self._known_lengths()))
        share, chance = f"{self.filed_right:.0%} of {len(self.examples)}", f"(by chance {1 / len(self.examples):.0%})"
        first = f"{share} examples are filed right {chance}"
        if cosine[0] < EQUAL:  # a part of a gradient can be the nearest, too
            first = f"{share} sketches are nearest to their own example's gradient {chance}"
        return (
            f"{first}; cosines with their gradients now: median {cosine[0]:.3f}, 80% between {cosine[1]:.3f} and "
            f"{cosine[2]:.3f}; lengths over their gradients': median {length[0]:.3g}, 80% between {length[1]:.3g} and "
            f"{length[2]:.3g}{self._verdict(float(cosine[0]), float(length[0]))}"
        )

    def _known_lengths(self) -> NDArray[np.float64]:
        return np.ones(1) if np.isnan(self.lengths).all() else self.lengths

    def _verdict(self, cosine: float, length: float) -> str:
        off = int((self.cosines[~np.isnan(self.lengths)] < EQUAL).sum())
        if self.same_weights and off > FEW * len(self.cosines):
            why = "a part of the gradient is missing in the sketches"
            if self.filed_right < 1 - FEW:
                why = f"sketches are stored under wrong examples, or {why}"
            return (
                f"\nThe weights have not changed since, so both should be 1, and {off} cosines are not: {why}, or "
                "loss_of is not what the loop trains on (other inputs, a penalty, dropout, batch norm)."
            )
        if not 1 / FAR_OFF < length < FAR_OFF or (self.same_weights and not 1 / SAME_LENGTH < length < SAME_LENGTH):
            return (
                f"\nLengths are {length:.3g} times the gradients': the loss is divided, or is a sum "
                "(attach(reduction=)), or there is a GradScaler that attach was not given (scaler=)."
            )
        if self.same_weights:
            return "\nThe weights have not changed since, so both should be 1: they are."
        if cosine < EQUAL:
            return (
                "\nThe weights have changed since, and gradients with them: if a part of a gradient were missing in "
                "the sketches, this would look the same. Verify after a sketched epoch with a learning rate of 0 to "
                "tell."
            )
        return ""


def verify(
    sketcher: Sketcher,
    table: SketchTable,
    loss_of: Callable[[int], Tensor],
    examples: int,
    seed: int,
    numbers_of: Callable[[IntArray], IntArray],
    *,
    same_weights: bool = False,
    training: bool = False,
) -> Verification:
    """Compare some rows of the table with the sketches of single examples' gradients, taken by autograd alone.

    numbers_of: the dataset's numbers of rows. training: leave modules in the mode that they are in.
    """
    known = np.flatnonzero(table.seen)
    if known.size < 2 or examples < 2:
        raise ValueError(
            f"{known.size} examples have a sketch: train a few steps first, and look at two examples at least"
        )
    picked = np.sort(np.random.default_rng(seed).permutation(known)[:examples])
    numbers = numbers_of(picked)
    with preserve_state(sketcher.root), torch.enable_grad():
        if not training:
            sketcher.root.eval()
        true = np.stack([sketcher.sketch_of(loss_of(int(i))).double().cpu().numpy() for i in numbers])
    stored = table.sketches(picked).astype(np.float64)
    cosines = _unit(stored) @ _unit(true).T
    nearest = cosines.argmax(1) == np.arange(len(picked))
    norms = np.linalg.norm(true, axis=1)
    lengths = np.linalg.norm(stored, axis=1) / np.where(norms > 0, norms, np.nan)
    return Verification(numbers, np.diag(cosines).copy(), lengths, float(nearest.mean()), same_weights)


def _unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)
