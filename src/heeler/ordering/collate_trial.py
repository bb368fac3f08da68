"""Does a collate function keep the order of examples that cannot be recognized in their batch, such as words?

It is called on two orders of the same examples, once, and in a process of its own: nothing of the user's runs in this
one, and no random number of this one is drawn.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from heeler.sketch.preserve_state import rewinder
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample
from heeler.torch_private import LoaderFacts

EXAMPLES = 16
"""Of a batch, at most, that are fetched to try it."""
PATIENCE = 60
"""Seconds to wait for the other process."""

_verdicts: list[tuple[Callable[[], Any], RowsPerExample, str]] = []
"""What was found of collate functions that are still there. They need not be hashable."""


def keeps_order(facts: LoaderFacts, indices: list[int], per: RowsPerExample = ONE_ROW) -> str:
    """Whether a loader's collate function "keeps" the order of its items, "reorders" them, or "unknown"."""
    _verdicts[:] = [each for each in _verdicts if each[0]() is not None]
    for collate, rows, verdict in _verdicts:
        if collate() is facts.collate_fn and rows == per:
            return verdict
    # A process that is not forked would run the user's script from its beginning, unless that is ready for workers.
    context = facts.context if facts.workers else "fork" if sys.platform == "linux" else None
    try:
        if not facts.workers and context is None:
            raise NotImplementedError
        loader = DataLoader(
            facts.dataset,
            batch_sampler=[indices[:EXAMPLES]],
            num_workers=1,
            collate_fn=CollateTrial(facts.collate_fn, per),
            multiprocessing_context=context,
            worker_init_fn=facts.worker_init_fn,
            generator=torch.Generator(),
            timeout=PATIENCE,
        )
        verdict = str(next(iter(loader)))
    except Exception:  # what cannot be tried cannot be judged
        verdict = "unknown"
    with suppress(TypeError):  # some cannot be referred to weakly: they are tried again in the next epoch
        _verdicts.append((weakref.ref(facts.collate_fn), per, verdict))
    return verdict


class CollateTrial:
    """A collate function in place of the loader's own, which returns a verdict in place of a batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], per: RowsPerExample = ONE_ROW) -> None:
        self.collate, self.per = collate, per

    def __call__(self, items: list[Any]) -> str:
        rewind, found = rewinder(), []
        for order in (list(items), list(reversed(items))):
            rewind()
            found.append(self.per.apart(self.collate(order), len(order)))
        votes = set(_votes(found[0], found[1], len(items)))
        if "reorders" in votes:
            return "reorders"
        return "keeps" if votes == {"keeps"} else "unknown"


def _votes(a: Any, b: Any, count: int) -> Any:
    """What every tensor or list with a row per item says, of two batches made of reversed items."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in a:
            if key in b:
                yield from _votes(a[key], b[key], count)
    elif isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        if len(a) == count and not any(isinstance(part, (Tensor, Mapping, tuple, list)) for part in a):
            yield from _vote(list(a) == list(b), list(a) == list(b)[::-1])
        else:
            for one, other in zip(a, b, strict=True):
                yield from _votes(one, other, count)
    elif isinstance(a, Tensor) and isinstance(b, Tensor) and a.ndim and len(a) == count and a.shape == b.shape:
        yield from _vote(torch.equal(a, b), torch.equal(a, b.flip(0)))


def _vote(same: bool, reversed_: bool) -> list[str]:
    """One that is both says nothing; one that is neither is random, or sorted with ties."""
    if same and reversed_:
        return []
    return ["keeps" if reversed_ else "reorders" if same else "unknown"]
