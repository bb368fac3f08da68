"""Messages of all workers in order of arrival, over gloo: the number of a step, and then the values.

A thread per worker waits for its messages. Gloo can receive from any source, but that stays broken once a worker has
died while it was sending; and a receive that is given up closes the connections to all.
"""

from __future__ import annotations

import datetime
import queue
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HEADER = 8
"""Bytes before the values of a message: the step."""
STOP = -1
"""The step of the last message to a worker, and of its answer to that."""
FOREVER = datetime.timedelta(days=365)
"""How long a thread waits for a worker's next message; the leader has a timeout of its own."""


def message_of(step: int, values: Tensor) -> Tensor:
    """(length,) bytes."""
    return torch.cat([torch.tensor([step]).view(torch.uint8), values.view(torch.uint8)])


def step_of(message: Tensor) -> int:
    """Which step a message is about."""
    return int(message[:HEADER].view(torch.int64))


class WorkerMailbox:
    """What workers 0, 1, … (ranks 1, 2, … of the group) have sent: (length,) bytes per message."""

    def __init__(self, group: Any, workers: int, length: int) -> None:
        self._group, self._length = group, length
        self._arrived: queue.Queue[tuple[int, Tensor | None]] = queue.Queue()
        for worker in range(workers):
            threading.Thread(target=self._listen, args=(worker,), name=f"heeler-worker-{worker}", daemon=True).start()

    def get(self, seconds: float) -> tuple[int, Tensor | None]:
        """The next message and its worker, with None for a message if the worker is gone; or `queue.Empty`."""
        return self._arrived.get(timeout=max(0.0, seconds))

    def _listen(self, worker: int) -> None:
        while True:
            buffer = torch.empty(self._length, dtype=torch.uint8)
            try:
                work = dist.irecv(buffer, worker + 1, group=self._group)
                assert work is not None
                work.wait(FOREVER)
            except RuntimeError:
                self._arrived.put((worker, None))
                return
            self._arrived.put((worker, buffer))
            if step_of(buffer) == STOP:  # a thread that waited on, at the process's end, could abort it
                return
