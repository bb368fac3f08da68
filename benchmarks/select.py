"""What a selection costs: seconds, ratio to one read of the table, peak memory; and how its error falls with k."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import heeler
from benchmarks.solver import gather_sum
from heeler.herding.validate import Array

if TYPE_CHECKING:
    from experiments.folder import Folder

METHODS = ("halve", "match", "facility")
PATIENCE = 20.0


def bench_select(
    *,
    examples: int = 1_000_000,
    dim: int = 256,
    fraction: float = 0.1,
    methods: Sequence[str] = METHODS,
    dtype: str = "float32",
    seed: int = 0,
    repeats: int = 5,
) -> dict[str, Any]:
    """Each method on a mixture, after a run on a small table to compile: the fastest of up to `repeats` runs.

    Other jobs on a machine only add to the clock, so the least of some runs says most; no more runs begin once they
    have taken PATIENCE seconds.

    Returns:
        read_seconds, of reading the rows once in file order and adding them up, load (the machine's, over a minute
        before and after), and per method seconds, cpu_seconds (of all threads), all_seconds (of every run), ratio of
        the seconds to that read, peak_memory_ratio (one plus what the process came to hold during it beyond what it
        held before, in tables; memory that an earlier method has had is not seen again, so the most frugal goes first),
        error and mmd and those of random subsets, and the sum of the weights. The seconds are those of the whole call:
        checking and the comparison with random subsets too.
    """
    small, _ = mixture(2048, dim, dtype, seed)
    for method in methods:
        heeler.select(small, 0.1, method)
    gather_sum(small, np.arange(len(small)))
    table, _ = mixture(examples, dim, dtype, seed)
    load = os.getloadavg()[0]
    read = min(_clocked(lambda: gather_sum(table, np.arange(examples)))[0] for _ in range(repeats))
    found: dict[str, Any] = {}
    for method in methods:
        before = peak_bytes()
        runs: list[tuple[float, float, Any]] = []
        while len(runs) < repeats and (not runs or sum(clock for clock, *_ in runs) < PATIENCE):
            runs.append(_clocked(partial(heeler.select, table, fraction, method, seed=seed)))
        seconds, working, chosen = min(runs, key=lambda run: run[0])
        found[method] = {
            "seconds": seconds,
            "cpu_seconds": working,
            "all_seconds": [clock for clock, *_ in runs],
            "ratio": seconds / read,
            "peak_memory_ratio": 1 + (peak_bytes() - before) / table.nbytes,
            **measures(chosen),
        }
    settings = {"examples": examples, "dim": dim, "fraction": fraction, "dtype": dtype, "seed": seed}
    return {**settings, "load": [load, os.getloadavg()[0]], "read_seconds": read, "methods": found}


def _clocked(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """(seconds on the clock, seconds of the processor, what came of it)"""
    start, working = time.perf_counter(), time.process_time()
    result = work()
    return time.perf_counter() - start, time.process_time() - working, result


def slopes(table: Array, methods: Sequence[str], halvings: Sequence[int], seeds: int) -> dict[str, Any]:
    """error and mmd of k = N / 2^m for each m of `halvings`, geometric means over seeds, and their slopes over k.

    slope: of log error over log k, by least squares; random subsets have −½, the theory of balancing −1.
    """
    from experiments.subset_methods import select as choose

    sizes = [len(table) >> m for m in halvings]
    out: dict[str, Any] = {"sizes": sizes}
    for method in methods:
        found = [[choose(table, k, method, seed=seed) for seed in range(seeds)] for k in sizes]
        for name in ("error", "mmd"):
            values = np.array([[getattr(one, name) for one in own] for own in found])
            means = np.exp(np.log(values).mean(axis=1))
            slope = float(np.polyfit(np.log(sizes), np.log(means), 1)[0])
            out.setdefault(method, {})[name] = {"values": means.tolist(), "slope": slope}
    return out


def slopes_text(found: dict[str, Any]) -> str:
    """Markdown of {table's name: `slopes`}: a row per method and measure, a column per table."""
    lines = ["| | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for method in dict.fromkeys(name for own in found.values() for name in own if name != "sizes"):
        for measure in ("error", "mmd"):
            cells = [f"{own[method][measure]['slope']:.2f}" if method in own else "" for own in found.values()]
            lines.append(f"| `{method}`, {measure} | " + " | ".join(cells).replace("-", "−") + " |")
    return "\n".join(lines)


def measures(chosen: heeler.Selection) -> dict[str, Any]:
    return {
        "chosen": len(chosen),
        "weights_sum": float(chosen.weights.sum()),
        "error": chosen.error,
        "mmd": chosen.mmd,
        "random_error": chosen.random_error._asdict(),
        "random_mmd": chosen.random_mmd._asdict(),
    }


def mixture(examples: int, dim: int, dtype: str, seed: int, classes: int = 10) -> tuple[Array, Array]:
    """(N, K) rows around ten unequal centres whose sum is not zero, and their (N,) classes; made a part at a time."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((classes, dim)).astype(np.float32)
    labels = rng.integers(0, classes, examples)
    table = np.empty((examples, dim), dtype)
    for rows in np.array_split(np.arange(examples), max(examples * dim // 2**22, 1)):
        table[rows[0] : rows[-1] + 1] = centres[labels[rows]] + rng.standard_normal((rows.size, dim), np.float32)
    return table, labels


def digits_table(epochs: int = 2, seed: int = 0) -> Array:
    """(1536, 650) exact gradients of softmax regression on digits, as some epochs leave them behind."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from experiments.folder import Folder
    from experiments.tasks.digits import load_digits

    x, y = load_digits(Folder()).train
    torch.manual_seed(seed)
    model = nn.Linear(64, 10)
    sampler = heeler.Sampler(len(x), batch_size=16, seed=seed)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(epochs):
        for inputs, target in loader:
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    table = handle.table
    assert table is not None
    return table.sketches(np.arange(len(x)))


def task_table(task: str, folder: Folder, epochs: int, **changes: Any) -> Array:
    """(N, K) the table that some epochs of an experiment's task leave behind; changes: settings of `Run`."""
    from experiments.subsets import Setting, left_behind
    from experiments.tasks import get_task
    from experiments.tasks.base import settings

    return left_behind(Setting(settings(get_task(task), "herd", **changes), warm_up=epochs), folder, seed=0)


def mortgages_table(folder: Folder) -> Array:
    """(8192, 19) exact gradients of logistic regression after an epoch."""
    return task_table("hmda", folder, 1, options={"limit": 9103})  # a tenth is for testing


def head_table(folder: Folder, dim: int | None = None) -> Array:
    """Gradients of the last layer of a LeNet that had three epochs of 8,192 CIFAR-10 images: (8192, 850), or sketches
    of `dim` dimensions."""
    run = {"layers": "name:12", "dim": dim, "lr": 0.02, "batch_size": 64, "workers": 1, "shards": "global"}
    return task_table("cifar10", folder, 3, options={"limit": 8192}, **run)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
