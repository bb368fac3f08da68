"""A rank that sends what it saw to the leader and gets its part of the next order back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from heeler.herding.validate import IntArray
from heeler.ordering.distributed.shared import SharedPlanner
from heeler.ordering.distributed.transport import RankFault
from heeler.ordering.distributed.wire import Rows


class Member(SharedPlanner):
    """Any rank but 0 of those that share an order."""

    sees_all = False

    @property
    def _patience(self) -> float:
        # The leader waits for a rank at most `timeout`; whoever waits for the leader must be more patient than that.
        return 4.0 * self.transport.timeout

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the leader's state is all that a restart needs."""
        return {"leader": False}

    def _resume(self, order: IntArray, state: dict[str, Any]) -> None: ...

    def _use(self, part: IntArray) -> None:
        self.indices = part

    # In the thread

    def _exchange(self, rows: Rows, gone: IntArray) -> None:
        self._wire.send(rows, gone)

    def _close(self, turn: int) -> IntArray:
        part = torch.empty(self._length, dtype=self._wire.number)
        self.transport.receive([part], 0, patience=2.0)  # the leader may itself wait for another rank
        self.transport.count(f"{turn}/received")
        return part.numpy().astype(np.int64)

    # The leader's part

    def _commit_known(self, turn: int) -> None: ...

    def _report(self, turn: int, fault: RankFault) -> None: ...
