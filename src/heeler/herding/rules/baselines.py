"""Rules that never look at a vector: the baselines."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.base_rule import BaseRule
from heeler.herding.strata import stratified_shards
from heeler.herding.validate import IntArray


class StaticRule(BaseRule):
    """A rule without vectors."""

    needs_vectors = False

    def observe(self, indices: Any, vectors: Any) -> None:
        check.as_rows(indices, self.examples)

    def _reversed(self) -> IntArray:
        """Every worker's order backwards."""
        return np.concatenate([self.order[shard][::-1] for shard in self._shards()])


class Random(StaticRule):
    """Random reshuffling: each worker shuffles its own examples anew every epoch (D-RR)."""

    def _close(self) -> IntArray:
        return self._shuffled()


class Stratified(StaticRule):
    """A stratified shuffle: a new random order every epoch in which every batch holds its share of each stratum.

    What to compare any other rule with where there are classes: it costs nothing. Each worker deals out its own
    examples. The first epoch is random: a batch with its share of each class has no class noise, and a network that
    begins at a symmetric point needs noise to leave it (`benchmarks.plateaus`).
    """

    uses_strata = True
    needs_strata = True
    strata: IntArray

    def _close(self) -> IntArray:
        return stratified_shards(self.offsets, self.batch_size, self.strata, self.portions, self._rng)


class Once(StaticRule):
    """Shuffle once: the first, random order for ever."""

    def _close(self) -> IntArray:
        return self.order.copy()


class Incremental(Once):
    """File order for ever (incremental gradient)."""

    def _first_order(self) -> IntArray:
        return np.arange(self.examples, dtype=np.int64)


class FlipFlop(StaticRule):
    """A random order on even epochs, its reverse on the odd epoch that follows."""

    def _close(self) -> IntArray:
        return self._shuffled() if self.epoch % 2 else self._reversed()


class BlockReversal(StaticRule):
    """Block reshuffling with paired reversal (arXiv 2604.00260).

    A first shuffle is cut into blocks for good. Even epochs put the blocks, each unchanged within, in a new random
    order; the odd epoch that follows runs the same order backwards, which cancels the leading order-dependent term of
    a pair of epochs.

    Args:
        block: examples per block; by default the square root of the shard's size, rounded up.
    """

    _state = (*StaticRule._state, "_base")

    def __init__(self, examples: int, dim: int | None = None, *, block: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.block = None if block is None else check.check_positive(block, "block")
        self._base = self.order.copy()

    def _close(self) -> IntArray:
        if self.epoch % 2 == 0:
            return self._reversed()
        out = np.empty_like(self._base)
        for shard in self._shards():
            own = self._base[shard]
            block = self.block or max(int(np.ceil(np.sqrt(own.size))), 1)
            blocks: list[Any] = np.split(own, np.arange(block, own.size, block))
            out[shard] = np.concatenate([blocks[i] for i in self._rng.permutation(len(blocks))])
        return out

    def _check(self) -> None:
        super()._check()
        check.as_order(self._base, self.examples, what="base")
        check.check_own_rows(self._base, self.offsets)
