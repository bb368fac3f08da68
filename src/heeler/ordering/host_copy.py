"""From the device to the host without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

Chunk = tuple[NDArray[np.int64], NDArray[np.float32]]

CHUNK = 1 << 18
"""Numbers that are handed over together: filing a small batch costs as much as filing a large one."""


class HostCopy:
    """Copies (indices, sketches) to host memory and hands them over in the order they were sent, in large chunks.

    From a GPU the copy runs on a stream of its own into pinned memory, and an event says when it is done, so neither
    `send` nor `receive` ever waits for the device. Sketches that are on the host already are handed over as they are.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[NDArray[np.int64], NDArray[np.float32], Any]] = deque()
        self._arrived: list[Chunk] = []
        self._numbers = 0
        self._streams: dict[torch.device, Any] = {}

    def __len__(self) -> int:
        """Batches that have not been received."""
        return len(self._under_way) + len(self._arrived)

    def send(self, indices: ArrayLike, sketches: torch.Tensor | ArrayLike) -> None:
        """indices (b,), which are copied, and sketches (b, K) on any device, which must not change afterwards."""
        where = np.array(indices, dtype=np.int64)
        rows = sketches.detach() if isinstance(sketches, torch.Tensor) else np.asarray(sketches, dtype=np.float32)
        if where.ndim != 1 or rows.ndim != 2 or len(where) != len(rows):
            raise ValueError(
                f"send wants indices (b,) and sketches (b, K), not {where.shape} and {tuple(rows.shape)}; "
                "every example of the batch needs its index"
            )
        if isinstance(rows, torch.Tensor):
            host, arrived = self._start_copy(rows) if rows.is_cuda else (rows.float(), None)
            self._under_way.append((where, host.numpy(), arrived))
        else:
            self._under_way.append((where, rows, None))

    def receive(self, wait: bool = False) -> Iterator[Chunk]:
        """What has arrived, oldest first, once it fills a chunk; with `wait`, everything that was sent."""
        while self._under_way:
            where, rows, arrived = self._under_way[0]
            if arrived is not None and not arrived.query():
                if not wait:
                    break
                arrived.synchronize()
            self._under_way.popleft()
            self._arrived.append((where, rows))
            self._numbers += rows.size
            if self._numbers >= CHUNK:
                yield self._join()
        if wait and self._arrived:
            yield self._join()

    def _join(self) -> Chunk:
        """Everything that has arrived, in one chunk."""
        arrived, self._arrived, self._numbers = self._arrived, [], 0
        if len(arrived) == 1:
            return arrived[0]
        return np.concatenate([where for where, _ in arrived]), np.concatenate([rows for _, rows in arrived])

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
