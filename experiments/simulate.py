"""Many workers in one process: the order that n workers would walk together, step by step."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from heeler.herding import make_rule
from heeler.ordering.dealing import IntArray, Layout
from heeler.ordering.refresh import REFRESH
from heeler.ordering.sampler import Sampler
from heeler.ordering.turnover import Turnover


class SimulatedWorkers(Sampler):
    """A sampler whose every `workers * batch_size` consecutive indices are one step of all workers.

    A forward over the concatenated batch, with a mean loss, gives the gradient that n workers would average, so one
    process trains as n would. With `shards="local"` worker j owns the j-th stretch of the examples' numbers and never
    sees another; with "global" one order over all examples is dealt out.

    Args:
        examples: N, a multiple of `workers * batch_size`: then no batch is short, and every example weighs the same.
        batch_size: examples of one worker in a step.
        rule_options: the rule's own, such as `passes` of `herd`.
    """

    def __init__(
        self,
        examples: int,
        *,
        batch_size: int,
        order: str = "herd",
        workers: int = 1,
        shards: Literal["global", "local"] | str = "global",
        dim: int | None = None,
        refresh: int = REFRESH,
        seed: int = 0,
        rule_options: dict[str, Any] | None = None,
    ) -> None:
        if workers < 1 or examples < 1 or examples % (workers * batch_size):
            raise ValueError(
                f"{examples} examples cannot be cut into full steps of {workers} workers with {batch_size} each"
            )
        self.workers = workers
        self.own_shards = shards == "local"
        self.worker_batch = batch_size
        self.rule_options = rule_options or {}
        super().__init__(examples, batch_size=workers * batch_size, order=order, dim=dim, refresh=refresh, seed=seed)

    def _make_turnover(self) -> Turnover:
        shard = self.examples // self.workers
        rule = make_rule(
            str(self._order),
            self.examples,
            self.dim,
            seed=self.seed,
            batch_size=self.worker_batch if self.own_shards else self.batch_size,
            shard_sizes=[shard] * self.workers if self.own_shards else None,
            **self.rule_options,
        )
        layout = SideBySide(self.workers, batch_size=self.worker_batch) if self.own_shards else Layout()
        return Turnover(rule, layout)


class SideBySide(Layout):
    """All workers' own orders in one walk: worker 0's batch, worker 1's, ..., step after step."""

    def part(self, order: IntArray, rank: int | None = None) -> IntArray:
        by_step = order.reshape(self.workers, -1, self.batch_size)  # worker, step, place
        return np.ascontiguousarray(by_step.transpose(1, 0, 2)).reshape(-1)
