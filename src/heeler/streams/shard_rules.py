"""Rules for examples that lie in shards, of which a reader has few open at a time: see `heeler.streams.shard_order`.

They have no names of their own: for a `Stream`, `Sampler(order="herd")` and `"random"` take these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import RuleSpec
from heeler.herding.rules.base_rule import BaseRule
from heeler.herding.rules.baselines import Random
from heeler.herding.rules.herd import Herd
from heeler.herding.solver import Solution
from heeler.herding.subset import Subset
from heeler.herding.validate import IntArray
from heeler.streams.shard_order import check_sizes, sharded_order


class _Sharded(BaseRule):
    """A rule whose orders suit the readers of shards. `portions` is the number of ranks.

    Args:
        sizes: (S,) examples of each shard.
        readers: `workers`, `accumulate` and `open_shards` of `sharded_order`.
    """

    def __init__(
        self, examples: int, dim: int | None = None, *, sizes: IntArray, readers: dict[str, int], **common: Any
    ) -> None:
        self.sizes, self.readers = sizes, readers
        if self.sizes.sum() != examples:
            raise ValueError(f"the shards hold {self.sizes.sum()} examples, but {examples} are to be ordered")
        super().__init__(examples, dim, **common)
        if self.workers > 1:
            raise ValueError("one rule orders the shards of one worker: make a rule for each, without shard_sizes")

    def _first_order(self) -> IntArray:
        return self._sharded(None, self._rng).order

    def _sharded(self, vectors: Any, rng: np.random.Generator, seen: Any = None) -> Solution:
        options: dict[str, Any] = {"ranks": self.portions, **self.readers, "seed": rng, "seen": seen}
        return sharded_order(self.sizes, vectors, batch_size=self.batch_size // self.portions, **options)


class ShardedRandom(_Sharded, Random):
    """Random orders of shards, and of what their readers hold: what streaming libraries do."""

    def _close(self) -> IntArray:
        return self._first_order()


class ShardedHerd(_Sharded, Herd):
    """`herd` for shards. Each worker with examples of its own orders them by itself."""

    coordinates_shards = False
    uses_strata = False
    steps_may_turn = False  # readers hold a few shards at a time

    def _unsolved_order(self) -> IntArray:
        return self._first_order()

    def _solve(self, weights: NDArray[np.float32] | None, rng: np.random.Generator) -> Solution:
        return self._sharded(self._weighed(weights), rng, self.table.seen)


RULES: dict[str, type[_Sharded]] = {"herd": ShardedHerd, "random": ShardedRandom}


def sharded(order: str | RuleSpec, sizes: Any, **readers: int) -> RuleSpec:
    """The rule that stands for `order` where examples lie in shards; arguments as in `sharded_order`."""
    if not isinstance(order, str) or order not in RULES:
        name = repr(order) if isinstance(order, str) else order.kind.__name__
        raise ValueError(
            f"order={name} takes examples from all shards at once, and a stream has few of them open: use "
            f"{' or '.join(map(repr, RULES))} for a stream, or give the sampler a dataset that reads any example by "
            "its number"
        )
    return _Shards(RULES[order], {"sizes": check_sizes(sizes), "readers": readers})


class _Shards(RuleSpec):
    def within(self, subset: Subset) -> RuleSpec:
        """Of each shard, as many examples as were chosen."""
        if subset.numbers is None:
            return self
        ends = np.cumsum(self.options["sizes"])
        counts = np.diff(np.searchsorted(subset.numbers, ends), prepend=0)
        return _Shards(self.kind, {**self.options, "sizes": counts})
