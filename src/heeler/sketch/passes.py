"""What is known of one forward, until its backward has been, and who is told of it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from heeler.sketch.examples import Examples, RowLayout


class SketchListener(Protocol):
    """Told when something happens; what has happened is pulled, with `Sketcher.pop_passes`."""

    def forward_begins(self, rows: int, inputs: Tensor | None) -> Any:
        """A pass over `rows` examples is about to open; returns a stamp, which comes back with its sketches.

        inputs: the model's first tensor argument. Called once per sketched forward, as it starts. Inside a model that
        was compiled in place nobody can be called: there it comes with the first gradient, without inputs.
        """

    def forward_counted(self, rows: int | None) -> Any:
        """A forward of `rows` examples begins that is not sketched, since `sketching` is False; may return a stamp.

        rows: None inside a model that was compiled in place. There it comes with the backward, and nobody knows them.
        """

    def coverage_changed(self) -> None:
        """A layer with a part in earlier sketches is left out from now on: they cannot be compared with new ones."""


class Nobody:
    """The listener of a sketcher that has none."""

    def forward_begins(self, rows: int, inputs: Tensor | None) -> Any: ...

    def forward_counted(self, rows: int | None) -> Any: ...

    def coverage_changed(self) -> None: ...


class Passes(Protocol):
    """How a model's forwards become passes: `EagerPasses`, or `CompiledPasses` inside compiled code."""

    def begin(self, model: nn.Module, batch: int, inputs: Tensor | None) -> None:
        """A forward of `batch` examples begins that is sketched. inputs: the model's first tensor argument."""

    def end(self, output: Any) -> None:
        """A forward ends; output: None where it failed."""

    def leaf(self, slot: Slot) -> Tensor:
        """(B or more, K): what the taps of a pass hang on. Its gradient is their sketch; nobody reads its values."""

    def close(self) -> None:
        """Hold nothing any more."""


class Pass:
    """What is known of one forward. Must not refer to its leaf: the leaf's hook refers to the pass.

    stamp: what the listener returned as it began. in_eval: the model was in evaluation mode.
    """

    def __init__(self, order: int, examples: Examples, factor: int, stamp: Any, in_eval: bool) -> None:
        self.order, self.examples, self.factor, self.stamp, self.in_eval = order, examples, factor, stamp, in_eval
        self.spoiled = ""
        """Why its sketch is not filed, if it is not."""
        self.sketch: Tensor | None = None
        self.popped = False
        self.task = -1
        """The backward (autograd's number) that reached it last."""
        self.counts = False
        """Whether that one's gradients belong to the sketch."""

    def spoil(self, why: str) -> None:
        """Its sketch is not filed; recorders say why, once."""
        self.spoiled = self.spoiled or why

    def reach(self, task: int, counts: bool) -> None:
        """A backward has reached it."""
        self.task, self.counts = task, counts

    def finish(self, sketch: Tensor) -> bool:
        """A backward has ended: add what it brought. Whether it is the first one since the pass was popped."""
        first = self.sketch is None
        self.sketch = sketch if self.sketch is None else self.sketch + sketch
        return first

    def pop(self) -> Tensor:
        """Its sketch; what comes later is forgotten."""
        sketch, self.sketch, self.popped = self.sketch, None, True
        assert sketch is not None
        return sketch


class Slot:
    """A pass together with its leaf.

    ignored: the forward is paused: nothing of it is sketched, whenever a checkpoint runs parts of it again.
    """

    def __init__(self, leaf: Tensor | None, owner: Pass, ignored: bool = False) -> None:
        self.leaf, self.owner, self.examples, self.ignored = leaf, owner, owner.examples, ignored
        self.replayed = False
        """A checkpoint will run parts of this forward again in backward."""
        self.recomputed: dict[int, dict[torch.Size | None, RowLayout | None]] = {}
        """Layers, by id, that have a tap in such a part, and how their inputs lay, by shape: a checkpoint must save the
        same both times, also where a layer is called in several ways."""
        self.autocast: str | None = None
        """The device type for which autocast was on as the forward began."""
        self.stream: int | None = None
        """The GPU's stream at that time."""
        self.batch = 0
        """Examples of the compiled forward that took this slot last."""
        self.taken = False
        """A compiled forward took this slot, and its first gradient has not arrived."""

    def replay(self) -> None:
        self.replayed = True

    def lend(self, leaf: Tensor) -> Tensor:
        self.leaf = leaf
        return leaf

    def under(self, autocast: str | None, stream: int | None) -> None:
        self.autocast, self.stream = autocast, stream

    def take(self, batch: int, examples: Examples) -> None:
        """A compiled forward takes it."""
        self.batch, self.examples, self.taken = batch, examples, True

    def rest(self) -> None:
        """That forward has ended. What is new and still referred to is built again after every run of the code."""
        self.examples = self.owner.examples

    def free(self, owner: Pass | None = None) -> None:
        """Another forward may take it. owner: the pass that gradients of the last one belong to."""
        self.taken = False
        self.owner = self.owner if owner is None else owner
