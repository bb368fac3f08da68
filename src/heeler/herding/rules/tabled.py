"""What the rules share that keep a vector of every example."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from heeler.herding.rules.base import BaseRule, Common
from heeler.herding.table import SketchTable
from heeler.herding.validate import IntArray

if TYPE_CHECKING:
    from typing import Unpack


class TabledRule(BaseRule):
    """A rule over a table; an example that an epoch does not see keeps its last vector."""

    keeps_table = True
    table: SketchTable

    def __init__(self, examples: int, dim: int | None = None, **common: Unpack[Common]) -> None:
        super().__init__(examples, dim, **common)
        self.table = SketchTable(self.examples, self.dim or 0)

    def observe(self, indices: Any, vectors: Any) -> None:
        rows = self._rows(indices)
        if rows.size:
            self.table.put(rows, vectors)
            self.screened = self.table.dropped

    def forget(self, indices: IntArray) -> None:
        self.table.seen[indices] = False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "table": {name: np.array(own) for name, own in self.table.state_dict().items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.table.load_state_dict(state["table"])

    def _known(self) -> tuple[IntArray, list[int]]:
        """This epoch's order without the examples that have no vector yet, and how many of each worker's remain."""
        known = self.table.seen[self.order]
        return self.order[known], [int(np.count_nonzero(known[shard])) for shard in self._shards()]
