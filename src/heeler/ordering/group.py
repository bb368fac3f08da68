"""What coordination needs of `torch.distributed`: tensors between ranks with bounded waits, and one agreed decision.

A gloo group of its own, so that nothing here meets the training's collectives, on any backend. Only tensors travel.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TEXT_BYTES = 96


class RankFault(RuntimeError):
    """A rank did not do its part of an exchange."""

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: {why}")
        self.rank, self.why = rank, why


class Group:
    """The ranks that share one order. `rank` and all ranks here count within the group; rank 0 hosts the rule.

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
        """Send tensors to a rank that knows their shapes."""
        self._all(dist.isend, tensors, to, 1.0)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors)

    def receive(self, tensors: Sequence[Tensor], source: int, *, patience: float = 1.0) -> None:
        """Fill tensors with what a rank sends, waiting for `patience` times the timeout."""
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
        """Every rank's short text, as rank 0, 1, ... gave it."""
        encoded = text.encode()[:TEXT_BYTES]
        mine = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        mine[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else mine[:0]
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(theirs, mine, group=self._group)
        return [bytes(t.tolist()).rstrip(b"\0").decode(errors="replace") for t in theirs]

    def text_of_first(self, text: str) -> str:
        """Rank 0's text, of any length."""
        length = torch.tensor([len(text)])
        dist.broadcast(length, self._members[0], group=self._group)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == 0:
            content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        dist.broadcast(content, self._members[0], group=self._group)
        return bytes(content.tolist()).decode()

    # One decision for all, kept in the process group's store: the first to write it wins

    def decide(self, key: str, verdict: str) -> str:
        """Write `verdict` unless something stands there already; returns what stands there."""
        try:
            return bytes(self._store.compare_set(key, "", verdict)).decode()
        except RuntimeError:  # the store lives in one of the ranks, and is gone with it
            return "abort 0 the process group's store is gone"

    def decided(self, key: str, wait: float, otherwise: str) -> str:
        """The decision, waiting for it up to `wait` seconds and then writing `otherwise` oneself."""
        self._poll(lambda: bool(self._store.check([key])), wait)
        return self.decide(key, otherwise)

    def count(self, key: str) -> None:
        """Add one to a counter that all ranks see."""
        self._store.add(key, 1)

    def counted(self, key: str, target: int) -> bool:
        """Whether the counter reaches `target` in time."""
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


@dataclass(frozen=True)
class Ranks:
    """Who trains on what: the workers share the data; the peers of a worker hold parts of the same model copy."""

    workers: list[int]
    """Global ranks, one of each data-parallel worker, in order, this one among them."""
    worker: int
    """Which of the workers this rank belongs to."""
    peers: list[int]
    """Global ranks that train on this worker's examples; the first speaks for it."""

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its worker."""
        return self.peers[0] == dist.get_rank()


def find_ranks(named: Any) -> Ranks | None:
    """From what the user named: a process group, a one-dimensional DeviceMesh, (mesh, "dp"), or None for all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        if named is not None:
            raise ValueError("a process group was named, but torch.distributed is not initialized")
        return None
    own = dist.get_rank()
    if isinstance(named, tuple):
        mesh, dimension = named
        at = mesh.mesh_dim_names.index(dimension)
        by_worker = mesh.mesh.movedim(at, 0).flatten(1)  # (workers, ranks of one copy of the model)
        worker, column = (int(place[0]) for place in torch.where(by_worker == own))
        return Ranks(by_worker[:, column].tolist(), worker, by_worker[worker].tolist())
    if hasattr(named, "get_group"):
        if named.ndim != 1:
            raise ValueError(
                f"the DeviceMesh has {named.ndim} dimensions: name the data-parallel one, process_group=(mesh, 'dp')"
            )
        named = named.get_group()
    members = dist.get_process_group_ranks(named if named is not None else dist.group.WORLD)
    return Ranks(members, members.index(own), [own])


def agree(group: Group, facts: dict[str, object]) -> None:
    """Raise, on every rank, if the ranks do not give the same facts; the error names both values."""
    for name, value in facts.items():
        values = group.all_texts(str(value))
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"the ranks disagree on {name}: rank 0 has {values[0]!r}, rank {rank} has {other!r}. "
                    "Make the sampler with the same arguments everywhere."
                )
