"""A rank that sends what it saw to the leader and gets its part of the next order back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from heeler.herding.validate import IntArray
from heeler.ordering.distributed.shared import COMMIT, SharedPlanner, abort, verdict_key
from heeler.ordering.distributed.transport import NO_ANSWER, ConnectionLost, RankFault
from heeler.ordering.distributed.wire import News
from heeler.ordering.epoch import Epoch, Plan


class Member(SharedPlanner):
    """Any rank but 0 of those that share an order."""

    sees_all = False

    def state_dict(self, epoch: Epoch) -> dict[str, Any]:
        """Nothing: the leader's state is all that a restart needs."""
        return {"leader": False}

    def _resume(self, state: dict[str, Any]) -> None: ...

    def _plan(self, part: IntArray, whole: IntArray) -> Plan:
        return Plan(part, None)

    # In the thread

    def _exchange(self, number: int, news: News, trained: int) -> None:
        self._wire.send(news, trained)

    def _new_part(self, epoch: Epoch) -> IntArray:
        part = torch.empty(self._length + 1, dtype=self._wire.number)
        self.transport.receive([part], 0, patience=2.0)  # the leader may itself wait for another rank
        return part.numpy().astype(np.int64)

    def _verdict(self, number: int, stage: int) -> str:
        notices, key = self.transport.notices, verdict_key(number)
        self._vote(stage)
        # From here on only the verdict tells what the others do. While it cannot be read, waiting is all there is.
        wait = 0.0
        try:
            self.transport.receive([torch.empty_like(COMMIT)], 0, patience=3.0)
            return "commit"
        except ConnectionLost:
            wait = 2.0 * self._moment  # the leader has left, and said why, or is gone
        except RankFault:
            pass
        return notices.decided(key, wait) or notices.decide(key, abort(RankFault(0, NO_ANSWER)))
