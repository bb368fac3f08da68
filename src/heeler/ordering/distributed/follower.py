"""Ranks that train on another rank's examples: the tensor- and pipeline-parallel peers of a data-parallel worker."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding import OrderingRule
from heeler.herding.validate import IntArray
from heeler.notices import warn
from heeler.ordering.dealing import Layout
from heeler.ordering.distributed.transport import RankFault, Transport
from heeler.ordering.state import resumed_order


class Follower:
    """The planner of a rank that takes its indices from the first of its peers.

    What it sees of the gradients counts for nothing: it holds a part of the model, and there must be one order.
    """

    sees_all = False

    def __init__(self, peers: Transport, rule: OrderingRule, layout: Layout, *, seed: int) -> None:
        self.peers, self.rule, self.layout, self.seed = peers, rule, layout, seed
        self.indices = layout.part(np.asarray(rule.order))
        self._length = len(self.indices)
        self._turns = 0
        self._lost = False

    def next_order(self) -> None:
        """Close the epoch and take the next indices, or the random ones that stand in if the first peer is lost."""
        if not self._lost:
            part = torch.empty(self._length, dtype=torch.int64)
            try:
                self.peers.receive([part], 0, patience=5.0)  # it may itself wait for other workers
                self.indices = part.numpy()
            except RankFault as fault:
                self._lost = True
                warn("the next order did not arrive (%s): orders are random from now on", fault)
        if self._lost:
            self.indices = self.layout.part(self.layout.at_random(len(self.rule.order), self.seed, self._turns))
        self._turns += 1

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        order, same = resumed_order(state, self.layout)
        self.indices = self.layout.part(order)
        return same

    def state_dict(self) -> dict[str, Any]:
        return {"leader": False}

    # Nothing to do: what this rank sees does not count

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None: ...

    def wants_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        return False

    def start(self) -> None: ...

    def forget(self, indices: IntArray) -> None: ...

    def consolidate(self, trained: int) -> None: ...

    def reading(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def metrics(self) -> dict[str, float]:
        return {}


def tell_peers(peers: Transport, indices: IntArray) -> None:
    """Send this rank's indices to the others of its group; one that is lost does not hold up the rest."""
    for peer in range(1, peers.size):
        try:
            peers.send([torch.from_numpy(np.ascontiguousarray(indices))], peer)
        except RankFault as fault:
            warn("an order could not be passed on: %s", fault)
