"""Workers as real processes: gloo and DDP, each rank with its own sampler, for what simulation leaves out."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.folder import Folder
from experiments.records import carry_out, is_finished, note_failure
from experiments.rules import order_of
from experiments.setup import Run
from experiments.training import OneProcess, Strata, refresh_of, train
from heeler.ordering import Sampler


class Rank(OneProcess):
    """One of `run.workers` processes; needs an initialised process group."""

    def sampler(self, run: Run, examples: int, strata: Strata | None = None) -> Sampler:
        if run.passes:
            raise ValueError("passes can be set in simulated runs only")
        size: Any = examples // run.workers if run.shards == "local" else examples
        shards: Any = run.shards
        known: dict[str, Any] = {}
        if strata is not None:
            first = dist.get_rank() * size if run.shards == "local" else 0
            known["strata"] = strata[first : first + size]
        return Sampler(
            size,
            batch_size=run.batch_size,
            order=order_of(run.rule),
            dim=run.dim,
            refresh=refresh_of(run),
            budget=None,
            seed=run.seed,
            shards=shards,
            **known,
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model)

    def own(self, run: Run, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if run.shards == "global":
            return tensors
        size, rank = len(tensors[0]) // run.workers, dist.get_rank()
        return tuple(t[rank * size : (rank + 1) * size] for t in tensors)

    def step(self, run: Run) -> int:
        return run.batch_size


def carry_out_in_processes(runs: Sequence[Run], data: Path | None, out: Path) -> None:
    """Each run in as many processes as it has workers, one run after the other; rank 0 writes. Failures are noted."""
    import torch.multiprocessing as processes

    for run in runs:
        if is_finished(out, run):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            arguments = (run.to_json(), data, out, f"{scratch}/rendezvous")
            try:
                processes.spawn(_rank, args=arguments, nprocs=run.workers)
            except Exception as error:
                note_failure(run, out, error)


def _rank(rank: int, settings: dict[str, Any], data: Path | None, out: Path, rendezvous: str) -> None:
    run = Run.from_json(settings)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=run.workers)
    try:
        if rank == 0:
            carry_out(run, Folder(data), out, place=Rank())
        else:
            for _ in train(run, Folder(data), Rank()):
                pass
    finally:
        # Whatever still holds the group keeps gloo's threads past its end, and in Python's shutdown one that lets go of
        # the last collective aborts the process (plain PyTorch 2.13 does so too).
        gc.collect()
        dist.destroy_process_group()
