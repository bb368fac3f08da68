"""Worlds of real processes, started as torchrun would start them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
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
    ["heeler.integrations.transformers", "heeler.integrations.lightning", "tensorboard", "pytest", __name__]
)


def in_world(ranks: int, task: Callable[..., Any], *args: Any, timeout: float = 100.0) -> list[Any]:
    """What `task(*args)` returns on every rank of a world of its own."""
    with tempfile.TemporaryDirectory() as folder:
        processes = [CONTEXT.Process(target=_rank, args=(r, ranks, folder, task, args)) for r in range(ranks)]
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


def _rank(rank: int, ranks: int, folder: str, task: Callable[..., Any], args: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")  # frameworks warn of their own doings, such as a loader without workers
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # loaders' workers, as usual
    if ranks > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
        limit = datetime.timedelta(seconds=60)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks, timeout=limit)
    try:
        outcome = task(*args), None
    except BaseException:
        outcome = None, traceback.format_exc()
    Path(folder, str(rank)).write_bytes(pickle.dumps(outcome))
