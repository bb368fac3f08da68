"""Orders found on a GPU beside those of the CPU: seconds, balance, memory.

    python -m benchmarks.gpu_solves --out gpu-solves-h200.json
    python -m benchmarks.gpu_solves --of gpu-solves-h200.json       # the table

Both solve one table of seeded gradients in turns. Gradients have axes of unequal lengths, as those of networks have.
Balance is what the order leaves of the squares of steps and prefixes, over random orders' (`realized_balance`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.clock import machine
from benchmarks.clock_figures import markdown
from heeler.gpu.solver import order_on_device
from heeler.herding.batches import solve_batches
from heeler.herding.realized import realized_balance
from heeler.herding.validate import IntArray

SIZES = ((12_800, 1024, 64), (50_000, 1024, 1024), (1_000_000, 256, 64))
"""Examples, dimensions, batch size."""


def gradients(examples: int, dim: int) -> NDArray[np.float16]:
    rng = np.random.default_rng(0)
    rows = np.empty((examples, dim), np.float16)
    scale = (1 / np.sqrt(1 + np.arange(dim))).astype(np.float32)
    for part in np.array_split(rows, max(1, rows.size >> 24)):
        part[:] = rng.standard_normal(part.shape, np.float32) * scale + 0.1
    return rows


def measure(examples: int, dim: int, batch_size: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Medians over repeats, after one that does not count (Triton compiles its kernel there)."""
    rows, shards = gradients(examples, dim), np.array([0, examples])
    seen = np.ones(examples, bool)
    solvers: dict[str, Callable[[int], IntArray]] = {
        "gpu": lambda seed: order_on_device(rows, batch_size=batch_size, seed=seed, device=device).order,
        "cpu": lambda seed: solve_batches(rows, batch_size=batch_size, seed=seed).order,
    }
    seconds: dict[str, list[float]] = {name: [] for name in solvers}
    balances: dict[str, list[tuple[float, float]]] = {name: [] for name in solvers}
    first, peak = 0.0, 0
    for repeat in range(repeats + 1):
        for name, solver in solvers.items():
            if repeat == 0 and name == "cpu":
                continue
            _start_peak(device)
            begun = time.perf_counter()
            order = solver(repeat)
            taken = time.perf_counter() - begun
            if name == "gpu":
                peak = max(peak, _peak(device))
            if repeat == 0:
                first = taken
                continue
            seconds[name].append(taken)
            steps, prefixes = realized_balance(rows, order, batch_size=batch_size, shards=shards, seen=seen)
            balances[name].append((float(steps), float(prefixes)))
    found: dict[str, Any] = {"examples": examples, "dim": dim, "batch_size": batch_size, "first_gpu_seconds": first}
    found |= {"table_bytes": rows.nbytes, "peak_gpu_bytes": peak}
    for name in solvers:
        found |= {f"{name}_seconds": seconds[name], f"{name}_balance": balances[name]}
    return found


def _start_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def table(runs: list[dict[str, Any]]) -> str:
    head = ["examples × dimensions, batch", "GPU, s", "CPU, s", "first on GPU, s"]
    head += ["steps: GPU, CPU", "prefixes: GPU, CPU", "peak beyond the table"]
    rows = []
    for run in runs:
        line = [f"{run['examples']:,} × {run['dim']:,}, {run['batch_size']:,}"]
        line += [_spread(run[f"{name}_seconds"]) for name in ("gpu", "cpu")] + [f"{run['first_gpu_seconds']:.2f}"]
        for part in (0, 1):
            of = [statistics.median(each[part] for each in run[f"{name}_balance"]) for name in ("gpu", "cpu")]
            line.append(f"{of[0]:.3g}, {of[1]:.3g}")
        line.append(f"{(run['peak_gpu_bytes'] - run['table_bytes']) / 2**20:,.0f} MiB")
        rows.append(line)
    return markdown(head, rows)


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3g} ({min(seconds):.3g} to {max(seconds):.3g})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the examples")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--of", type=Path, help="print this file's table, and run nothing")
    given = parser.parse_args()
    if given.of is not None:
        print(table(json.loads(given.of.read_text())["runs"]))
        return
    device = torch.device(given.device)
    runs = []
    for examples, dim, batch_size in SIZES:
        runs.append(measure(int(examples * given.scale), dim, batch_size, device, given.repeats))
        if given.out is not None:
            given.out.write_text(json.dumps({**machine(device.type), "runs": runs}, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()
