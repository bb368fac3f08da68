"""Many workers in one process: the order that n workers would walk together, step by step."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from experiments.rules import make_rule, order_of
from heeler.ordering.epoch import Epoch
from heeler.ordering.pace import REFRESH
from heeler.ordering.partition import IntArray, Partition
from heeler.ordering.planner import LocalPlanner
from heeler.ordering.sampler import Sampler
from heeler.ordering.session import Session
from heeler.ordering.setup import Links, Setup
from heeler.ordering.source import SketchSource


class SimulatedWorkers(Sampler):
    """A sampler whose every `workers * batch_size` consecutive indices are one step of all workers.

    A forward over the concatenated batch, with a mean loss, gives the gradient that n workers would average, so one
    process trains as n would. With `shards="local"` worker j owns the j-th stretch of the examples' numbers and never
    sees another; with "global" one order over all examples is dealt out.

    Args:
        examples: N, a multiple of `workers * batch_size`: then no batch is short, and every example weighs the same.
        batch_size: examples of one worker in a step.
        strata: (N,) classes that the rule may know, over all workers.
        refresh: as the sampler's; and with 1 sketches are taken for rules that need none, too, for those who judge
            their orders.
        rule_options: the rule's own, such as `sweeps` of `sweeps`.
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
        strata: IntArray | None = None,
        rule_options: dict[str, Any] | None = None,
    ) -> None:
        if workers < 1 or examples < 1 or examples % (workers * batch_size):
            raise ValueError(
                f"{examples} examples cannot be cut into full steps of {workers} workers with {batch_size} each"
            )
        known: dict[str, Any] = {} if strata is None else {"strata": strata}
        common: dict[str, Any] = {"order": order_of(order), "dim": dim, "refresh": refresh, "seed": seed, **known}
        common["budget"] = None  # orders are compared by epochs; `benchmarks.clock gain` has what a budget takes away
        super().__init__(examples, batch_size=workers * batch_size, **common)
        setup, links = self.session.setup, self.session.links
        options = {**(rule_options or {}), **known}
        self.session = SimulatedSession(setup, links, order, workers if shards == "local" else 1, options)


class SimulatedSession(Session):
    """A session whose order is that of as many shards; its `batch_size` is that of all of them together."""

    def __init__(self, setup: Setup, links: Links, order: str, shards: int, rule_options: dict[str, Any]) -> None:
        super().__init__(setup, links)
        self._order, self._shards, self._rule_options = order, shards, rule_options
        self._plan()

    def connect(self, source: SketchSource, ids: Any = None, *others: Any) -> None:
        super().connect(source, ids)
        self._plan()  # only the source knows how many numbers a sketch has

    @property
    def takes_sketches(self) -> bool:
        return self.setup.refresh == 1 or super().takes_sketches

    def _plan(self) -> None:
        setup, shards = self.setup, self._shards
        batch_size = setup.batch_size // shards
        rule = make_rule(
            self._order,
            setup.examples,
            self.dim,
            seed=setup.seed,
            batch_size=batch_size,
            shard_sizes=[setup.examples // shards] * shards,
            **self._rule_options,
        )
        self.planner = LocalPlanner(rule, SideBySide(shards, batch_size=batch_size))
        self.epoch = Epoch(0, (plan := self.planner.first()).part, plan)


class SideBySide(Partition):
    """All workers' own orders in one walk: worker 0's batch, worker 1's, ..., step after step."""

    def part(self, order: IntArray, rank: int | None = None) -> IntArray:
        by_step = order.reshape(self.workers, -1, self.batch_size)  # worker, step, place
        return np.ascontiguousarray(by_step.transpose(1, 0, 2)).reshape(-1)
