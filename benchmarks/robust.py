"""What a robust rule adds to a step of DistributedDataParallel: real gloo ranks, plain DDP and every variant in turns.

python -m benchmarks.robust [--ranks 4] [--parameters 1000000] [--batch 64] [--rounds 60]

A step is forward, backward and optimizer. Plain DDP has its momentum of 0.9 in the optimizer, the variants have it in
the hook. The time of a step is the slowest rank's, from a barrier on; a ratio is of a step to the plain one of the same
round; medians and quartiles are over rounds. Four ranks are too few for Multi-Krum with f = 1, so the
vector rule is the geometric median; the weights of n × n numbers cost nothing beside the rest. "torch's all-reduce
hook" is the least that any hook in Python costs: `allreduce_hook`, which does what plain DDP does.
CPU time, of all threads, is the mean of the ranks: it does not grow when another program has the cores.
Bytes are counted, not measured: what one rank sends in a step, as ring collectives send it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import time
from typing import Any

import torch
import torch._dynamo  # which DDP imports: here once, not in every rank
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.coordination import run_ranks
from heeler import robust

SKETCH_DIM = 256
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "torch's all-reduce hook": None,
    "sketch": {"rule": "geometric-median", "distances": "sketch"},
    "exact": {"rule": "geometric-median", "distances": "exact"},
    "median": {"rule": "median"},
    "trimmed mean": {"rule": "trimmed-mean"},
}

parser = argparse.ArgumentParser()
parser.add_argument("--ranks", type=int, default=4)
parser.add_argument("--parameters", type=int, default=1_000_000)
parser.add_argument("--batch", type=int, default=64, help="examples per rank")
parser.add_argument("--rounds", type=int, default=60)


def network(parameters: int) -> nn.Module:
    """About so many parameters: 512 inputs, two hidden layers of w, 10 outputs."""
    width = max(1, round((-522 + (522**2 + 4 * parameters) ** 0.5) / 2))
    sizes = [nn.Linear(512, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
    return nn.Sequential(*sizes)


def steps(parameters: int, batch: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of every step of one rank, on the clock and of CPU time, per variant."""
    inputs, labels = torch.randn(batch, 512), torch.randint(0, 10, (batch,))
    loops = {}
    for name, settings in VARIANTS.items():
        torch.manual_seed(0)
        model = DistributedDataParallel(network(parameters))
        if name == "torch's all-reduce hook":
            model.register_comm_hook(None, allreduce_hook)
        if settings is not None:
            robust.install(model, f=1, momentum=0.9, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9 if settings is None else 0.0)
        loops[name] = model, optimizer
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for turn in range(rounds + 3):  # the first are for buckets, connections and memory
        for name, (model, optimizer) in loops.items():
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            if turn >= 3:
                taken[name].append((1e3 * (time.perf_counter() - started), 1e3 * (time.process_time() - cpu)))
    return taken


def bytes_sent(name: str, n: int, d: int) -> int:
    """By one rank in one step, of 4-byte floats (Gram matrices and distances: 8)."""
    pair = 2 * (n - 1) * d * 4 // n  # a ring's reduce-scatter and all-gather; all-to-all and all-gather send as much
    if VARIANTS[name] is None:
        return pair
    if name == "sketch":
        return pair + (n - 1) * SKETCH_DIM * 4
    return pair + 2 * (n - 1) * (8 * n if name == "exact" else 12)


def quartiles(values: list[float]) -> list[float]:
    return [round(value, 3) for value in statistics.quantiles(values, n=4)]


def ratios(own: list[float], plain: list[float]) -> list[float]:
    return quartiles([a / b for a, b in zip(own, plain, strict=True)])


def main() -> None:
    options = parser.parse_args()
    torch.set_num_threads(1)
    n, d = options.ranks, sum(p.numel() for p in network(options.parameters).parameters())
    load = os.getloadavg()[0]
    per_rank = run_ranks(n, lambda rank: steps(options.parameters, options.batch, options.rounds), timeout=1800.0)
    rounds = {name: list(zip(*(rank[name] for rank in per_rank), strict=True)) for name in VARIANTS}
    clock = {name: [max(wall for wall, _ in ranks) for ranks in of] for name, of in rounds.items()}
    cpu = {name: [statistics.mean(used for _, used in ranks) for ranks in of] for name, of in rounds.items()}
    lines = [
        {
            "variant": name,
            "ms": quartiles(clock[name]),
            "ratio": ratios(clock[name], clock["plain"]),
            "cpu_ms": quartiles(cpu[name]),
            "cpu_ratio": ratios(cpu[name], cpu["plain"]),
            "bytes_sent_per_rank": bytes_sent(name, n, d),
            "of_gathering_all": round(bytes_sent(name, n, d) / ((n - 1) * d * 4), 3),
        }
        for name in VARIANTS
    ]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    report = {
        "command": f"python -m benchmarks.robust --ranks {n} --parameters {options.parameters} "
        f"--batch {options.batch} --rounds {options.rounds}",
        "cores": os.cpu_count(),
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "parameters": d,
        "quartiles": "25%, median, 75% over rounds",
        "lines": lines,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
