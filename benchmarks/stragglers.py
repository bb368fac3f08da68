"""Stragglers: how many workers codes wait for, whether the report names a sleeper, and how well a time limit is kept.

    python -m benchmarks.stragglers thresholds > benchmarks/results/stragglers-thresholds.json
    python -m benchmarks.stragglers report > benchmarks/results/stragglers-report.json
    python -m benchmarks.stragglers limit > benchmarks/results/stragglers-limit.json
    python -m benchmarks.stragglers coded > benchmarks/results/stragglers-coded.json

`thresholds` is simulated. A worker takes one second per unit of data, and beyond that a stall of exponential length
that does not depend on its data. The others run real gloo processes, in which some ranks sleep.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.coordination import run_ranks
from experiments.gradient_codes import (
    DRAWS,
    assign_fractional,
    code_of,
    coupons,
    cyclic_code,
    decode,
    first_of_all,
    simulate,
)
from heeler.stragglers import CodedRunner, StepLimit, assign_bcc, watch

WORKERS, UNITS = 50, 10
"""The setting of the BCC paper: 50 workers and as many units of data; coded workers hold 10 of them."""
RUNS = 1000
STALLS = (1.0, 10.0, 100.0)
"""Mean seconds; a unit of data takes one."""


def thresholds() -> dict[str, Any]:
    """Workers waited for and seconds per step, by code, with standard errors."""
    batches = WORKERS // UNITS
    codes = {
        "uncoded": (1, float(WORKERS), [code_of(range(WORKERS))], 200),
        "cyclic": (UNITS, float(WORKERS - UNITS + 1), [cyclic_code(WORKERS, UNITS - 1, s) for s in range(5)], 200),
        "bcc": (UNITS, coupons(batches), [code_of(assign_bcc(WORKERS, batches, s)) for s in range(RUNS)], RUNS),
        "fractional": (UNITS, first_of_all(batches, UNITS), [code_of(assign_fractional(WORKERS, UNITS - 1))], RUNS),
    }
    lines = []
    for name, (load, theory, drawn, runs) in codes.items():
        waits = np.random.default_rng(0).standard_exponential((runs, WORKERS))
        found, _ = simulate(drawn, load + waits)
        seconds = {f"{stall:g}": float(simulate(drawn, load + stall * waits)[1].mean()) for stall in STALLS}
        error = float(found.std(ddof=1) / runs**0.5)
        lines.append({"code": name, "load": load, "runs": runs, "theory": theory, "threshold": float(found.mean()),
                      "standard_error": error, "seconds_by_mean_stall": seconds})  # fmt: skip
    growth = {f"best of {draws}": weights_of_answers(draws) for draws in (1, DRAWS)}
    return {"workers": WORKERS, "units": UNITS, "lines": lines, "cyclic_weights": growth}


def weights_of_answers(draws: int, seeds: int = 8, sets: int = 50) -> dict[str, float]:
    """Σ |a_i| / n of a cyclic code's `decode`: how much rounding errors of the answers grow. Median and largest."""
    codes = [cyclic_code(WORKERS, UNITS - 1, seed, draws) for seed in range(seeds)]
    rng = np.random.default_rng(0)
    found = []
    for code in codes:
        for _ in range(sets):
            solved = decode(code, rng.permutation(WORKERS)[: WORKERS - UNITS + 1])
            assert solved is not None
            found.append(float(np.abs(solved).sum()) / WORKERS)
    return {"median": statistics.median(found), "largest": max(found)}


