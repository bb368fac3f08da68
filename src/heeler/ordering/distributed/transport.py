"""What planners need between ranks: tensors with bounded waits, and one agreed decision. Gloo is one implementation."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

TEXT_BYTES = 96


class RankFault(RuntimeError):
    """A rank did not do its part of an exchange."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why = rank, why


class Transport(Protocol):
    """The ranks that share one order. All ranks here count within these; rank 0 leads. Only tensors travel."""

    rank: int
    size: int
    timeout: float
    """Seconds after which a rank that does not answer counts as lost."""
    bytes_sent: int
    bytes_received: int

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Send tensors to a rank that knows their shapes; `RankFault` if it does not take them in time."""

    def receive(self, tensors: Sequence[Tensor], source: int, *, patience: float = 1.0) -> None:
        """Fill tensors with what a rank sends, waiting for `patience` times the timeout; `RankFault` after that."""

    def all_texts(self, text: str) -> list[str]:
        """Every rank's short text, as rank 0, 1, ... gave it."""

    def text_of_first(self, text: str) -> str:
        """Rank 0's text, of any length."""

    def decide(self, key: str, verdict: str) -> str:
        """Write `verdict` unless something stands there already; returns what stands there. The first to write wins."""

    def decided(self, key: str, wait: float, otherwise: str) -> str:
        """The decision, waiting for it up to `wait` seconds and then writing `otherwise` oneself."""

    def count(self, key: str) -> None:
        """Add one to a counter that all ranks see."""

    def counted(self, key: str, target: int) -> bool:
        """Whether the counter reaches `target` in time."""


class GlooTransport:
    """A gloo group of its own, so that nothing here meets the training's collectives, on any backend.

    Decisions are kept in the process group's store.

    Args:
        members: their global ranks, this one's among them.
        timeout: seconds after which a rank that does not answer counts as lost.
    """

    def __init__(self, members: list[int], timeout: float) -> None:
        self.timeout = timeout
        self._members = members
        self.size = len(members)
        self.rank = members.index(dist.get_rank())
        # Waits are bounded one by one (see _finish); the group's own limit must only not cut them short.
        limit = datetime.timedelta(seconds=2 * timeout + 60)
        self._group = dist.new_group(members, timeout=limit, backend="gloo", use_local_synchronization=True)
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"heeler/{'-'.join(map(str, members))}/{_serial(members)}", store)
        self.bytes_sent = 0
        self.bytes_received = 0
        self._abandoned: list[Sequence[Tensor]] = []

    # Tensors

    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        self._all(dist.isend, tensors, to, 1.0)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)

    def receive(self, tensors: Sequence[Tensor], source: int, *, patience: float = 1.0) -> None:
        self._all(dist.irecv, tensors, source, patience)
        self.bytes_received += sum(tensor.nbytes for tensor in tensors)

    def _all(self, transfer: Any, tensors: Sequence[Tensor], rank: int, patience: float) -> None:
        try:
            works = [transfer(tensor, self._members[rank], group=self._group) for tensor in tensors if tensor.numel()]
            for work in works:
                work.wait(datetime.timedelta(seconds=patience * self.timeout))
        except RuntimeError as error:
            self._abandoned.append(tensors)  # a transfer that was given up may still write into its memory
            raise RankFault(rank, "it did not answer in time, or is gone") from error

    def all_texts(self, text: str) -> list[str]:
        encoded = text.encode()[:TEXT_BYTES]
        mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else mine[:0]
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self._group)
        return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in theirs]

    def text_of_first(self, text: str) -> str:
        length = torch.tensor([len(text)])
        dist.broadcast(length, self._members[0], group=self._group)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        dist.broadcast(content, self._members[0], group=self._group)
        return bytes(content.tolist()).decode()

    # One decision for all

    def decide(self, key: str, verdict: str) -> str:
        try:
            return bytes(self._store.compare_set(key, "", verdict)).decode()
        except RuntimeError:  # the store lives in one of the ranks, and is gone with it
            return "abort 0 the process group's store is gone"

    def decided(self, key: str, wait: float, otherwise: str) -> str:
        self._poll(lambda: bool(self._store.check([key])), wait)
        return self.decide(key, otherwise)

    def count(self, key: str) -> None:
        self._store.add(key, 1)

    def counted(self, key: str, target: int) -> bool:
        return self._poll(lambda: self._store.add(key, 0) >= target, self.timeout)

    def _poll(self, ready: Callable[[], bool], wait: float) -> bool:
        deadline = time.monotonic() + wait
        pause = 0.0005
        while time.monotonic() < deadline:
            try:
                if ready():
                    return True
            except RuntimeError:  # see decide
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return False


_serials: dict[tuple[int, ...], int] = {}


def _serial(members: list[int]) -> int:
    """How many groups of these ranks this process has made: all ranks make them in the same order."""
    key = tuple(members)
    _serials[key] = _serials.get(key, 0) + 1
    return _serials[key]
