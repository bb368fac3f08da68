"""What Heeler costs and gains by the clock: every run is a process of its own, alone, orders in turns.

    python -m benchmarks.clock --data DIR --turns 7 --out cost.json            # seconds of whole runs over plain ones
    python -m benchmarks.clock cost --only MLP --cold                           # with nothing compiled before
    python -m benchmarks.clock race --data DIR --seeds 5 --out race.json        # seconds to random's last loss
    python -m benchmarks.clock race --only ResNet --jobs 14 --cost cost.json    # many runs at once, seconds of `cost`
    python -m benchmarks.clock gain --data DIR --budget 0.02,0.05,none --out gain.json
    python -m benchmarks.clock --of cost.json                                   # tables from a stored file
    python -m benchmarks.clock --only digits --turns 2 --epochs 0.1             # does it run?

A run's clock starts when torch and the data are loaded, the model and the optimizer are made, and on a GPU CUDA,
cuBLAS and cuDNN are started. It ends after the last step (synchronized). All that an order needs is in it: `import
heeler`, the sampler, `attach`, the first checks, solves and waits. `random` is torch's RandomSampler in a process that
never imports Heeler. `stratified` and `heeler, strata` are given the labels. Heeler has its default arguments. The
loader is the same for every order. Before the turns every order runs three epochs that do not count (`--warm-up`), so
that files lie in the page cache and compilers' caches are filled; with `--cold` each counted run, of every order, gets
empty caches (Heeler's, Triton's and Inductor's). Where real data are not to be had, `cost` takes random ones of the
same shape. With `--jobs 4` four runs go side by side, each on its own quarter of the cores (on a GPU start MPS first):
both sides of a turn then share the machine alike, and the table is to say so.

race: every order trains at lengths from 0.4 to 1 of the task's epochs, random to 1.3, each a cosine of its own, and at
each rate of the task's grid; the best rate is chosen for every order and length by the mean over seeds. Between
lengths seconds and the log of the loss are interpolated. The target is random's loss at full length, the unit its
seconds there. Intervals are bootstrapped over seeds, the choice of rates included. The mortgages' four workers are real
processes here as well. With `--jobs` runs share the machine, and their own seconds mean nothing. `--cost FILE`, of
`cost` on the same machine, gives seconds to the table: those of plain epochs, and for every order, at any length, all
that it added to a whole run (`with_costs`).

gain: last losses at the task's own rate.

cost: the ratio of two runs of one turn; the median over turns, its interval from order statistics (exact, whatever
the distribution), and the least and largest. Epochs without sketches are compared with plain epochs of the same
numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.clock_data import MissingData, store, tasks
from benchmarks.clock_figures import cost_table
from benchmarks.clock_tasks import Task, fitted
from benchmarks.race_figures import gain_table, race_table, with_costs
from experiments.folder import Folder

ROOT = Path(__file__).parents[1]
ORDERS = ("random", "stratified", "heeler", "heeler, strata")
TABLES = {"cost": cost_table, "race": race_table, "gain": gain_table}
LENGTHS, LONGER = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (1.15, 1.3)
"""Of the task's epochs: of every order, and of random alone, which can train longer in Heeler's seconds."""
CACHES = {"HEELER_CACHE": "heeler"}
CACHES |= {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


class Runner:
    """Starts runs, one after the other, and waits for each."""

    def __init__(self, given: argparse.Namespace, scratch: Path) -> None:
        self.given, self.scratch, self.numbers = given, scratch, itertools.count()
        self.sources: dict[str, str] = {}
        """Of each task's data: real or random."""

    def prepare(self, task: Task) -> None:
        """Store the task's data for its runs."""
        folder = Folder(self.given.data) if self.given.data or "HEELER_DATA" in os.environ else None
        self.sources[task.name] = store(task, folder, self._data(task))

    def run(
        self, task: Task, order: str, seed: int, rate: float, epochs: float, *, cold: bool = False, slot: int = 0
    ) -> dict[str, Any]:
        """Train in a process of its own (several workers: as many), and wait for its end.

        slot: which of `--jobs` equal parts of the cores it has for itself.
        """
        base = self.scratch / str(next(self.numbers))
        name, _, budget = order.partition(", budget ")
        spec: dict[str, Any] = {"task": asdict(task), "order": name, "seed": seed, "rate": rate, "epochs": epochs}
        spec |= {"device": self.given.device, "threads": self.given.threads, "data": str(self._data(task))}
        spec |= {"out": f"{base}.out.json", "meeting": f"{base}.meeting"}
        spec["budget"] = [None if budget == "none" else float(budget)] if budget else None
        with tempfile.TemporaryDirectory() as empty:
            caches = {variable: f"{empty}/{folder}" for variable, folder in CACHES.items()}
            started = []
            for rank in range(task.workers):
                file = Path(f"{base}.{rank}.json")
                file.write_text(json.dumps({**spec, "rank": rank}))
                command = [sys.executable, "-m", "benchmarks.clock_run", str(file)]
                environment = {**os.environ, **(caches if cold else {})}
                environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has bytecode
                started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True))
                _pin(started[-1].pid, slot, self.given.jobs)
            said = [process.communicate()[1] for process in started]
        for process, words in zip(started, said, strict=True):
            if process.returncode:
                raise RuntimeError(f"{task.name}, {order}, seed {seed} failed:\n{words[-3000:]}")
        found = json.loads(Path(spec["out"]).read_text())
        about = {"task": task.name, "order": order, "seed": seed, "rate": rate, "epochs": epochs}
        return {**about, "data": self.sources[task.name], **found}

    def _data(self, task: Task) -> Path:
        return self.scratch / f"{task.data}.pt"


