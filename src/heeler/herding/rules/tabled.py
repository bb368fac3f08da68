"""Rules that keep a vector of every example: what they share, and greedy herding, for study."""

from __future__ import annotations

from typing import Any

import numpy as np

from heeler.herding import validate as check
from heeler.herding.rules.base import BaseRule
from heeler.herding.table import SketchTable
from heeler.herding.validate import Array, IntArray


class FilesVectors(BaseRule):
    """A rule with a table of some kind; an example that an epoch does not see keeps its last vector."""

    keeps_table = True
    table: SketchTable

    def observe(self, indices: Any, vectors: Any) -> None:
        rows = self._rows(indices)
        if rows.size:
            self.table.put(rows, vectors)
            self.screened = self.table.dropped

    def forget(self, indices: IntArray) -> None:
        self.table.forget(indices)


class TabledRule(FilesVectors):
    """A rule over one table in memory."""

    def __init__(self, examples: int, dim: int | None = None, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        self.table = SketchTable(self.examples, self.dim or 0)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "table": {name: np.array(own) for name, own in self.table.state_dict().items()}}

    def state_before_close(self) -> dict[str, Any]:
        return super().state_dict()  # the rows stay

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.table.restore(state["table"])

    def _read(self, state: dict[str, Any]) -> dict[str, Any]:
        self.table.check_state(check.entry(state, "table"))
        return super()._read(state)

    def _turn_to(self, order: IntArray) -> IntArray:
        self.table.close_epoch()
        return super()._turn_to(order)

    def _known(self) -> list[IntArray]:
        """Each worker's part of this epoch's order, without the examples that have no vector yet."""
        return [own[self.table.seen[own]] for own in (self.order[shard] for shard in self._shards())]


class Greedy(TabledRule):
    """Greedy herding: always the example that keeps the prefix sum shortest.

    Its prefix norms are the best of all and it trains *worse than random* at large learning rates: unstable, since it
    leaves the largest gradients to the end. Takes O(N²K) time. Each worker herds its own examples.

    Args:
        limit: the largest shard it will take on.
    """

    def __init__(self, examples: int, dim: int | None = None, *, limit: int = 20_000, **common: Any) -> None:
        super().__init__(examples, dim, **common)
        largest = int(np.diff(self.offsets).max())
        if largest > limit:
            raise ValueError(
                f"greedy herding takes O(N²K) time and a shard has {largest} examples, more than limit={limit}: "
                "use the rule 'herd', or raise the limit and wait"
            )

    def _close(self) -> IntArray:
        return self._with_unseen([greedy_order(self.table.rows, own) for own in self._known()])


def greedy_order(vectors: Array, order: IntArray) -> IntArray:
    """Rows of `order` so that each next one keeps the centred prefix shortest; of equals the earliest in `order`.

    ‖p + c_i‖² = ‖p‖² + 2⟨p, c_i⟩ + ‖c_i‖², so the least of 2⟨p, c_i⟩ + ‖c_i‖² is taken: one matrix-vector product per
    step.
    """
    if order.size == 0:
        return order
    centred = vectors[order].astype(np.float64)
    centred -= centred.mean(axis=0)
    squares = np.einsum("ik,ik->i", centred, centred)
    prefix, following = np.zeros(centred.shape[1]), np.empty_like(order)
    for t in range(order.size):
        best = int(np.argmin(2.0 * (centred @ prefix) + squares))
        following[t] = order[best]
        prefix += centred[best]
        squares[best] = np.inf
    return following
