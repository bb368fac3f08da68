"""The examples of a batch: how to find them in a tensor, and where the parts of their sketches are added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heeler.torch_private import current_stream


class NoBatchDimension(ValueError):
    """This call's tensors cannot be split into the batch's examples."""


def first_tensor(args: Any, at_least: int) -> Tensor | None:
    """The first tensor with `at_least` dimensions in nested tuples, lists and mappings."""
    if isinstance(args, Tensor):
        return args if args.ndim >= at_least else None
    if isinstance(args, (dict, Mapping)):  # transformers' BatchEncoding is no dict
        args = tuple(args.values())
    if isinstance(args, (tuple, list)):
        for item in args:
            found = first_tensor(item, at_least)
            if found is not None:
                return found
    return None


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Those in nested tuples, lists, mappings and dataclasses."""
    if isinstance(tree, Tensor):
        yield tree
        return
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = tuple(getattr(tree, field.name) for field in dataclasses.fields(tree))
    if isinstance(tree, (tuple, list)):
        for item in tree:
            yield from tensors_in(item)


class RowLayout(NamedTuple):
    """How a tensor (..., n) holds the batch's examples.

    "dim": in one dimension. "example-major" and "token-major": flattened with others into the first one, (B·T, ...) or
    (T·B, ...).
    """

    kind: str
    dim: int = 0


BATCH_FIRST = RowLayout("dim", 0)


def row_layouts(shape: torch.Size, batch: int) -> list[RowLayout]:
    """All that the shape allows."""
    found = [RowLayout("dim", dim) for dim in range(len(shape)) if shape[dim] == batch]
    if shape and shape[0] > batch and shape[0] % batch == 0:
        found += [RowLayout("example-major"), RowLayout("token-major")]
    return found


def by_layout(x: Tensor, batch: int, layout: RowLayout) -> Tensor:
    """(..., n) → (B, T, n), all other leading dimensions being tokens T; (B, n) stays as it is."""
    kind, dim = layout
    n = x.shape[-1]
    if kind == "dim" and dim < x.ndim - 1 and x.shape[dim] == batch:
        if x.ndim == 2:
            return x
        return (x if dim == 0 else x.movedim(dim, 0)).reshape(batch, -1, n)
    if kind != "dim" and x.ndim > 1 and x.shape[0] % batch == 0:
        if kind == "example-major":
            return x.reshape(batch, -1, n)
        return x.unflatten(0, (-1, batch)).movedim(1, 0).reshape(batch, -1, n)
    raise NoBatchDimension(f"it was called with shape {tuple(x.shape)}, in which {batch} examples do not lie as before")


def by_example(x: Tensor, batch: int, batch_dim: int, shapes: list[torch.Size]) -> Tensor:
    """(..., n) → (B, T, n) where no test has told how the examples lie: by shape alone.

    (B, n), one token per example, stays as it is: views cost more than arithmetic in small models.
    """
    if x.ndim == 2 and x.shape[0] == batch:
        return x
    return by_layout(x, batch, layout_by_shape(x.shape, batch, batch_dim, shapes))


def layout_by_shape(shape: torch.Size, batch: int, batch_dim: int, shapes: list[torch.Size]) -> RowLayout:
    """How a tensor of this shape most likely holds the examples.

    A tensor whose leading dimensions were flattened on the way ((B·T, n), or (T·B, n) where batch_dim is 1) is taken
    apart again. `shapes` are those that were seen with the batch in its place. T must be found in one of them: rows
    that merely are a multiple of B may be anything, such as positions, pairs, or what a router sent. And a second
    dimension of the batch's size leaves it open which one is the batch.
    """
    if len(shape) == 2 and shape[0] == batch:
        return BATCH_FIRST
    alike = batch > 1 and sum(size == batch for size in shape[:-1]) > 1
    if len(shape) > batch_dim + 1 and shape[batch_dim] == batch and not alike:
        return RowLayout("dim", batch_dim)
    if (
        len(shape) > 1
        and batch_dim < 2
        and shape[0] % batch == 0
        and not alike
        and _occurs(shape[0] // batch, shapes, batch, batch_dim)
    ):
        return RowLayout("example-major" if batch_dim == 0 else "token-major")
    raise NoBatchDimension(
        f"a layer was called with shape {tuple(shape)}, in which the {batch} examples of this batch cannot be told "
        f"apart (batch_dim={batch_dim}). If the batch lies in another dimension, pass batch_dim=...; if it is not a "
        f"dimension of the model's first tensor argument, pass batch_dim=lambda args, kwargs: batch_size. If the layer "
        f"mixes examples, leave it out with layers=lambda name, module: ..."
    )


def _occurs(tokens: int, shapes: list[torch.Size], batch: int, batch_dim: int) -> bool:
    """Whether some of an example's dimensions, one after the other, have this product."""
    for shape in shapes:
        if len(shape) <= batch_dim or shape[batch_dim] != batch:
            continue
        example = (*shape[:batch_dim], *shape[batch_dim + 1 :])
        for start in range(len(example)):
            product = 1
            for size in example[start:]:
                product = product * size
                if product == tokens:
                    return True
    return False


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
        note_tap: Callable[[Any, Tensor | None], bool] | None = None,
    ) -> None:
        self.batch, self.batch_dim, self.shapes, self.layout = batch, batch_dim, shapes, layout
        self.sums, self.note_tap = sums, note_tap

    def add_to(self, sums: Sums | None) -> None:
        """Where parts are added up in the backward under way."""
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

    def likely_layout(self, shape: torch.Size) -> RowLayout:
        """How a tensor of this shape most likely holds them."""
        in_place = len(shape) > self.batch_dim + 1 and shape[self.batch_dim] == self.batch
        if in_place:
            return RowLayout("dim", self.batch_dim)
        try:
            return layout_by_shape(shape, self.batch, self.batch_dim, self.shapes)
        except NoBatchDimension:
            return RowLayout("example-major")

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
