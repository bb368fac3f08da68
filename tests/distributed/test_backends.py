"""Over a backend that moves no CPU tensors, such as NCCL: Heeler brings its own connections, and touches no others."""

import datetime
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import compile_rule, problem, run_ranks, set_up, walk

EPOCHS = 3


class Refusing(dist.ProcessGroup):
    """A process group without a single collective: each of them raises."""

    def getBackendName(self) -> str:
        return "refusing"


def walked(rank: int, device: str = "cpu") -> list[list[int]]:
    dataset, model = problem(24)
    dataset.tensors = tuple(tensor.to(device) for tensor in dataset.tensors)
    sampler, handle, loader = set_up(dataset, model.to(device))
    orders = walk(model, sampler, loader, EPOCHS)
    handle.consolidate()
    return orders


def _rank(rank: int, backend: str, device: str, folder: str) -> None:
    if backend == "refusing":
        dist.Backend.register_backend(backend, lambda store, own, size, timeout: Refusing(own, size), devices=["cpu"])
    dist.init_process_group(
        backend, f"file://{folder}/store", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    if backend == "refusing":
        with pytest.raises(RuntimeError):
            dist.all_reduce(torch.zeros(1))
    torch.save(walked(rank, device), Path(folder) / f"orders-{rank}")


def over(backend: str, device: str, context: str) -> list[Any]:
    compile_rule()
    with tempfile.TemporaryDirectory() as folder:
        made = multiprocessing.get_context(context)
        ranks = [made.Process(target=_rank, args=(rank, backend, device, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
        assert [process.exitcode for process in ranks] == [0, 0]
        return [torch.load(Path(folder) / f"orders-{rank}") for rank in range(2)]


def test_over_a_backend_that_moves_no_cpu_tensors() -> None:
    assert over("refusing", "cpu", "fork") == run_ranks(2, walked)


@pytest.mark.skipif(not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a GPU and NCCL")
def test_over_nccl() -> None:
    """Both ranks on one GPU: NCCL would refuse that at its first collective, and Heeler uses none."""
    assert over("nccl", "cuda", "spawn") == run_ranks(2, walked)