def report(runs: int = 100, ranks: int = 4, nap: float = 0.2, steps: int = 11) -> dict[str, Any]:
    """In every run one rank, drawn at random, sleeps in every step, before its forward or after it."""
    drawn = np.random.default_rng(0).integers(0, ranks, runs).tolist()

    def role(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        named, asked, whole = [], [], []
        for run, slow in enumerate(drawn):
            seen = watch(model, optimizer)
            for _ in range(steps):
                started = time.perf_counter()
                time.sleep(nap if rank == slow and run % 2 else 0)
                loss = model(torch.ones(16, 64)).square().mean()
                time.sleep(nap if rank == slow and not run % 2 else 0)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                whole.append(time.perf_counter() - started)
            started = time.perf_counter()
            named.append(seen.report().stragglers)
            asked.append(time.perf_counter() - started)
            seen.close()
        return {"named": named, "report_ms": 1e3 * statistics.median(asked), "step_ms": 1e3 * statistics.median(whole)}

    found = run_ranks(ranks, role, timeout=60 + 2 * runs * steps * nap)
    return {
        "ranks": ranks,
        "runs": runs,
        "steps": steps,
        "sleep_ms": 1e3 * nap,
        "named_right": sum(all(f["named"][run] == [drawn[run]] for f in found) for run in range(runs)),
        "whole_step_ms_by_rank": [f["step_ms"] for f in found],
        "report_ms_by_rank": [f["report_ms"] for f in found],
        "hooks_us_per_step": hooks(),
    }


def hooks(turns: int = 30, steps: int = 200) -> float:
    """What a watch adds to a step, in microseconds: medians of turns with it and without, in turns."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.ones(1, 4)
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(turns):
        for watched in times:
            seen = watch(model, optimizer) if watched else None
            started = time.thread_time()
            for _ in range(steps):
                model(x).sum().backward()
                optimizer.step()
            times[watched].append((time.thread_time() - started) / steps)
            if seen is not None:
                seen.close()
    return 1e6 * (statistics.median(times[True]) - statistics.median(times[False]))


def limit(seconds: float = 0.3, steps: int = 40, ranks: int = 4) -> dict[str, Any]:
    """16 micro-batches per step; the slow ranks take 50 ms for each, the others 2 ms. Without a limit: 0.8 s."""

    def role(rank: int, slow: int, bound: float, steps: int) -> dict[str, Any]:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        bounded = StepLimit(model, bound)
        times = []
        for step in range(steps + 1):
            started = time.perf_counter()
            for x in bounded.parts(torch.ones(16, 8), 1):
                model(x).sum().backward()
                time.sleep(0.05 if rank < slow else 0.002)
            bounded.reduce()
            optimizer.step()
            optimizer.zero_grad()
            if step:  # the first one warms up
                times.append(time.perf_counter() - started)
        return {"times": times, "missed": bounded.metrics()["share_missed_by_all"]}

    lines = []
    for slow in (0, 1, 2, 3):
        for bound, count in ((float("inf"), 8), (seconds, steps)):
            found = run_ranks(ranks, lambda r, s=slow, b=bound, n=count: role(r, s, b, n), timeout=300)  # type: ignore[misc]
            times = np.array([f["times"] for f in found]).max(axis=0)
            lines.append({
                "slow_ranks": slow, "limit": None if bound == float("inf") else bound, "steps": count,
                "median": float(np.median(times)), "p95": float(np.quantile(times, 0.95)),
                "largest": float(times.max()), "share_missed": found[0]["missed"],
            })  # fmt: skip
    return {"ranks": ranks, "lines": lines}


def coded(workers: int = 6, nap: float = 0.2, steps: int = 25) -> dict[str, Any]:
    """Six workers of which some sleep in every step. Batches' gradients themselves take no time here."""
    assignments = {
        "uncoded": np.arange(workers),
        "bcc": assign_bcc(workers, 2),
        "fractional": assign_fractional(workers, 2),
    }

    def role(rank: int, name: str, sleepers: int) -> dict[str, Any] | None:
        torch.manual_seed(0)
        model = nn.Linear(1000, 1)
        runner = CodedRunner(model, assignments[name], timeout=60)
        if rank == 0:
            found = [runner.gather() for _ in range(steps)]
            runner.close()
            seconds = [g.seconds for g in found]
            return {
                "code": name, "sleepers": sleepers, "heard": statistics.mean(len(g.heard) for g in found),
                "median": statistics.median(seconds), "mean": statistics.mean(seconds),
                "late": sum(g.late for g in found),
            }  # fmt: skip

        def loss_of(batch: int, step: int) -> torch.Tensor:
            time.sleep(nap if rank > workers - sleepers else 0.0)
            return model(torch.ones(8, 1000)).sum()

        runner.serve(loss_of)
        return None

    lines = []
    for name in assignments:
        for sleepers in (0, 1, 2, 3):
            task: Callable[[int], Any] = lambda r, n=name, s=sleepers: role(r, n, s)  # type: ignore[misc]  # noqa: E731
            lines.append(run_ranks(workers + 1, task, timeout=120)[0])
    return {"workers": workers, "sleep": nap, "steps": steps, "lines": lines}


MEASURES: dict[str, Callable[[], dict[str, Any]]] = {
    "thresholds": thresholds,
    "report": report,
    "limit": limit,
    "coded": coded,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=MEASURES)
    name = parser.parse_args().measure
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # imports what every forked rank would have to import
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    about = {
        "command": f"python -m benchmarks.stragglers {name}",
        "machine": "2 cores of a shared AMD EPYC",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "torch": torch.__version__,
    }
    print(json.dumps({**about, **MEASURES[name]()}, indent=1))


if __name__ == "__main__":
    main()
