"""Heeler's own rule in two levels: for more examples than one order, or one table in memory, is fit for."""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.lazy import LazyOrder
from heeler.herding.rules.herd import TabledRule
from heeler.herding.rules.spec import RuleSpec
from heeler.levels.block_loops import BLOCK_LOOPS
from heeler.levels.block_order import BlockOrder
from heeler.levels.block_table import BlockTable
from heeler.levels.halves import Blocks, Walk, walk_blocks, whitening
from heeler.levels.scatter import Scatter

BLOCK = 1 << 16
"""Examples per block, by default: its rows and what a solve needs of them fit into a processor's cache."""
LARGEST = 1 << 26
"""Numbers of a block's rows, at most, by default: expanding takes about 20 bytes of memory for each."""


def default_block(examples: int, dim: int) -> int:
    """Examples per block: `BLOCK`, or as many as it takes for the halves to reach the sums that they are to have.

    The blocks before one sum up to about √(S·K) vectors times √(blocks), or times √K where there are more blocks than
    numbers and their order helps; half a block of S can make up for about S / 4. So S ≥ 4·min(√(N·K), K²) or so.
    Measured (131,072 × 64, numbers that fall off as 1/k): prefixes 1.0 times those of one level with blocks of 4·K²,
    2.1 times with K².
    """
    return max(BLOCK, min(4 * min(math.isqrt(examples * dim), dim * dim), LARGEST // dim))


def two_levels(block_size: int | None = None, table: str | os.PathLike[str] | None = None) -> RuleSpec:
    """An order for `Sampler(order=...)`: `herd` in two levels, for more than about ten million examples.

        sampler = heeler.Sampler(dataset, batch_size=64, order=heeler.two_levels(table="run.table"))

    Blocks are put in an order by their sums, and examples within two half blocks at a time, as they are needed. So
    orders take next to no memory. Each worker orders examples of its own (`shards="local"`), without strata.

    Args:
        block_size: examples per block, about; by default 65,536, or more where sketches are long.
        table: path of a file to keep the sketches in; by default they are kept in memory. The file belongs to the run's
            checkpoints: keep it where it is. Of several workers each has its own, `path.0`, `path.1` and so on.
    """
    if block_size is not None:
        check.check_positive(block_size, "block_size")
    return _TwoLevels(BlockHerd, {"block_size": block_size, "table": None if table is None else os.fspath(table)})


class _TwoLevels(RuleSpec):
    def for_worker(self, rank: int, workers: int) -> RuleSpec:
        table = self.options["table"]
        if table is None or workers == 1:
            return self
        return _TwoLevels(self.kind, {**self.options, "table": f"{table}.{rank}"})


class BlockHerd(TabledRule):
    """Blocks are put in an order by their sums, and examples within two half blocks at a time: see `levels.halves`.

    Rows are kept in blocks, at random places (`levels.scatter`), in memory or in a file (`levels.block_table`). Closing
    an epoch reads the table once, in sequence, for the blocks' sums, and holds B × K numbers. The order is expanded
    stretch by stretch, as it is read, in a thread, which holds three blocks. Every epoch has a new order. An example
    without a vector counts as the mean. Arguments as in `two_levels`.
    """

    own_examples_only = True
    table: BlockTable
    _order: BlockOrder  # type: ignore[assignment]
    _state = ("epoch", "screened", "_seed")

    def __init__(
        self,
        examples: int,
        dim: int | None = None,
        *,
        block_size: int | None = None,
        table: str | os.PathLike[str] | None = None,
        **common: Any,
    ) -> None:
        self._block_size, self._path, self._seed = block_size, table, int(common.get("seed", 0))
        super().__init__(examples, dim, **common)

    @classmethod
    def c_sources(cls) -> tuple[Path, ...]:
        return (*super().c_sources(), BLOCK_LOOPS)

    @property
    def order(self) -> LazyOrder:  # type: ignore[override]
        """(N,) this epoch's order, expanded where it is read."""
        return self._order

    def next_order(self) -> LazyOrder:  # type: ignore[override]
        self._order.close()
        self.table.close_epoch()
        self.epoch += 1
        self._order = self._planned()
        return self._order

    def close(self) -> None:
        self._order.close()
        self.table.close()

    def state_dict(self) -> dict[str, Any]:
        walk, extra = self._order.walk, {"batch": self._order.batch_size, "examples": self.examples}
        plan = {"blocks": walk.blocks.copy(), "targets": walk.targets.copy(), "mean": self._mean.copy(), **extra}
        if walk.root is not None:
            plan["root"] = walk.root.copy()
        return {**super().state_dict(), "walk": plan, "table": self.table.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if check.entry(state, "rule") != type(self).__name__:
            raise ValueError(
                f"this state is of rule {state['rule']!r}, not of an order in two levels: give the order that it was "
                "saved with (order='herd'), or start a new run"
            )
        plan = check.entry(state, "walk")
        if check.stored_count(plan, "examples") != self.examples:
            raise ValueError(f"the state is of {plan['examples']} examples, this rule orders {self.examples}")
        size = check.stored_count(check.entry(state, "table"), "block")
        if not 0 < size <= 2**40:
            raise ValueError(f"the state's blocks are of {size} examples: it is damaged")
        scatter = Scatter(self.examples, check.stored_count(state, "seed"))
        table = BlockTable(Blocks(self.examples, size), self.dim or 0, scatter, self._path)
        table.check_state(state["table"])
        walk, mean = _read_walk(plan, table.shape, table.dim)
        batch_size = check.check_positive(check.stored_count(plan, "batch"), "batch")
        super().load_state_dict(state)
        table.restore(state["table"])
        self.close()
        self._use(table)
        self._mean, self._order = mean, self._expanded(walk, batch_size, mean)

    # Helpers

    def _first_order(self) -> BlockOrder:  # type: ignore[override]
        if self.workers > 1:
            raise ValueError("two levels order one worker's examples: give each worker a rule of its own")
        wanted = self._block_size or default_block(self.examples, self.dim or 1)
        shape = Blocks.near(self.examples, wanted, self.batch_size)
        self._use(BlockTable(shape, self.dim or 0, Scatter(self.examples, self._seed), self._path))
        return self._planned()

    def _use(self, table: BlockTable) -> None:
        self.table = table
        # (B, K) each block's sum, and (B,) the stamp of the rows that it is of; an empty block has none.
        self._sums, self._summed = np.zeros((table.shape.count, table.dim)), np.zeros(table.shape.count, np.int64)

    def _planned(self) -> BlockOrder:
        """A new order of what the table holds."""
        snapshot = self.table.snapshot
        count, seen = self.table.shape.count, snapshot.version.counts
        for block in np.flatnonzero(snapshot.version.stamps != self._summed).tolist():  # the others are as they were
            self._sums[block] = snapshot.sum_of(block)
        self._summed = snapshot.version.stamps.copy()
        self._mean = mean = self._sums.sum(axis=0) / max(int(seen.sum()), 1)
        sums = self._sums - seen[:, None] * mean
        rng = np.random.default_rng([self._seed, self.epoch, 2 * count + 1])
        fullest = int(np.argmax(seen))
        root = whitening(snapshot.centred(fullest, mean)) if seen[fullest] else None
        return self._expanded(walk_blocks(sums, self.table.shape, rng, root), self.batch_size, mean)

    def _expanded(self, walk: Walk, batch_size: int, mean: NDArray[np.float64]) -> BlockOrder:
        vectors_of = partial(self.table.snapshot.centred, mean=mean)
        seed, placement = [self._seed, self.epoch], self.table.placement
        return BlockOrder(self.table.shape, placement, walk, vectors_of, seed, batch_size)

    def _check(self) -> None:
        """The order is checked with the blocks that it is made of."""


def _read_walk(state: Any, shape: Blocks, dim: int) -> tuple[Walk, NDArray[np.float64]]:
    """The walk over blocks and the mean that a state holds."""
    blocks = check.as_order(check.stored_array(state, "blocks", [np.int64], (shape.count,)), shape.count)
    targets = np.array(check.stored_array(state, "targets", [np.float64], (shape.count, dim)))
    mean = np.array(check.stored_array(state, "mean", [np.float64], (dim,)))
    root = np.array(check.stored_array(state, "root", [np.float64], (dim, dim))) if "root" in state else None
    return Walk(blocks, targets, root), mean
