"""Worlds of real processes, started as torchrun would start them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Forked from a server that has imported everything and run nothing: frameworks keep the state of one world per
# process, and a process in which autograd has started threads must not be forked.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        *("heeler.integrations.transformers", "heeler.integrations.lightning", "tensorboard", "pytest", __name__),
        *("sklearn.datasets"),  # which takes seconds to import
    ]
)


def in_world(
    ranks: int, task: Callable[..., Any], *args: Any, has_group: bool = True, timeout: float = 100.0
) -> list[Any]:
    """What `task(*args)` returns on every rank of a world of its own; where it `has_group`, that of all ranks."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
        environments = [_environment(rank, ranks, port) for rank in range(ranks)]
        store = f"file://{folder}/store" if has_group and ranks > 1 else None
        processes = [CONTEXT.Process(target=_rank, args=(e, folder, store, task, args)) for e in environments]
        probe.close()
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        for process in processes:
            process.kill()  # a rank that hangs
        outcomes = [Path(folder, str(rank)) for rank in range(ranks)]
        results = [pickle.loads(path.read_bytes()) if path.exists() else (None, "it died or hung") for path in outcomes]
    for rank, (_, error) in enumerate(results):
        assert error is None, f"rank {rank}: {error}"
    return [result for result, _ in results]


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    if ranks == 1:
        return {"RANK": "0"}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {
        "MASTER_ADDR": "localhost",
        "TORCHELASTIC_RUN_ID": "test",  # by this Lightning tells that it must not start the other ranks
    }


def _rank(
    environment: dict[str, str], folder: str, store: str | None, task: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    warnings.simplefilter("ignore")  # frameworks warn of their own doings, such as a loader without workers
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # loaders' workers, as usual
    rank = int(environment["RANK"])
    if len(environment) > 1:
        os.environ |= environment
    if store is not None:
        ranks, limit = int(environment["WORLD_SIZE"]), datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", store, rank=rank, world_size=ranks, timeout=limit)
    try:
        outcome = task(*args), None
    except BaseException:
        outcome = None, traceback.format_exc()
    Path(folder, str(rank)).write_bytes(pickle.dumps(outcome))
