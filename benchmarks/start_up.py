"""What Heeler's start takes: its import, the first sampler, `attach`, and the first solve, each in a new process.

    python -m benchmarks.start_up --turns 7

Milliseconds on one thread, medians with the least and the largest. PyTorch is loaded before the clock starts. `warm`:
bytecode and compiled loops are there, as from the second run on. `cold`: the loops are compiled first; bytecode is
there, since pip makes it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile

RUN = """
import json, time
import numpy as np, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
torch.optim.SGD(model.parameters(), 0.1)
rows = np.random.default_rng(0).standard_normal((7188, 1024)).astype(np.float16)
times = [time.perf_counter()]
import heeler
sampler = heeler.Sampler(len(rows), batch_size=64)
times.append(time.perf_counter())
heeler.attach(model, sampler)
times.append(time.perf_counter())
heeler.herding.solve_batches(rows, batch_size=64)
times.append(time.perf_counter())
heeler.herding.solve_batches(rows, batch_size=64)
times.append(time.perf_counter())
print(json.dumps([1e3 * (b - a) for a, b in zip(times, times[1:])]))
"""
PARTS = ("import and sampler", "attach", "first solve, 7,188 x 1,024", "second solve")


def measure(*, cold: bool) -> list[float]:
    """One process."""
    with tempfile.TemporaryDirectory() as empty:
        environment = {**os.environ, **({"HEELER_CACHE": empty} if cold else {})}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        found = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN], env=environment, check=True, capture_output=True, text=True
        )
    numbers: list[float] = json.loads(found.stdout)
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=7)
    given = parser.parse_args()
    measure(cold=False)
    kinds = {"warm": False, "cold": True}
    runs: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    for _ in range(given.turns):
        for kind, cold in kinds.items():
            runs[kind].append(measure(cold=cold))
    print("| | " + " | ".join(kinds) + " |\n|---|---|---|")
    for part, name in enumerate(PARTS):
        cells = []
        for kind in kinds:
            own = [run[part] for run in runs[kind]]
            cells.append(f"{statistics.median(own):.0f} ({min(own):.0f} to {max(own):.0f})")
        print(f"| {name}, ms | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
