"""Train on scikit-learn's digits with one slow rank: find out which it is, then bound the time of a step.

torchrun --nproc-per-node 4 examples/slow_rank.py [--slow 2] [--sleep 0.02] [--limit 0.08] [--picture FILE] [--tiny]

The slow rank sleeps in every micro-batch. In the first epochs all wait for it, and the report names it. In the epochs
after that every rank stops taking micro-batches at the limit.
"""

import argparse
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.stragglers import StepLimit, watch

parser = argparse.ArgumentParser()
parser.add_argument("--slow", type=int, default=2, help="the slow rank")
parser.add_argument("--sleep", type=float, default=0.02, help="seconds that it sleeps in every micro-batch")
parser.add_argument("--limit", type=float, default=0.08, help="seconds")
parser.add_argument("--epochs", type=int, default=6, help="without the limit, and as many with it")
parser.add_argument("--picture", type=Path)
parser.add_argument("--tiny", action="store_true", help="200 examples, 2 epochs of each")
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
rank = dist.get_rank()
pixels, labels = load_digits(return_X_y=True)
inputs, targets = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels)
size = 200 if options.tiny else 1500
train = TensorDataset(inputs[:size], targets[:size])

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))  # not wrapped: the limit reduces gradients
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = heeler.Sampler(train, batch_size=16)
handle = heeler.attach(model, sampler, reduction="sum")  # losses of micro-batches are sums
loader = DataLoader(train, batch_size=16, sampler=sampler)


def epoch(limit: StepLimit) -> float:
    """One epoch, and the seconds of a step."""
    started = time.perf_counter()
    for batch in loader:
        for x, y in limit.parts(batch, size=2):
            nn.functional.cross_entropy(model(x), y, reduction="sum").backward()
            time.sleep(options.sleep if rank == options.slow else 0)
        limit.reduce()
        optimizer.step()
        optimizer.zero_grad()
    return (time.perf_counter() - started) / len(loader)


seen = watch(model, optimizer)
for seconds in (math.inf, options.limit):
    limit = StepLimit(model, seconds, handle=handle)
    steps = [epoch(limit) for _ in range(2 if options.tiny else options.epochs)]
    report = seen.report()  # every rank
    with torch.no_grad(), handle.paused():
        loss = nn.functional.cross_entropy(model(train.tensors[0]), train.tensors[1]).item()
    if rank == 0:
        print(f"limit {seconds:g} s: {1e3 * sum(steps) / len(steps):.0f} ms per step, train loss {loss:.3f}, "
              f"{limit.metrics()['share_missed_by_all']:.0%} of the examples not reached")  # fmt: skip
        print(report)
        if options.picture is not None and seconds == math.inf:
            report.picture(options.picture)
dist.destroy_process_group()
