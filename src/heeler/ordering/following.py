"""Ranks that train on another rank's examples: the tensor- and pipeline-parallel peers of a data-parallel worker."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from heeler.herding import Rule
from heeler.ordering.dealing import IntArray, Layout
from heeler.ordering.group import Group, RankFault
from heeler.ordering.turnover import resumed_walk

logger = logging.getLogger("heeler")


class FollowingTurnover:
    """`Turnover` for a rank that takes its indices from the first of its peers.

    What it sees of the gradients counts for nothing: it holds a part of the model, and there must be one order.
    """

    def __init__(self, peers: Group, rule: Rule, layout: Layout, *, seed: int) -> None:
        self.peers, self.rule, self.layout, self.seed = peers, rule, layout, seed
        self.indices = layout.part(rule.order)
        self._length = len(self.indices)
        self._turns = 0
        self._lost = False

    def observe(self, indices: IntArray, vectors: NDArray[np.float32]) -> None:
        """Nothing to note."""

    def wants_early_start(self, trained: int, length: int, *, sketched: bool) -> bool:
        """Never."""
        return False

    def start_early(self) -> None:
        """Nothing to start."""

    def next_order(self) -> None:
        """Close the epoch and take the next indices, or the random ones that stand in if the first peer is lost."""
        if not self._lost:
            part = torch.empty(self._length, dtype=torch.int64)
            try:
                self.peers.receive([part], 0, patience=6.0)  # it may itself wait for other workers
                self.indices = part.numpy()
            except RankFault as fault:
                self._lost = True
                logger.warning("the next order did not arrive (%s): orders are random from now on", fault)
        if self._lost:
            self.indices = self.layout.part(random_walk(self.layout, len(self.rule.order), self.seed, self._turns))
        self._turns += 1

    def forget(self, indices: IntArray) -> None:
        """Nothing to forget."""

    def consolidate(self) -> None:
        """Nothing to bring."""

    def state_dict(self) -> dict[str, Any]:
        """The host's is the whole."""
        return {"host": False}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Go on where the host's `state_dict` was taken; True if positions in the epoch still hold."""
        if "rule" not in state:
            raise ValueError("this state is not the host's: load what rank 0 saved, on every rank")
        walk, same = resumed_walk(state, self.layout)
        self.indices = self.layout.part(walk)
        return same

    def numbers(self) -> dict[str, float]:
        """Nothing to log."""
        return {}


def tell_peers(peers: Group, indices: IntArray) -> None:
    """Send this rank's indices to the others of its group; one that is lost does not hold up the rest."""
    for peer in range(1, peers.size):
        try:
            peers.send([torch.from_numpy(np.ascontiguousarray(indices))], peer)
        except RankFault as fault:
            logger.warning("an order could not be passed on: %s", fault)


def random_walk(layout: Layout, examples: int, seed: int, turn: int) -> IntArray:
    """(N,) an order that needs no word from anybody, and is the same everywhere."""
    order = np.empty(examples, np.int64)
    start = 0
    for number, size in enumerate(layout.shard_sizes or (examples,)):
        order[start : start + size] = start + np.random.default_rng([seed, turn, number]).permutation(size)
        start += size
    return order
