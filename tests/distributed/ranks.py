"""Real processes with a gloo group, and a problem whose gradients are small integers: exact in any order of sums."""

import datetime
import functools
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.herding import make_rule

FEATURES = 3


def run_ranks(
    ranks: int,
    task: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    lost: tuple[int, ...] = (),
    tcp: bool = False,
    with_children: bool = False,
) -> list[Any]:
    """`task(rank, *args)` in `ranks` forked processes with a process group; their results, None for `lost` ranks.

    tcp: with the store in rank 0, not in a file. with_children: ranks may start processes, such as loader workers.
    """
    compile_rule()
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = f"tcp://127.0.0.1:{_free_port()}" if tcp else f"file://{folder}/store"
        processes = [
            context.Process(target=_rank, args=(rank, ranks, folder, store, task, args), daemon=not with_children)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            if rank not in lost:
                process.join(timeout)
        results = []
        for rank, process in enumerate(processes):
            if rank in lost:
                process.kill()
                results.append(None)
                continue
            if process.exitcode is None:
                for other in processes:
                    other.kill()
                raise AssertionError(f"rank {rank} hangs")
            outcome = torch.load(Path(folder) / f"result-{rank}", weights_only=False)
            if isinstance(outcome, str) and outcome.startswith("Traceback"):
                raise AssertionError(f"rank {rank}: {outcome}")
            results.append(outcome)
        return results


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _rank(rank: int, ranks: int, folder: str, store: str, task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=datetime.timedelta(seconds=60))
    try:
        result = task(rank, *args)
    except BaseException:
        result = traceback.format_exc()
    torch.save(result, Path(folder) / f"result-{rank}.part")
    (Path(folder) / f"result-{rank}.part").rename(Path(folder) / f"result-{rank}")
    # No destroy_process_group: a test of a lost rank must not wait for it.


class Heard(logging.Handler):
    """Collects what Heeler says in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        warnings.simplefilter("error", heeler.HeelerWarning)  # then the logger has them
        logging.getLogger("heeler").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def freeze(seconds: float) -> None:
    """Stop this process, all its threads at once, and go on after so many seconds."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@functools.cache
def compile_rule() -> None:
    """Compile what `herd` needs, here, so that forked processes have it: a compiler is slower than a short timeout."""
    rule = make_rule("herd", 8, 4, seed=0, batch_size=2)
    for _ in range(2):
        rule.observe(rule.order, np.eye(8, 4, dtype=np.float32))
        rule.next_order()


def problem(examples: int, seed: int = 0) -> tuple[TensorDataset, nn.Module]:
    """Integer data and weights: every gradient is exact, whatever the batch."""
    rng = np.random.default_rng(seed)
    inputs = torch.from_numpy(rng.integers(-3, 4, (examples, FEATURES)).astype(np.float32))
    targets = torch.from_numpy(rng.integers(-3, 4, (examples, 1)).astype(np.float32))
    model = nn.Sequential(nn.Linear(FEATURES, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.from_numpy(rng.integers(-2, 3, tuple(parameter.shape)).astype(np.float32)))
    return TensorDataset(inputs, targets), model


def gradients(dataset: TensorDataset, model: nn.Module) -> np.ndarray:
    """(N, K) each example's gradient of half its squared error."""
    inputs, targets = dataset.tensors
    with torch.no_grad():
        residual = model(inputs) - targets
    return torch.cat([residual * inputs, residual], dim=1).numpy()


def walk(model: nn.Module, sampler: heeler.Sampler, loader: DataLoader, epochs: int) -> list[list[int]]:
    """Run epochs without changing the weights; the indices of each."""
    orders = []
    for _ in range(epochs):
        seen: list[int] = []
        for inputs, targets in loader:
            seen += sampler.indices[len(seen) : len(seen) + len(inputs)].tolist()
            ((model(inputs) - targets).square().sum() / 2).backward()
        orders.append(seen)
    return orders


def set_up(
    dataset: TensorDataset, model: nn.Module, **options: Any
) -> tuple[heeler.Sampler, heeler.Handle, DataLoader]:
    batch_size = options.setdefault("batch_size", 4)
    sampler = heeler.Sampler(dataset, **options)
    handle = heeler.attach(model, sampler, reduction="sum")
    return sampler, handle, DataLoader(dataset, batch_size=batch_size, sampler=sampler)
