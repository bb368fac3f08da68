"""`python -m experiments.run --plan plan.json --out DIR --data DIR`: a plan, on a machine with PyTorch alone.

Needs neither typer nor rich nor matplotlib; tables and charts are made from the files afterwards, anywhere. A run that
fails is noted and the others go on; a run that is finished already is not repeated. With `--bundle FILE` every finished
run is also appended to one small file, which a kill does not harm, and runs that are in it already are not repeated
either. Of a plan with grids of rates, the runs that follow from a grid begin as soon as it is done.

Many small runs share a GPU well under NVIDIA's MPS:

    export CUDA_MPS_PIPE_DIRECTORY=/tmp/mps CUDA_MPS_LOG_DIRECTORY=/tmp/mps-log
    mkdir -p /tmp/mps /tmp/mps-log && nvidia-cuda-mps-control -d
    python -m experiments.run --plan PLAN --out runs --bundle runs.bundle --jobs 14 --minutes 8
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from experiments.crew import Say, in_processes
from experiments.folder import Folder
from experiments.packed import add_to_bundle, read_bundle
from experiments.plans import read_later, read_plan
from experiments.records import Result, carry_out, is_finished, note_failure, read_result, result_path
from experiments.setup import Run

More = Callable[[Sequence[Result], set[str]], list[Run]]
"""From the results so far, and the keys of what failed, to the runs that follow from them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns how many runs are not finished."""
    parser = argparse.ArgumentParser(prog="python -m experiments.run", description="Carry out a plan of runs.")
    parser.add_argument("--plan", type=Path, required=True, help="JSON: see experiments.plans.read_plan")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON-lines file per run")
    parser.add_argument("--bundle", type=Path, help="one file that every finished run is appended to, NAME.bundle")
    parser.add_argument("--data", type=Path, help="data folder; else HEELER_DATA")
    parser.add_argument("--device", help="cpu or cuda, in place of what the plan says")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in a process of its own")
    parser.add_argument("--minutes", type=float, help="start no run after this long")
    parser.add_argument("--list", action="store_true", help="say what would be run, and stop")
    given = parser.parse_args(arguments)
    runs = read_plan(given.plan, given.device)
    if given.list:
        for run in runs:
            _say(run.key)
        return 0
    place = Place(given.data, given.out, given.bundle)
    _say(f"{len(runs)} runs, {sum(place.finished(run) is not None for run in runs)} finished before")
    unfinished = run_plan(
        runs,
        place,
        jobs=given.jobs,
        minutes=given.minutes,
        more=lambda results, failed: read_later(given.plan, results, given.device, failed=failed),
        say=_say,
    )
    _say(f"{unfinished} runs failed or were not begun" if unfinished else "all runs finished")
    return unfinished


class Place:
    """Where data come from and results go to."""

    def __init__(self, data: Path | None, out: Path, bundle: Path | None = None) -> None:
        self.data, self.out, self.bundle = data, out, bundle
        self._bundled = {r.run.key: r for r in read_bundle(bundle)} if bundle and bundle.is_file() else {}
        out.mkdir(parents=True, exist_ok=True)
        if bundle:
            bundle.parent.mkdir(parents=True, exist_ok=True)

    def finished(self, run: Run) -> Result | None:
        """The run's result, if it is there."""
        if is_finished(self.out, run):
            return read_result(result_path(self.out, run))
        return self._bundled.get(run.key)

    def attempt(self, run: Run, say: Say) -> None:
        """Carry the run out, or note why that was not possible."""
        started = time.perf_counter()
        try:
            result = carry_out(run, Folder(self.data), self.out)
        except Exception as error:  # one run's failure must not cost the others
            note_failure(run, self.out, error)
            say(f"FAILED {run.key}: {type(error).__name__}: {error}")
            return
        if self.bundle:
            add_to_bundle(self.bundle, result)
        last = result.epochs[-1]
        loss = last.get("suboptimality", last["train_loss"])
        say(f"{run.key}: {loss} after {last['epoch']} epochs, {time.perf_counter() - started:.0f} s")


class Agenda:
    """What is still to be done: the runs given, and those that follow from their results."""

    def __init__(self, runs: Iterable[Run], place: Place, more: More | None) -> None:
        self._place, self._more = place, more
        self._known: dict[str, Run] = {}
        self._results: dict[str, Result] = {}
        self.failed: set[str] = set()
        self.waiting: deque[Run] = deque()
        self._add(runs)
        self._follow()

    def done(self, key: str) -> None:
        """The run has ended, well or not."""
        result = self._place.finished(self._known[key])
        if result is None:
            self.failed.add(key)
        else:
            self._results[key] = result
        self._follow()

    def _follow(self) -> None:
        while self._more is not None and self._add(self._more(list(self._results.values()), self.failed)):
            pass

    def _add(self, runs: Iterable[Run]) -> bool:
        new = [run for run in runs if run.key not in self._known]
        for run in new:
            self._known[run.key] = run
            result = self._place.finished(run)
            if result is None:
                self.waiting.append(run)
            else:
                self._results[run.key] = result
        return bool(new)

    @property
    def unfinished(self) -> int:
        """How many runs have no result."""
        return len(self._known) - len(self._results)


def run_plan(
    runs: Sequence[Run],
    place: Place,
    *,
    jobs: int = 1,
    minutes: float | None = None,
    more: More | None = None,
    say: Say,
) -> int:
    """Carry out the runs, and those that follow from them; returns how many are not finished at the end."""
    deadline = time.time() + 60 * minutes if minutes else float("inf")
    agenda = Agenda(runs, place, more)
    if jobs > 1:
        in_processes(agenda, place, jobs, deadline, _say)
        return agenda.unfinished
    while agenda.waiting and time.time() < deadline:
        run = agenda.waiting.popleft()
        place.attempt(run, say)
        agenda.done(run.key)
    return agenda.unfinished


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
