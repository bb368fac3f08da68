"""What planners need between ranks: tensors with bounded waits, and notices. Gloo is one implementation."""

from __future__ import annotations

import datetime
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from heeler.ordering.background import BackgroundThread, result_of
from heeler.ordering.distributed.store import Notices, bounded_store

TEXT_BYTES = 96
TOLD = 4
"""Tensors per rank that are on their way without anybody waiting for that, at most."""
NO_ANSWER = "it did not answer in time, or is gone"

Parcels = Sequence[tuple[int, Sequence[Tensor]]]
"""Ranks, and the tensors for each or from each."""


class RankFault(RuntimeError):
    """A rank did not do its part of an exchange."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why = rank, why


class ConnectionLost(RankFault):
    """A transfer failed before its time was over: the rank is gone, or has left and said why in the notices."""


class Transport(Protocol):
    """The ranks that share one order. All ranks here count within these; rank 0 leads. Only tensors travel."""

    rank: int
    size: int
    timeout: float
    """Seconds after which a rank that does not answer counts as lost."""
    bytes_sent: int
    bytes_received: int
    roll: Notices
    """Notices that outlast a generation."""
    notices: Notices
    """Those of this generation: what was written in an earlier one is not seen."""

    def begin(self, generation: int) -> None:
        """Leave the connections and notices as they are, and go on with new ones; `connect` makes the connections."""

    def connect(self, limit: float) -> None:
        """Connect with all ranks, which do the same, within `limit` seconds; RuntimeError if they do not."""

    def leave(self) -> None:
        """Leave the connections: ranks that wait for this one find out at once."""

    def open(self) -> None:
        """Connect again after `close`, as all ranks do."""

    def close(self) -> None:
        """Leave the connections and the store for good, or until `open`."""

    def send(self, tensors: Sequence[Tensor], to: int, *, patience: float = 1.0) -> None:
        """Send tensors to a rank that knows their shapes, within `patience` times the timeout; or `RankFault`."""

    def receive(self, tensors: Sequence[Tensor], source: int, *, patience: float = 1.0) -> None:
        """Fill tensors with what a rank sends, within `patience` times the timeout; or `RankFault`."""

    def send_each(self, parcels: Parcels, *, patience: float = 1.0) -> None:
        """Send to many ranks at once, within `patience` times the timeout for all; or `RankFault`."""

    def receive_each(self, parcels: Parcels, *, patience: float = 1.0) -> None:
        """Fill tensors with what many ranks send, within `patience` times the timeout for all; or `RankFault`."""

    def tell_each(self, tensor: Tensor, ranks: Iterable[int]) -> None:
        """Send to ranks without waiting for any; one that is lost does not get it."""

    def all_texts(self, text: str) -> list[str]:
        """Every rank's short text, as rank 0, 1, ... gave it."""

    def broadcast(self, content: bytes, *, patience: float = 2.0) -> bytes:
        """Rank 0's content, of any length, on every rank, within `patience` times the timeout; or `RankFault`."""


