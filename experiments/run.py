"""`python -m experiments.run --plan plan.json --out DIR --data DIR`: a plan, on a machine with PyTorch alone.

Needs neither typer nor rich nor matplotlib; tables and charts are made from the files afterwards, anywhere. A run that
fails is noted and the others go on; a run that is finished already is not repeated.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.folder import Folder
from experiments.plans import read_plan
from experiments.records import carry_out, is_finished, note_failure
from experiments.setup import Run

Say = Callable[[str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns how many runs failed."""
    parser = argparse.ArgumentParser(prog="python -m experiments.run", description="Carry out a plan of runs.")
    parser.add_argument("--plan", type=Path, required=True, help="JSON: see experiments.plans.read_plan")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON-lines file per run")
    parser.add_argument("--data", type=Path, help="data folder; else HEELER_DATA")
    parser.add_argument("--device", help="cpu or cuda, in place of what the plan says")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--minutes", type=float, help="start no run after this long")
    parser.add_argument("--list", action="store_true", help="say what would be run, and stop")
    given = parser.parse_args(arguments)
    runs = read_plan(given.plan)
    if given.device:
        runs = [run.but(device=given.device) for run in runs]
    todo = [run for run in runs if not is_finished(given.out, run)]
    _say(f"{len(runs)} runs, {len(runs) - len(todo)} finished before")
    if given.list:
        for run in runs:
            _say(run.key)
        return 0
    failed = run_plan(todo, given.data, given.out, jobs=given.jobs, minutes=given.minutes, say=_say)
    _say(f"{failed} runs failed" if failed else "all runs finished")
    return failed


def run_plan(
    runs: Sequence[Run], data: Path | None, out: Path, *, jobs: int = 1, minutes: float | None = None, say: Say
) -> int:
    """Carry out the runs; returns how many are not finished at the end."""
    deadline = time.time() + 60 * minutes if minutes else float("inf")
    out.mkdir(parents=True, exist_ok=True)
    if jobs <= 1:
        for run in runs:
            if time.time() < deadline:
                _attempt(run, data, out, say)
    else:
        _in_processes(runs, data, out, jobs, deadline)
    return sum(not is_finished(out, run) for run in runs)


def _attempt(run: Run, data: Path | None, out: Path, say: Say) -> None:
    started = time.perf_counter()
    try:
        result = carry_out(run, Folder(data), out)
    except Exception as error:  # one run's failure must not cost the others
        note_failure(run, out, error)
        say(f"FAILED {run.key}: {type(error).__name__}: {error}")
        return
    last = result.epochs[-1]
    loss = last.get("suboptimality", last["train_loss"])
    say(f"{run.key}: {loss} after {last['epoch']} epochs, {time.perf_counter() - started:.0f} s")


def _in_processes(runs: Sequence[Run], data: Path | None, out: Path, jobs: int, deadline: float) -> None:
    """Processes that take the next run when they are done with one, and keep loaded data from run to run.

    A process that dies takes only its current run with it.
    """
    import torch.multiprocessing as processes

    context = processes.get_context("spawn")  # a CUDA context does not survive a fork
    queue: Any = context.SimpleQueue()
    for run in runs:
        queue.put(run.to_json())
    workers = [
        context.Process(target=_work, args=(queue, str(data) if data else None, str(out), deadline))
        for _ in range(min(jobs, len(runs)))
    ]
    for _ in workers:
        queue.put(None)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def _work(queue: Any, data: str | None, out: str, deadline: float) -> None:
    import torch

    torch.set_num_threads(1)  # the processes share the machine's cores
    while (settings := queue.get()) is not None:
        if time.time() < deadline:
            _attempt(Run.from_json(settings), Path(data) if data else None, Path(out), _say)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
