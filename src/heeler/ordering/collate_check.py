"""Whether a collate function keeps the examples of a batch, and their order: it is called on two orders of the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from heeler.sketch.preserve_state import rewinder

EXAMPLES = 16
"""Of a batch, at most, that are fetched to try it."""


class CollateTest:
    """A collate function in place of the loader's own, which returns a verdict in place of a batch."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, items: list[Any]) -> str:
        rewind, found = rewinder(), []
        for order in (list(items), list(reversed(items))):
            rewind()
            found.append(self.collate(order))
        votes = list(_votes(found[0], found[1], len(items)))
        for verdict in ("drops", "reorders", "keeps"):
            if verdict in votes:
                return verdict
        return "unknown"


def verdict_on(dataset: Any, test: CollateTest, indices: list[int]) -> str:
    """Fetch some examples here, and try it; random numbers are put back as they were."""
    rewind = rewinder()
    try:
        some = indices[:EXAMPLES]
        items = dataset.__getitems__(some) if hasattr(dataset, "__getitems__") else [dataset[i] for i in some]
        return test(items)
    finally:
        rewind()


def _votes(a: Any, b: Any, count: int) -> Any:
    """What every tensor or list of the two batches, made of reversed examples, says."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key in b:
                yield from _votes(a[key], b[key], count)
        return
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        if len(a) == count and not any(isinstance(part, (Tensor, Mapping, tuple, list)) for part in a):
            yield _vote(list(a) == list(b), list(a) == list(b)[::-1])
        else:
            for one, other in zip(a, b, strict=True):
                yield from _votes(one, other, count)
        return
    if isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim and b.ndim:
        if len(a) != count and len(a) % count:
            yield "drops"
        elif len(a) == count and a.shape == b.shape:
            yield _vote(torch.equal(a, b), torch.equal(a, b.flip(0)))


def _vote(same: bool, reversed_: bool) -> str:
    if same == reversed_:
        return "unknown"
    return "keeps" if reversed_ else "reorders"
