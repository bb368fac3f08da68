"""Rules that never look at a vector: the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from heeler.herding import _validate as check
from heeler.herding._validate import IntArray
from heeler.herding.rules.base import BaseRule


class Random(BaseRule):
    """Random reshuffling: each worker shuffles its own examples anew every epoch (D-RR)."""

    needs_vectors = False

    def _close(self) -> IntArray:
        return self._shuffled()


class Once(BaseRule):
    """Shuffle once: the first, random order for ever."""

    needs_vectors = False

    def _close(self) -> IntArray:
        return self.order.copy()


class Incremental(BaseRule):
    """File order for ever (incremental gradient)."""

    needs_vectors = False

    def _first_order(self) -> IntArray:
        return np.arange(self.examples, dtype=np.int64)

    def _close(self) -> IntArray:
        return self.order.copy()


class FlipFlop(BaseRule):
    """A random order on even epochs, its reverse on the odd epoch that follows."""

    needs_vectors = False

    def _close(self) -> IntArray:
        if self.epoch % 2:
            return self._shuffled()
        return reversed_shards(self.order, self._shards())


class BlockReversal(BaseRule):
    """Block reshuffling with paired reversal (arXiv 2604.00260).

    A first shuffle is cut into blocks for good. Even epochs put the blocks, each unchanged within, in a new random
    order; the odd epoch that follows runs the same order backwards, which cancels the leading order-dependent term of
    a pair of epochs.

    Args:
        block: examples in a block; by default the square root of the shard's size, rounded up.
    """

    needs_vectors = False
    _state: ClassVar[tuple[str, ...]] = (*BaseRule._state, "_base")

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        seed: int = 0,
        batch_size: int = 1,
        shard_sizes: Sequence[int] | None = None,
        block: int | None = None,
    ) -> None:
        self.block = None if block is None else check.check_positive(block, "block")
        super().__init__(examples, dim, seed=seed, batch_size=batch_size, shard_sizes=shard_sizes)
        self._base = self.order.copy()

    def _close(self) -> IntArray:
        if self.epoch % 2 == 0:
            return reversed_shards(self.order, self._shards())
        out = np.empty_like(self._base)
        for shard in self._shards():
            own = self._base[shard]
            block = self.block or max(int(np.ceil(np.sqrt(own.size))), 1)
            blocks: list[Any] = np.split(own, np.arange(block, own.size, block))
            out[shard] = np.concatenate([blocks[i] for i in self._rng.permutation(len(blocks))])
        return out


def reversed_shards(order: IntArray, shards: Sequence[slice]) -> IntArray:
    """Every shard's part of a flat order backwards."""
    out = np.empty_like(order)
    for shard in shards:
        out[shard] = order[shard][::-1]
    return out
