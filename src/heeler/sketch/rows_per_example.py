"""Several rows of the model's input for each example: a pair's chosen and rejected text, views, windows of a bag."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

Given = int | tuple[int, Literal["interleaved"]]


class RowsPerExample(NamedTuple):
    """How k rows of each of B examples lie in a tensor (k·B, ...).

    End to end (a0 b0 c0 a1 b1 c1), or interleaved (a0 a1 b0 b1 c0 c1).
    """

    number: int = 1
    interleaved: bool = False

    @classmethod
    def of(cls, given: Given) -> RowsPerExample:
        """From the argument of `attach`, checked."""
        interleaved = isinstance(given, tuple) and len(given) == 2 and given[1] == "interleaved"
        number = given[0] if interleaved and isinstance(given, tuple) else given
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(
                "rows_per_example must be a positive integer k where the first rows of all examples come first, then "
                f'the second ones, or (k, "interleaved") where an example\'s rows are neighbours; not {given!r}'
            )
        return cls(number, interleaved)

    def by_example(self, x: Tensor) -> Tensor:
        """(k·B, ...) → (B, k, ...), a view."""
        if self.interleaved:
            return x.unflatten(0, (-1, self.number))
        return x.unflatten(0, (self.number, -1)).transpose(0, 1)

    def part(self, x: Tensor, j: int) -> Tensor:
        """(k·B, ...) → (B, ...), a view: row j of every example."""
        return self.by_example(x).select(1, j)

    def parts(self, x: Tensor) -> list[Tensor]:
        """All of them."""
        return [self.part(x, j) for j in range(self.number)]

    def summed(self, x: Tensor) -> Tensor:
        """(k·B, ...) → (B, ...): sums over an example's rows."""
        return self.by_example(x).sum(1)

    def norms(self, norms: Tensor) -> Tensor:
        """(k·B,) norms of rows → (B,) the norm of an example's rows together."""
        return torch.linalg.vector_norm(self.by_example(norms), dim=1)

    def side_by_side(self, x: Tensor) -> Tensor:
        """(k·B, n) → (B, k·n)."""
        return self.by_example(x).flatten(1)

    def apart(self, batch: Any, examples: int) -> Any:
        """A batch of `examples` in which tensors with several rows per example are replaced by their parts."""
        if isinstance(batch, Tensor):
            several = batch.ndim and len(batch) > examples and len(batch) % self.number == 0
            return dict(enumerate(self.parts(batch))) if several else batch
        if self.number > 1 and isinstance(batch, Mapping):
            return {key: self.apart(each, examples) for key, each in batch.items()}
        if self.number > 1 and type(batch) in (list, tuple):
            return [self.apart(each, examples) for each in batch]
        return batch


ONE_ROW = RowsPerExample()
