"""From the device to the host without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Delivery = tuple[NDArray[np.int64], NDArray[np.float32]]


class Courier:
    """Carries (indices, sketches) to host memory and delivers them in sending order.

    From a GPU the copy runs on a stream of its own into pinned memory, and an event says when it is done, so neither
    `send` nor `receive` ever waits for the device. Sketches that are on the host already arrive at once, as a copy.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[NDArray[np.int64], torch.Tensor | NDArray[np.float32], Any]] = deque()
        self._streams: dict[torch.device, Any] = {}

    def __len__(self) -> int:
        """Deliveries that have not been received."""
        return len(self._under_way)

    def send(self, indices: ArrayLike, sketches: torch.Tensor | ArrayLike) -> None:
        """indices (b,), sketches (b, K) on any device."""
        where = np.array(indices, dtype=np.int64)  # a copy: the caller may go on to change its own
        rows = sketches.detach() if isinstance(sketches, torch.Tensor) else np.array(sketches, dtype=np.float32)
        if where.ndim != 1 or rows.ndim != 2 or len(where) != len(rows):
            raise ValueError(
                f"send wants indices (b,) and sketches (b, K), not {where.shape} and {tuple(rows.shape)}; "
                "every example of the batch needs its index"
            )
        if isinstance(rows, torch.Tensor) and rows.is_cuda:
            self._under_way.append((where, *self._start_copy(rows)))
        elif isinstance(rows, torch.Tensor):
            self._under_way.append((where, np.array(rows.float().numpy(), dtype=np.float32), None))
        else:
            self._under_way.append((where, rows, None))

    def receive(self, wait: bool = False) -> Iterator[Delivery]:
        """What has arrived, oldest first; with `wait`, everything that was sent."""
        while self._under_way:
            where, rows, arrived = self._under_way[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    return
                arrived.synchronize()
            self._under_way.popleft()
            yield where, rows.numpy() if isinstance(rows, torch.Tensor) else rows

    def _start_copy(self, rows: torch.Tensor) -> tuple[torch.Tensor, Any]:
        stream = self._streams.get(rows.device)
        if stream is None:
            stream = self._streams[rows.device] = torch.cuda.Stream(rows.device)
        stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(stream):
            single = rows.float()
            host = torch.empty(single.shape, dtype=torch.float32, pin_memory=True)  # torch keeps a pool of these
            host.copy_(single, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record(stream)
        rows.record_stream(stream)  # its memory must not be reused before the copy has read it
        return host, arrived
