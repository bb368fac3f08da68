"""The examples of a pass: how to find them in a tensor, and where the parts of their sketches are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heeler.sketch.batch import RowLayout, by_example, by_layout
from heeler.torch_private import current_stream

if TYPE_CHECKING:
    from heeler.sketch.sketched_layer import SketchedLayer


class Examples:
    """How to find the batch's examples in a tensor: all that a call leaves behind for backward, besides `keep`.

    shapes: of the model's input, and of layers' outputs in this pass that differ; see `by_example`.
    layout: of the call's tensors, where it is known. sums: where a rule may add its part in place, instead of returning
    it. note_tap: told what a tap adds to the pass.
    """

    def __init__(
        self,
        batch: int,
        batch_dim: int,
        shapes: list[torch.Size],
        layout: RowLayout | None = None,
        sums: Sums | None = None,
        note_tap: Callable[[SketchedLayer, Tensor | None], bool] | None = None,
    ) -> None:
        self.batch, self.batch_dim, self.shapes, self.layout = batch, batch_dim, shapes, layout
        self.sums, self.note_tap = sums, note_tap

    def add_to(self, sums: Sums | None) -> None:
        self.sums = sums

    def note(self, shape: torch.Size) -> None:
        """Remember the shape of a layer's output, if it says anything new about how many tokens there are."""
        if not self.shapes or shape[:2] != self.shapes[-1][:2]:
            self.shapes.append(shape)

    def split(self, x: Tensor) -> Tensor:
        """(..., n) → (B, T, n)."""
        if self.layout is not None:
            return by_layout(x, self.batch, self.layout)
        return by_example(x, self.batch, self.batch_dim, self.shapes)

    def under(self, layout: RowLayout | None) -> Examples:
        """The same examples, in a layer's own layout."""
        if layout is None:
            return self
        return Examples(self.batch, self.batch_dim, self.shapes, layout, self.sums)


class Sums:
    """The sketches (B, K) of an eager pass, added up part by part in the backward that is under way.

    factor: what every part is multiplied by: the batch's size where the loss is a mean.
    stream: on a GPU, the only one on which parts are added.
    """

    def __init__(self, batch: int, dim: int, factor: int, device: torch.device) -> None:
        self.batch, self.dim, self.factor, self.device = batch, dim, factor, device
        self.stream = current_stream(device)
        self.parts: Tensor | None = None
        """(B, S, K): those of fused kernels, which write without reading first; not multiplied yet."""
        self.total: Tensor | None = None
        """(B, K) float32: all others."""

    def room(self) -> Tensor:
        """`total`, made where there is none yet: parts are added here in place."""
        if self.total is None:
            self.total = torch.zeros(self.batch, self.dim, device=self.device)
        return self.total

    def begin(self, total: Tensor) -> None:
        """The first part, (B, K), multiplied already."""
        self.total = total

    def begin_parts(self, parts: Tensor) -> None:
        """The first part of a fused kernel, (B, S, K)."""
        self.parts = parts

    def take(self) -> Tensor:
        """The sum, (B, K)."""
        if self.stream is not None:
            self._wait()
        total = self.total
        if self.parts is not None:
            summed = self.parts.sum(1).mul_(self.factor)
            total = summed if total is None else total.add_(summed)
        return torch.zeros(self.batch, self.dim, device=self.device) if total is None else total

    def _wait(self) -> None:
        """Backward may have been called on another stream than the forward."""
        here = torch.cuda.current_stream(self.device)
        if here.cuda_stream != self.stream:
            here.wait_stream(torch.cuda.ExternalStream(self.stream, self.device))
