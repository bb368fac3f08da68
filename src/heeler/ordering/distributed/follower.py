"""Ranks that train on another rank's examples: the tensor- and pipeline-parallel peers of a data-parallel worker."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding import OrderingRule
from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.distributed.transport import Transport
from heeler.ordering.epoch import Epoch, Plan
from heeler.ordering.partition import Partition
from heeler.ordering.state import resumed_order


class Follower:
    """The planner of a rank that takes its indices from the first of its peers.

    What it sees of the gradients counts for nothing: it holds a part of the model, and there must be one order.
    """

    sees_all, works_beside = False, False

    def __init__(self, peers: Transport, rule: OrderingRule, partition: Partition, *, seed: int) -> None:
        self.peers, self.rule, self.partition, self.seed = peers, rule, partition, seed
        self._length = len(self.first().part)
        self._lost = self.gave_up = False

    def first(self) -> Plan:
        return Plan(self.partition.part(np.asarray(self.rule.order)), None)

    def next(self, epoch: Epoch) -> Plan:
        """The next indices, or the random ones that stand in if the first peer is lost."""
        if not self._lost:
            told = torch.empty(self._length + 1, dtype=torch.int64)
            try:
                self.peers.open()
                self.peers.receive([told], 0, patience=5.0)  # it may itself wait for other workers
                self.gave_up = bool(told[-1])
                return Plan(told[:-1].numpy(), None)
            except RuntimeError as fault:
                self._lost = True
                warn("the next order did not arrive (%s): orders are random from now on", fault)
        return Plan(self.partition.part(self.partition.at_random(len(self.rule.order), self.seed, epoch.number)), None)

    def load_state_dict(self, state: dict[str, Any]) -> tuple[Plan, bool]:
        order, same = resumed_order(state, self.partition)
        self.gave_up = state.get("gave_up", False)
        return Plan(self.partition.part(order), None), same

    def state_dict(self, epoch: Epoch) -> dict[str, Any]:
        return {"leader": False}

    # Nothing to do: what this rank sees does not count

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None: ...

    def wants_start(self, epoch: Epoch, trained: int) -> bool:
        return False

    def start(self, epoch: Epoch) -> None: ...

    def finish(self, epoch: Epoch, *, may_go_on: bool = False) -> None: ...

    def forget(self, indices: IntArray) -> None: ...

    def consolidate(self, epoch: Epoch, trained: int, also: Callable[[], None]) -> None: ...

    def open(self, epoch: Epoch) -> None: ...

    def close(self, epoch: Epoch | None) -> None: ...

    def reading(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {}
