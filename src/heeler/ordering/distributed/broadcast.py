"""What one rank finds out for all: its bytes, or its error, on every rank."""

from __future__ import annotations

from collections.abc import Callable

from heeler.ordering.distributed.ranks import Ranks
from heeler.ordering.distributed.transport import GlooTransport, Transport

PATIENCE = 30.0
"""Timeouts for which ranks wait for the one that works. If it is gone, they find out at once."""
_FAILED, _FOUND = b"!", b"="


class LeaderCalls:
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

    def from_leader(self, find: Callable[[], bytes]) -> bytes:
        """What `find` returns on rank 0, the only one that calls it; an error there is raised on every rank."""
        error: Exception | None = None
        content = b""
        if self.leads:
            try:
                content = _FOUND + find()
            except Exception as found:  # whatever it is, the others wait for a word
                error, content = found, _FAILED + str(found).encode()
        for transport in (self.workers, self.peers):
            if transport is not None:
                content = transport.broadcast(content, patience=PATIENCE)
        if error is not None:
            raise error
        if content.startswith(_FAILED):
            raise ValueError(f"rank 0 could not do it for all: {content[1:].decode()}")
        return content[1:]

    def close(self) -> None:
        """Leave the connections."""
        for transport in (self.workers, self.peers):
            if transport is not None:
                transport.close()
