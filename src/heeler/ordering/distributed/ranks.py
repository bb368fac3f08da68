"""Which ranks share an order, and which speak for a worker: from what the user named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from heeler.ordering.distributed.transport import Transport


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


def agree(transport: Transport, facts: dict[str, object]) -> None:
    """Raise, on every rank, if the ranks do not give the same facts; the error names both values."""
    for name, value in facts.items():
        values = transport.all_texts(str(value))
        for rank, other in enumerate(values):
            if other != values[0]:
                raise ValueError(
                    f"the ranks disagree on {name}: rank 0 has {values[0]!r}, rank {rank} has {other!r}. "
                    "Make the sampler with the same arguments everywhere."
                )
