"""What one rank finds out for all: its bytes, or its error, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from heeler.ordering.distributed.ranks import Ranks
from heeler.ordering.distributed.transport import GlooTransport, Transport

PATIENCE = 30.0
"""Timeouts for which ranks wait for the one that works. If it is gone, they find out at once."""


class Circle:
    """Connections of their own, so that nothing here meets the exchange of sketches, which goes on in a thread.

    Every rank makes one, at the same time.
    """

    def __init__(self, ranks: Ranks, timeout: float) -> None:
        self.workers: Transport | None = GlooTransport(ranks.workers, timeout) if ranks.leads else None
        self.peers: Transport | None = GlooTransport(ranks.peers, timeout) if len(ranks.peers) > 1 else None

    @property
    def leads(self) -> bool:
        """Whether this is rank 0 of the workers."""
        return self.workers is not None and self.workers.rank == 0

    def close(self) -> None:
        """Leave the connections."""
        for transport in (self.workers, self.peers):
            if transport is not None:
                transport.close()

    def hear(self, find: Callable[[], bytes]) -> bytes:
        """What `find` returns on rank 0, the only one that calls it; an error there is raised on every rank."""
        error: Exception | None = None
        content, failed = b"", False
        if self.leads:
            try:
                content = find()
            except Exception as found:  # whatever it is, the others wait for a word
                error, content, failed = found, str(found).encode(), True
        for transport in (self.workers, self.peers):
            if transport is not None:
                content, failed = _pass_on(content, failed, transport)
        if error is not None:
            raise error
        if failed:
            raise ValueError(f"rank 0 could not do it for all: {content.decode()}")
        return content


def _pass_on(content: bytes, failed: bool, transport: Transport) -> tuple[bytes, bool]:
    """The first rank's, to all."""
    head = torch.tensor([len(content), int(failed)])
    if transport.rank > 0:
        transport.receive([head], 0, patience=PATIENCE)
        body = torch.empty(int(head[0]), dtype=torch.uint8)
        transport.receive([body], 0, patience=PATIENCE)
        return body.numpy().tobytes(), bool(head[1])
    body = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    for rank in range(1, transport.size):
        transport.send([head], rank)
        transport.send([body], rank)
    return content, failed