class GlooTransport:
    """A gloo group of its own, so that nothing here meets the training's collectives, on any backend.

    PyTorch keeps no list of it, as it does of `new_group`'s: it goes when the transport goes.

    Args:
        members: their global ranks, this one's among them.
        timeout: seconds after which a rank that does not answer counts as lost.
    """

    def __init__(self, members: list[int], timeout: float) -> None:
        self.timeout = timeout
        self.size = len(members)
        self.rank = members.index(dist.get_rank())
        self.bytes_sent = 0
        self.bytes_received = 0
        self._store = bounded_store()
        self._prefix = f"heeler/{'-'.join(map(str, members))}/{_serial(members)}"
        self._group: Any = None
        self._abandoned: list[tuple[list[tuple[int, Tensor]], list[Any]]] = []
        self._told: list[tuple[Tensor, Any]] = []
        self._openings = 0
        self._is_open = False
        _living.add(self)
        self.open()

    def open(self) -> None:
        if self._is_open:
            return
        self._store.open()
        self._is_open = True
        self._openings += 1
        self.roll = Notices(self._store, f"{self._prefix}/{self._openings}", self.rank, self.size)
        self.begin(0)
        self.connect(2 * self.timeout + 60)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self.leave()
            self._store.close()

    def begin(self, generation: int) -> None:
        self.leave()
        self._generation = generation
        self.notices = self.roll.under(str(generation))

    def connect(self, limit: float) -> None:
        store = dist.PrefixStore(f"{self._prefix}/{self._openings}/{self._generation}/gloo", self._store.store)
        within = datetime.timedelta(seconds=limit)
        # In a thread that can be left: if a rank is frozen while they connect, gloo may wait for longer than it should.
        thread = BackgroundThread("heeler-connect")
        made = thread.submit(lambda: dist.ProcessGroupGloo(store, self.rank, self.size, timeout=within))
        thread.close()
        try:
            self._group = result_of(made, limit)
        except FutureTimeout:
            raise RuntimeError("the ranks did not connect in time") from None

    def leave(self) -> None:
        self._group = None
        self._abandoned.clear()
        self._told.clear()

    # Tensors

    def send(self, tensors: Sequence[Tensor], to: int, *, patience: float = 1.0) -> None:
        self.send_each([(to, tensors)], patience=patience)

    def receive(self, tensors: Sequence[Tensor], source: int, *, patience: float = 1.0) -> None:
        self.receive_each([(source, tensors)], patience=patience)

    def send_each(self, parcels: Parcels, *, patience: float = 1.0) -> None:
        self.bytes_sent += self._each(lambda group, rank, tensor: group.send([tensor], rank, 0), parcels, patience)

    def receive_each(self, parcels: Parcels, *, patience: float = 1.0) -> None:
        self.bytes_received += self._each(lambda group, rank, tensor: group.recv([tensor], rank, 0), parcels, patience)

    def tell_each(self, tensor: Tensor, ranks: Iterable[int]) -> None:
        self._told = self._told[-TOLD * self.size :]  # those before have been taken, or never will be
        for rank in ranks:
            with suppress(RuntimeError):
                self._told.append((tensor, self._group.send([tensor], rank, 0)))
                self.bytes_sent += tensor.nbytes

    def _each(self, transfer: Callable[[Any, int, Tensor], Any], parcels: Parcels, patience: float) -> int:
        """Begin all transfers, wait for all; returns their bytes."""
        pieces = [(rank, tensor) for rank, tensors in parcels for tensor in tensors if tensor.numel()]
        rank = parcels[0][0] if parcels else 0
        if self._group is None:
            raise ConnectionLost(rank, "the connection was closed after a fault")
        works: list[Any] = []
        deadline = time.monotonic() + patience * self.timeout
        try:
            for rank, tensor in pieces:
                works.append(transfer(self._group, rank, tensor))
            for (rank, _), work in zip(pieces, works, strict=True):  # noqa: B007 (it is named below)
                work.wait(datetime.timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
        except RuntimeError:
            # A transfer that was given up may still write into its memory; and to end it may take time, which is for
            # `close`, when the others know of the fault.
            self._abandoned.append((pieces, works))
            in_time = time.monotonic() < deadline - 0.01  # gloo counts in whole milliseconds
            raise (ConnectionLost if in_time else RankFault)(rank, NO_ANSWER) from None
        return sum(tensor.nbytes for _, tensor in pieces)

    def all_texts(self, text: str) -> list[str]:
        encoded = text.encode()[:TEXT_BYTES]
        mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else mine[:0]
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        self._group.allgather([theirs], [mine]).wait()
        return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in theirs]

    def broadcast(self, content: bytes, *, patience: float = 2.0) -> bytes:
        head = torch.tensor([len(content)])
        if self.rank > 0:
            self.receive([head], 0, patience=patience)
            body = torch.empty(int(head), dtype=torch.uint8)
            self.receive([body], 0, patience=patience)
            return body.numpy().tobytes()
        body = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
        for tensor in (head, body):
            self.send_each([(rank, [tensor]) for rank in range(1, self.size)], patience=patience)
        return content


# A loader's worker is often a fork, and gloo's threads are not in it: to destroy a group there waits for them for ever.
# Garbage collection would, for a group that the parent dropped shortly before. So forks hold all groups until they end.
_living: weakref.WeakSet[GlooTransport] = weakref.WeakSet()
_held: list[GlooTransport] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=lambda: _held.extend(_living), after_in_parent=_held.clear)


_serials: dict[tuple[int, ...], int] = {}


def _serial(members: list[int]) -> int:
    """How many groups of these ranks this process has made: all ranks make them in the same order."""
    key = tuple(members)
    _serials[key] = _serials.get(key, 0) + 1
    return _serials[key]
