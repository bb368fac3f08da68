"""DDP and FSDP2 in real processes: every rank's sketches are those of its own examples, untouched by the averaging."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional as F

from heeler.sketch import Sketcher

from .oracle import per_example_gradients, relative_error


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 3))


KINDS = ["ddp", "ddp, attached first", "fsdp2", "fsdp2, attached first"]


def work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    for kind in KINDS:
        train(rank, kind)
    dist.barrier()
    # Without Python's own shutdown: a thread of gloo's may still be about to let go of FSDP2's last tensors, for which
    # it needs an interpreter; where that is already going down, the thread aborts the process.
    os._exit(0)


def train(rank: int, kind: str) -> None:
    torch.manual_seed(10 + rank)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    alone = make()
    expected = per_example_gradients(alone, lambda i: F.cross_entropy(alone(x[i : i + 1]), y[i : i + 1]), len(x))
    model: nn.Module = make()
    attach_first = kind.endswith("attached first")
    sketcher = Sketcher(model, exact=True) if attach_first else None
    if kind.startswith("ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for layer in (model[0], model[3]):  # type: ignore[index]
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    sketcher = sketcher or Sketcher(model, exact=True)
    for _ in range(2):
        F.cross_entropy(model(x), y).backward()
        error = relative_error(sketcher.pop(), expected)
        if not error < 1e-5:
            raise RuntimeError(f"rank {rank}: {kind}: relative error {error}")
    share = sketcher.coverage.share_of_gradient()
    if share != 1.0 or len(sketcher.coverage.covered) != 6:
        raise RuntimeError(f"{kind}: {sketcher.coverage}")


def odd(rank: int, store: str) -> None:
    """Each rank sees its own gradient, before it is averaged with the other's, and finds the same layer out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), Scaled(8, 8), nn.Linear(8, 3)))
    sketcher = Sketcher(model, exact=True)
    torch.manual_seed(rank)
    for _ in range(3):
        with model.no_sync():
            model(torch.randn(5, 4)).sin().sum().backward()
        model(torch.randn(5, 4)).sin().sum().backward()
    if list(sketcher.left_out) != ["1"] or not bool(sketcher.pop().isfinite().all()):
        raise RuntimeError(f"rank {rank}: {sketcher.left_out}")
    dist.barrier()
    os._exit(0)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * 2, self.bias)


def test_a_layer_that_does_not_add_up_on_two_ranks(tmp_path: Path) -> None:
    mp.spawn(odd, args=(str(tmp_path / "store"),), nprocs=2)


def test_two_processes(tmp_path: Path) -> None:
    """Spawned, not forked: other tests have started the compiler's and autograd's threads in this process."""
    mp.spawn(work, args=(str(tmp_path / "store"),), nprocs=2)
