"""Where a session gets its sketches from."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from heeler.sketch.prices import StepPrice


class SketchSource(Protocol):
    """What a session needs of a `Sketcher`."""

    dim: int
    reduction: str
    """"mean" where the loss is a mean over the batch, "sum" where it is a sum."""

    enabled: bool
    """False: forwards are neither sketched nor counted."""
    sketching: bool
    """False: forwards are counted and not sketched."""
    notes_norms: bool
    """Stamps get the norms of gradients at the model's output."""
    counts_steps: bool
    """`window` is kept up to date in forwards that are not sketched, too."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""

    @property
    def backwards(self) -> int:
        """Grows with every backward that puts a gradient into the model."""

    @property
    def window(self) -> int:
        """Between which steps the last backward was: another number once weights changed or gradients were cleared."""

    @property
    def batch_dim(self) -> int:
        """The batch's dimension in the model's inputs."""

    @property
    def weights_version(self) -> int:
        """Changes with every step of an optimizer."""

    def weights(self) -> Tensor:
        """(P,) a number for each parameter, which is another one if its values are others."""

    def price(self, batch: float) -> StepPrice:
        """What steps with so many examples cost by a model of the machine."""

    def pop_passes(self) -> list[tuple[Any, Tensor]]:
        """All passes finished since the last pop, in forward order: the stamp, and the sketches (B_i, K)."""
