"""`python -m benchmarks.hmda`: many workers on the mortgage applications, in real processes or simulated in one.

Logistic regression, whose least objective is known, so that a run is judged by its distance from it: f(w) − f*.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import heeler
from benchmarks.coordination import run_ranks
from experiments.folder import Folder
from experiments.simulate import SimulatedWorkers
from experiments.tasks.base import Examples
from experiments.tasks.hmda import Hmda
from experiments.tasks.linear import least_objective

RULES = ("random", "id-grab", "cd-grab", "herd")
COLUMNS = {"county": 8, "tract": 9}
"""Where what shards can be sorted by lies among the features, besides the label."""
MOMENTUM = 0.9


def load(data: Path | None, step: int, sort: str) -> Examples:
    """Whole steps of all applications, standardised, in random order or sorted, so that the shards differ."""
    loaded = Hmda().load(Folder(data), {})
    x, y = (
        torch.cat(parts)[: sum(map(len, parts)) // step * step] for parts in zip(loaded.train, loaded.test, strict=True)
    )
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-12)
    if sort != "none":
        by = torch.argsort(y if sort == "label" else x[:, COLUMNS[sort]], stable=True)
        x, y = x[by], y[by]
    return Examples((x, y), (x[:0], y[:0]))


def simulated(
    examples: Examples, rule: str, seed: int, workers: int, batch: int, lr: float, epochs: int
) -> list[float]:
    """Mean training loss after every epoch; worker j owns the j-th stretch of the examples."""
    sampler = SimulatedWorkers(len(examples), batch_size=batch, order=rule, workers=workers, shards="local", seed=seed)
    return _train(_model(examples), sampler, examples.train, examples, lr, epochs, workers * batch)


def in_processes(
    examples: Examples, rule: str, seed: int, workers: int, batch: int, lr: float, epochs: int
) -> list[float]:
    """The same with DDP over gloo: every rank has a `heeler.Sampler` over its own shard and reads nothing else."""

    def rank_(rank: int) -> list[float]:
        size = len(examples) // workers
        own = tuple(tensor[rank * size : (rank + 1) * size] for tensor in examples.train)
        model = nn.parallel.DistributedDataParallel(_model(examples))
        sampler = heeler.Sampler(size, batch_size=batch, order=rule, seed=seed, shards="local")
        return _train(model, sampler, own, examples, lr, epochs, batch)

    curves: list[list[float]] = run_ranks(workers, rank_, timeout=1200.0)
    return curves[0]


def _model(examples: Examples) -> nn.Linear:
    model = Hmda().model(examples, {})
    assert isinstance(model, nn.Linear)
    return model


def _train(
    model: nn.Module,
    sampler: heeler.Sampler,
    own: tuple[Tensor, ...],
    examples: Examples,
    lr: float,
    epochs: int,
    step: int,
) -> list[float]:
    task, (x, y) = Hmda(), own
    # A row of 19 numbers is shorter than a sketch of it would be.
    handle = heeler.attach(model, sampler, exact=True) if sampler.session.rule.needs_vectors else None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=MOMENTUM)
    losses = []
    for _ in range(epochs):
        drawn = iter(sampler)
        while rows := list(islice(drawn, step)):
            picked = torch.tensor(rows)
            optimizer.zero_grad()
            task.losses(model, x[picked], y[picked]).mean().backward()
            optimizer.step()
        if handle is not None:
            handle.session.drain()
        losses.append(task.mean_loss(model, examples.train))
    return losses


def measure_hmda(
    *,
    data: Path | None = None,
    rules: Sequence[str] = RULES,
    seeds: int = 2,
    workers: int = 4,
    batch: int = 16,
    lr: float = 5e-3,
    epochs: int = 5,
    sort: str = "none",
    processes: bool = False,
    say: Any = lambda line: None,
) -> dict[str, Any]:
    """Sub-optimality after every epoch, of every rule and seed, and the ratios between them."""
    examples = load(data, workers * batch, sort)
    least = least_objective(examples, 2, 0.0)
    curves: dict[str, list[list[float]]] = {rule: [] for rule in rules}
    seconds: dict[str, list[float]] = {rule: [] for rule in rules}
    for seed in range(seeds):
        for rule in rules:
            started = time.perf_counter()
            losses = (in_processes if processes else simulated)(examples, rule, seed, workers, batch, lr, epochs)
            seconds[rule].append(round(time.perf_counter() - started, 2))
            curves[rule].append([loss - least for loss in losses])
            say(f"{rule} seed {seed}: {' '.join(f'{v:.2e}' for v in curves[rule][-1])} ({seconds[rule][-1]:.0f} s)")
    last = {rule: statistics.mean(curve[-1] for curve in of) for rule, of in curves.items()}
    return {
        "workers": workers,
        "batch": batch,
        "lr": lr,
        "momentum": MOMENTUM,
        "epochs": epochs,
        "seeds": seeds,
        "examples": len(examples),
        "shards": "mixed" if sort == "none" else f"sorted by {sort}",
        "how": "gloo processes under DDP" if processes else "workers simulated in one process",
        "least_objective": least,
        "suboptimality": curves,
        "mean_after_last_epoch": last,
        "share_of_random": {rule: value / last["random"] for rule, value in last.items()} if "random" in last else {},
        "herd_over_cd_grab": last["herd"] / last["cd-grab"] if {"herd", "cd-grab"} <= last.keys() else None,
        "seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: one JSON object on standard output, a line per run on standard error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hmda", description=__doc__)
    parser.add_argument("--data", type=Path, help="data folder; else HEELER_DATA")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="examples of one worker in a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--sort", choices=["none", "label", *COLUMNS], default="none", help="what makes shards differ")
    parser.add_argument("--processes", action="store_true", help="a real process for every worker")
    given = vars(parser.parse_args(arguments))
    given["rules"] = tuple(given["rules"].split(","))
    torch.set_num_threads(1)
    print(json.dumps(measure_hmda(**given, say=lambda line: print(line, file=sys.stderr, flush=True))))


if __name__ == "__main__":
    main()
