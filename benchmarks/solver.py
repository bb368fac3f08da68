"""What solves and a balance sweep cost against the physical floor: reading the rows once and adding them up."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from heeler.herding import Solution, balance_sweep, solve
from heeler.herding.batches import solve_batches
from heeler.herding.validate import Array
from heeler.native.loops import Rows, group_sums

DTYPES = ("float16", "float32")


def bench_solver(
    *,
    examples: int = 1_000_000,
    dim: int = 256,
    dtype: str = "float16",
    sweeps: int = 10,
    batch_size: int = 64,
    repeats: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Medians over `repeats` runs, floor, sweep and solves taken in turn so that a noisy machine is unkind to all.

    Returns:
        pass_seconds (of a sweep), gather_sum_seconds and their ratio; solve_seconds of one solve of at most `sweeps`,
        its ratio to the floor and solve_passes, the sweeps it made; batches_seconds of one `solve_batches`, what `herd`
        does with batches of `batch_size`, batches_ratio to the floor, batches_rounds of exchanges it made and
        batches_left, the share of the steps' squared sums that is left; peak_memory_ratio, one plus what the process
        held at most during sweeps and solves beyond what it held before (the table and its order), in tables, and
        batches_peak_memory_ratio of `solve_batches` too, which is measured after the others.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if min(examples, dim, sweeps, batch_size, repeats) < 1:
        raise ValueError("examples, dim, sweeps, batch_size and repeats must each be at least 1")
    table, order = _table(examples, dim, dtype, seed)
    _run_once(dtype)
    before = _peak_bytes()
    solutions: list[Solution] = []
    jobs: list[Callable[[], Any]] = [
        lambda: gather_sum(table, order),
        lambda: balance_sweep(table, order),
        lambda: solutions.append(solve(table, order, sweeps=sweeps, seed=seed)),
    ]
    peaks = [before]
    jobs += [
        lambda: peaks.append(_peak_bytes()),
        lambda: solutions.append(solve_batches(table, batch_size=batch_size, seed=seed)),
    ]
    gather, walk, whole, _, batches = _interleaved(jobs, repeats)
    floor, one_sweep, solving = statistics.median(gather), statistics.median(walk), statistics.median(whole)
    by_batches = statistics.median(batches)
    return {
        "pass_seconds": one_sweep,
        "gather_sum_seconds": floor,
        "ratio": one_sweep / floor,
        "solve_seconds": solving,
        "solve_ratio": solving / floor,
        "solve_passes": solutions[0].sweeps,
        "batches_seconds": by_batches,
        "batches_ratio": by_batches / floor,
        "batches_rounds": solutions[1].sweeps,
        "batches_left": solutions[1].unbalanced,
        "peak_memory_ratio": 1 + (peaks[1] - before) / table.nbytes,  # in the first turn: later ones need no more
        "batches_peak_memory_ratio": 1 + (_peak_bytes() - before) / table.nbytes,
        "pass_seconds_range": [min(walk), max(walk)],
        "gather_sum_seconds_range": [min(gather), max(gather)],
        "solve_seconds_range": [min(whole), max(whole)],
        "batches_seconds_range": [min(batches), max(batches)],
        "examples": examples,
        "dim": dim,
        "dtype": dtype,
        "batch_size": batch_size,
    }


def gather_sum(table: Array, order: Array) -> Array:
    """(K,) Σ of the rows, read in the given order, compiled as the sweeps are; float32 sums, the cheapest."""
    return group_sums(Rows(table), order, None, np.array([0, order.size]), np.zeros((1, table.shape[1])))[0]


def _table(examples: int, dim: int, dtype: str, seed: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(seed)
    table = np.empty((examples, dim), dtype)
    for rows in np.array_split(table, max(examples * dim // 2**22, 1)):
        rows[:] = rng.standard_normal(rows.shape, np.float32)
    return table, rng.permutation(examples)


def _run_once(dtype: str) -> None:
    """Compile, on a table of no size."""
    table, order = _table(4, 4, dtype, 0)
    gather_sum(table, order)
    balance_sweep(table, order)
    solve(table, order)
    solve_batches(_table(64, 4, dtype, 0)[0], batch_size=4)


def _interleaved(jobs: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each job, run in turn `repeats` times."""
    seconds: list[list[float]] = [[] for _ in jobs]
    for _ in range(repeats):
        for job, taken in zip(jobs, seconds, strict=True):
            start = time.perf_counter()
            job()
            taken.append(time.perf_counter() - start)
    return seconds


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