def _pin(process: int, slot: int, slots: int) -> None:
    """Give it its part of the cores, before it has started a thread."""
    cores = sorted(os.sched_getaffinity(0))
    own = cores[slot % slots * len(cores) // slots : (slot % slots + 1) * len(cores) // slots]
    if slots > 1 and own:
        os.sched_setaffinity(process, own)


def orders_of(task: Task, budgets: list[str], wanted: tuple[str, ...] = ORDERS) -> list[str]:
    """Without labels there are no strata. Heeler's are tried with every budget, if any is given."""
    kept = [order for order in wanted if task.labelled or order in ("random", "heeler")]
    found = []
    for order in kept:
        found += [f"{order}, budget {budget}" for budget in budgets] if "heeler" in order and budgets else [order]
    return found


class Results:
    """What is stored; written after every run, so that nothing is lost when it is stopped."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.out = given.out
        self.about = {"mode": given.mode, **machine(given.device), "command": " ".join(sys.argv[1:])}
        self.runs: list[dict[str, Any]] = []

    def add(self, found: dict[str, Any]) -> None:
        self.runs.append(found)
        loss = f", loss {found['loss']:.5g}" if "loss" in found else ""
        what = f"{found['task']}, {found['order']}, seed {found['seed']}, rate {found['rate']:g}"
        print(f"  {what}, {found['epochs']:g} epochs: {found['seconds']:.2f} s{loss}", flush=True)
        if self.out is not None:
            lines = ",\n".join(json.dumps(run) for run in self.runs)
            self.out.write_text(f'{json.dumps(self.about)[:-1]}, "runs": [\n{lines}\n]}}\n')


def machine(device: str) -> dict[str, Any]:
    """Where the numbers are from."""
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), processor)
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "processor": processor,
        "cores": os.cpu_count(),
        "threads_by_default": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "HEAD")
        + ("-changed" if _git("status", "--porcelain", "src", "benchmarks") else ""),
    }


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def measure_cost(runner: Runner, task: Task, results: Results) -> None:
    """Turn by turn; each begins with another order. With `--jobs` the runs of a turn go side by side."""
    given, orders = runner.given, orders_of(task, runner.given.budget, runner.given.orders)
    epochs = task.epochs * given.epochs
    warm_up(runner, task, orders)
    turns = [(turn, orders[(turn + i) % len(orders)]) for turn in range(given.turns) for i in range(len(orders))]

    def run(place: int) -> dict[str, Any]:
        turn, order = turns[place]
        return runner.run(task, order, turn, task.rate, epochs, cold=given.cold, slot=place)

    for begin in range(0, len(turns), given.jobs):
        group = range(begin, min(begin + given.jobs, len(turns)))
        with ThreadPoolExecutor(given.jobs) as pool:
            for found in pool.map(run, group):
                results.add(found)


def measure_race(runner: Runner, task: Task, results: Results) -> None:
    """Every order at every length and rate, seed by seed; random at more lengths."""
    factor = runner.given.epochs
    lengths = sorted({_whole(task.epochs * factor * length) for length in runner.given.lengths})
    full = _whole(task.epochs * factor)
    orders = orders_of(task, runner.given.budget, runner.given.orders)
    jobs: list[Job] = [
        (order, seed, task.rate * factor, float(epochs))
        for seed in range(runner.given.seeds)
        for epochs in lengths
        for factor in runner.given.rates or task.rates
        for order in orders
        if order == "random" or epochs <= full
    ]
    for found in run_all(runner, task, orders, jobs):
        results.add({**found, "full": full})


def measure_gain(runner: Runner, task: Task, results: Results) -> None:
    """Random's and Heeler's last loss, at the task's rate."""
    wanted = tuple(order for order in runner.given.orders if order in ("random", "heeler"))
    orders = orders_of(task, runner.given.budget, wanted)
    epochs = float(_whole(task.epochs * runner.given.epochs))
    jobs: list[Job] = [(order, seed, task.rate, epochs) for seed in range(runner.given.seeds) for order in orders]
    for found in run_all(runner, task, orders, jobs):
        results.add(found)


Job = tuple[str, int, float, float]
"""Order, seed, rate and epochs of a run."""


def run_all(runner: Runner, task: Task, orders: list[str], jobs: list[Job]) -> Iterator[dict[str, Any]]:
    """One after the other, or with `--jobs` so many at once; each as it ends."""
    if runner.given.jobs == 1:
        warm_up(runner, task, orders)
        yield from (runner.run(task, *job) for job in jobs)
        return
    with ThreadPoolExecutor(runner.given.jobs) as pool:
        started = [pool.submit(runner.run, task, *job, slot=place) for place, job in enumerate(jobs)]
        try:
            for done in as_completed(started):
                yield done.result()
        finally:  # the others are not worth the time if one failed
            pool.shutdown(wait=False, cancel_futures=True)


def warm_up(runner: Runner, task: Task, orders: list[str]) -> None:
    """Runs that do not count: files lie in the page cache after them, and compilers' caches are filled."""
    if runner.given.warm_up > 0:
        for order in orders:
            runner.run(task, order, 0, task.rate, min(runner.given.warm_up, task.epochs * runner.given.epochs))


def _whole(epochs: float) -> int:
    return max(1, round(epochs))


MEASURES = {"cost": measure_cost, "race": measure_race, "gain": measure_gain}


def chosen(given: argparse.Namespace) -> list[Task]:
    """The mode's tasks for the device, or those that are named."""
    found = []
    for name, task in tasks().items():
        if given.only in name if given.only else given.mode in task.modes and given.device in task.devices:
            found.append(fitted(task, given.device))
    if not found:
        raise SystemExit(f"no task has {given.only!r} in its name: there are {', '.join(tasks())}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", nargs="?", default="cost", choices=list(MEASURES))
    parser.add_argument("--data", type=Path, help="folder with data; else HEELER_DATA")
    parser.add_argument("--only", default="", help="tasks whose name has this in it, whatever mode they are made for")
    parser.add_argument("--turns", type=int, default=7, help="of cost")
    parser.add_argument("--seeds", type=int, default=5, help="of race and gain")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, help="of PyTorch, for all tasks")
    parser.add_argument("--epochs", type=float, default=1.0, help="factor of every task's epochs")
    parser.add_argument("--cold", action="store_true", help="cost: empty caches for every run")
    parser.add_argument("--budget", default=[], type=lambda text: text.split(","), help="of heeler.Sampler: 0.05,none")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--orders", default=ORDERS, type=_names, help="some of: " + "; ".join(ORDERS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each with its own part of the cores")
    parser.add_argument("--lengths", default=LENGTHS + LONGER, type=_numbers, help="race: of the task's epochs: 0.8,1")
    parser.add_argument("--rates", type=_numbers, help="race: factors of the task's rate, instead of its own grid")
    parser.add_argument("--warm-up", type=float, default=3.0, help="epochs of the runs that do not count; 0: none")
    parser.add_argument("--cost", type=Path, help="race: take seconds from this file of `cost`")
    parser.add_argument("--of", type=Path, nargs="+", help="print the table of these files, of one mode; run nothing")
    given = parser.parse_args()
    if given.of is not None:
        stored = [json.loads(path.read_text()) for path in given.of]
        runs = [run for each in stored for run in each["runs"]]
        print(TABLES[stored[0]["mode"]](_priced(runs, given.cost)))
        return
    results = Results(given)
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(given, Path(scratch))
        for task in chosen(given):
            print(task.name, flush=True)
            try:
                runner.prepare(task)
            except MissingData as error:
                print(f"  left out: {error}", flush=True)
                continue
            if given.mode != "cost" and runner.sources[task.name] == "random":
                print("  left out: of random data no loss says anything; name a folder with --data", flush=True)
                continue
            MEASURES[given.mode](runner, task, results)
    print(TABLES[given.mode](_priced(results.runs, given.cost)))


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(";"))


def _numbers(text: str) -> tuple[float, ...]:
    return tuple(float(number) for number in text.split(","))


def _priced(runs: list[dict[str, Any]], cost: Path | None) -> list[dict[str, Any]]:
    return runs if cost is None else with_costs(runs, json.loads(cost.read_text())["runs"])


if __name__ == "__main__":
    main()
