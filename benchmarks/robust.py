"""What a robust rule adds to a step of DistributedDataParallel: real gloo ranks, plain DDP and every variant in turns.

python -m benchmarks.robust [--ranks 4] [--parameters 1000000] [--rounds 60] > benchmarks/results/robust-cost.json

A step is forward, backward and optimizer. Plain DDP has its momentum of 0.9 in the optimizer, the variants have it in
the hook. The time of a step is the slowest rank's, from a barrier on; a ratio is of a step to the plain one of the same
round; medians and quartiles are over rounds. Four ranks are too few for Multi-Krum with f = 1, so the
vector rule is the geometric median; the weights of n × n numbers cost nothing beside the rest.
Bytes are counted, not measured: what one rank sends in a step, as ring collectives send it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from typing import Any

import torch
import torch._dynamo  # which DDP imports: here once, not in every rank
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.coordination import run_ranks
from heeler import robust

SKETCH_DIM = 256
BATCH = 64
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "sketch": {"rule": "geometric-median", "distances": "sketch"},
    "exact": {"rule": "geometric-median", "distances": "exact"},
    "median": {"rule": "median"},
    "trimmed mean": {"rule": "trimmed-mean"},
}

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=4)
parser.add_argument("--parameters", type=int, default=1_000_000)
parser.add_argument("--rounds", type=int, default=60)


def network(parameters: int) -> nn.Module:
    """About so many parameters: 512 inputs, two hidden layers of w, 10 outputs."""
    width = max(1, round((-522 + (522**2 + 4 * parameters) ** 0.5) / 2))
    sizes = [nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*sizes)


def steps(rank: int, parameters: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of every step of one rank, per variant."""
    inputs, labels = torch.randn(BATCH, 512), torch.randint(0, 10, (BATCH,))
    loops = {}
    for name, settings in VARIANTS.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(network(parameters))
        if settings is not None:
            robust.install(model, f=1, momentum=0.9, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9 if settings is None else 0.0)
        loops[name] = model, optimizer
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for turn in range(rounds + 3):  # the first are for buckets, connections and memory
        for name, (model, optimizer) in loops.items():
            dist.barrier()
            started = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def bytes_sent(name: str, n: int, d: int) -> int:
    """By one rank in one step, of 4-byte floats (Gram matrices and distances: 8)."""
    pair = 2 * (n - 1) * d * 4 // n  # a ring's reduce-scatter and all-gather; all-to-all and all-gather send as much
    if name == "plain":
        return pair
    if name == "sketch":
        return pair + (n - 1) * SKETCH_DIM * 4
    return pair + 2 * (n - 1) * (8 * n if name == "exact" else 12)


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    options = parser.parse_args()
    torch.set_num_threads(1)
    n, d = options.ranks, sum(p.numel() for p in network(options.parameters).parameters())
    per_rank = run_ranks(n, lambda rank: steps(rank, options.parameters, options.rounds), timeout=1800.0)
    slowest = {name: [max(of) for of in zip(*(rank[name] for rank in per_rank), strict=True)] for name in VARIANTS}
    lines = [
        {
            "variant": name,
            "ms": quartiles([1000 * value for value in slowest[name]]),
            "ratio": quartiles([own / plain for own, plain in zip(slowest[name], slowest["plain"], strict=True)]),
            "bytes_sent_per_rank": bytes_sent(name, n, d),
            "of_gathering_all": round(bytes_sent(name, n, d) / ((n - 1) * d * 4), 3),
        }
        for name in VARIANTS
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "command": f"python -m benchmarks.robust --ranks {n} --parameters {options.parameters} "
        f"--rounds {options.rounds}",
        "machine": "2 cores of a shared AMD EPYC, one thread per rank",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "parameters": d,
        "batch_per_rank": BATCH,
        "quartiles": "25%, median, 75% over rounds",
        "lines": lines,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
