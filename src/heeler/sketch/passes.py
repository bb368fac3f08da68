"""What is known of one forward, until its backward has been: see `recorder`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heeler.sketch.batch import RowLayout
from heeler.sketch.examples import Examples


class Pass:
    """What is known of one forward. Must not refer to its leaf: the leaf's hook refers to the pass."""

    def __init__(self, order: int, examples: Examples, factor: int) -> None:
        self.order, self.examples, self.factor = order, examples, factor
        self.stamp: Any = None
        """What the listener returned as the forward began."""
        self.in_eval = False
        """The model was in evaluation mode."""
        self.spoiled = False
        """A layer was left out while it ran: its sketch is not filed."""
        self.sketch: Tensor | None = None
        self.popped = False
        self.task = -1
        """The backward (autograd's number) that reached it last."""
        self.counts = False
        """Whether that one's gradients belong to the sketch."""


class Slot:
    """A pass together with its leaf."""

    def __init__(self, leaf: Tensor | None, owner: Pass) -> None:
        self.leaf, self.owner = leaf, owner
        self.batch = 0
        """Examples of the compiled forward that took this slot last."""
        self.taken = False
        """A compiled forward took this slot, and its first gradient has not arrived."""
        self.examples = owner.examples
        self.replayed = False
        """A checkpoint will run parts of this forward again in backward."""
        self.recomputed: dict[int, RowLayout | None] = {}
        """Layers, by id, that have a tap in such a part, and how its input lay."""
        self.autocast: str | None = None
        """The device type for which autocast was on as the forward began."""
        self.stream: int | None = None
        """The GPU's stream at that time."""
