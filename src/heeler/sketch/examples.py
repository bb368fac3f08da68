"""The examples of a pass: how to find them in a tensor, and where the parts of their sketches are added up."""

from __future__ import annotations

import torch
from torch import Tensor

from heeler.sketch.batch import by_example, is_stretch


class Examples:
    """How to find the batch's examples in a tensor: all that a call leaves behind for backward, besides `keep`."""

    def __init__(self, batch: int, batch_dim: int) -> None:
        self.batch, self.batch_dim = batch, batch_dim
        self.shapes: list[tuple[int, ...]] = []
        """Of single examples, in the model's input and in layers' outputs of this pass; see `by_example`."""
        self.sums: Sums | None = None
        """Where a rule may add its part in place, instead of returning it."""

    def note(self, x: Tensor) -> None:
        """Remember the shape of an example in x, if it says anything new about how many tokens there are."""
        shape, dim = x.shape, self.batch_dim
        if len(shape) > dim + 1 and shape[dim] == self.batch:
            one = (*shape[:dim], *shape[dim + 1 :])
            if not is_stretch(one[0], self.shapes):
                self.shapes.append(one)

    def split(self, x: Tensor) -> Tensor:
        """(..., n) → (B, T, n)."""
        return by_example(x, self.batch, self.batch_dim, self.shapes)


class Sums:
    """The sketches (B, K) of an eager pass, added up part by part in the backward that is under way.

    factor: what every part is multiplied with as it is added: the batch's size where the loss is a mean.
    stream: on which alone parts are added, on a GPU.
    """

    def __init__(self, batch: int, dim: int, factor: int, device: torch.device, stream: int | None) -> None:
        self.batch, self.dim, self.factor, self.device, self.stream = batch, dim, factor, device, stream
        self.parts: Tensor | None = None
        """(B, S, K): those of fused kernels, which write without reading first; not multiplied yet."""
        self._total: Tensor | None = None
        self._failed = False

    @property
    def total(self) -> Tensor:
        """(B, K) float32, zero at first: parts are added here."""
        if self._total is None:
            self._total = torch.zeros(self.batch, self.dim, device=self.device)
        return self._total

    def fail(self) -> None:
        """A part is missing: nobody stores a sketch that is not finite."""
        self._failed = True

    def take(self) -> Tensor:
        """The sum, (B, K)."""
        if self.stream is not None:
            self._wait()
        total = self.total if self.parts is None or self._total is not None else None
        if self.parts is not None:
            summed = self.parts.sum(1).mul_(self.factor)
            total = summed if total is None else total.add_(summed)
        assert total is not None
        if self._failed:
            total.fill_(torch.nan)
        return total

    def _wait(self) -> None:
        """Backward may have been called on another stream than the forward."""
        here = torch.cuda.current_stream(self.device)
        if here.cuda_stream != self.stream:
            here.wait_stream(torch.cuda.ExternalStream(self.stream, self.device))


def current_stream(device: torch.device) -> int | None:
    """The number of the device's current stream; None where there are no streams."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else None
