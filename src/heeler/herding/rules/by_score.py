"""Orders by scores that the user brings: curricula."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding.rules.baselines import StaticRule
from heeler.herding.rules.spec import RuleSpec
from heeler.herding.subset import Subset
from heeler.herding.validate import IntArray, as_numpy


def order_by(scores: Any) -> RuleSpec:
    """An order for `Sampler(order=...)`: examples by score, the lowest first; equal ones in a new random order.

        sampler = heeler.Sampler(dataset, batch_size=64, order=heeler.order_by(lengths))

    Args:
        scores: (N,) numbers, one per example of the dataset: a list, array or CPU tensor. For the highest first give
            `-scores`. Or a function that takes the epoch's number, 0 for the first, and returns them; it is called once
            per epoch, and in a process group it must return the same on all ranks. They are no part of the saved state:
            give them again after a restart.
    """
    return _ByScores(ByScore, {"scores": scores if callable(scores) else _checked(scores)})


class ByScore(StaticRule):
    """Ascending scores, each worker's own examples by themselves. See `order_by`."""

    def __init__(self, examples: int, dim: int | None = None, *, scores: Any, **common: Any) -> None:
        self._scores = scores
        super().__init__(examples, dim, **common)

    def _first_order(self) -> IntArray:
        return self._sorted(0)

    def _close(self) -> IntArray:
        return self._sorted(self.epoch + 1)

    def _sorted(self, epoch: int) -> IntArray:
        scores = _checked(self._scores(epoch) if callable(self._scores) else self._scores)
        if scores.size != self.examples:
            raise ValueError(
                f"there are {scores.size} scores for {self.examples} examples: give one per example, in the dataset's "
                "order"
            )
        order = self._shuffled()
        for shard in self._shards():
            order[shard] = order[shard][np.argsort(scores[order[shard]], kind="stable")]
        return order


class _ByScores(RuleSpec):
    def within(self, subset: Subset) -> RuleSpec:
        """Scores are given for the whole dataset."""
        if subset.numbers is None:
            return self
        scores = self.options["scores"]
        taken = partial(_taken, scores, subset) if callable(scores) else subset.taken(scores, "scores")
        return _ByScores(self.kind, {"scores": taken})


def _taken(scores: Callable[[int], Any], subset: Subset, epoch: int) -> Any:
    return subset.taken(_checked(scores(epoch)), "scores")


def _checked(scores: Any) -> NDArray[Any]:
    if isinstance(scores, str | int | float) or not hasattr(scores, "__len__"):
        raise TypeError(
            f"scores must be a list, array or tensor with one number per example, or a function of the epoch that "
            f"returns one, got {type(scores).__name__}"
        )
    found = as_numpy(scores, "scores")
    if found.ndim != 1 or found.dtype.kind not in "biuf":
        raise ValueError(f"scores must hold one number per example, got {found.dtype} of shape {found.shape}")
    if found.dtype.kind == "f" and np.isnan(found).any():
        raise ValueError(
            f"{np.isnan(found).sum()} scores are NaN, which have no place in an order: give such examples a number, or "
            "train without them, Sampler(subset=...)"
        )
    return found.copy()
