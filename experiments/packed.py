"""Compact files of finished runs: what tables are made from, small enough to be kept beside the code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.records import Result, read_results
from experiments.setup import Run
from experiments.summary import Summary, by_rule, group, summarise
from experiments.tasks import get_task

KEPT = ("train_loss", "suboptimality", "test_loss", "train_seconds", "ema_train_loss", "ema_test_loss")
"""What is kept of every epoch, besides the task's test metric, plain and of an average of weights."""
BUNDLE = ".bundle"
"""How the name of a file ends that holds one finished run per line."""
FACTS = ("parameters", "examples", "test_examples", "least_objective", "vectors")


@dataclass
class Source:
    """One file: runs of one command on one machine."""

    path: Path
    about: dict[str, Any]
    """command, machine, date, commit, note."""
    results: list[Result]

    def summaries(self) -> list[Summary]:
        """A table per task, rules in the order in which they are compared everywhere."""
        return [summarise(task, by_rule(lines)) for task, lines in group(self.results).items()]


def pack(runs: Sequence[Path], about: dict[str, Any], until: dict[str, int] | None = None) -> dict[str, Any]:
    """Finished runs as plain numbers, six digits each; `about` says how and where they were made.

    `until`, task → epochs: cut the task's runs there, and take runs in that were stopped, if they came that far. Only
    for settings in which the first epochs do not depend on how many follow.
    """
    results = _read(runs, until or {})
    if not results:
        raise ValueError(f"there is no finished run in {', '.join(map(str, runs))}")
    known = [r.start["versions"] for r in results if r.start.get("versions")]  # packed runs have none
    if not known:
        raise ValueError("all of these runs are from packed files, which do not say when each was made")
    versions = {k: v for k, v in known[0].items() if k not in ("date", "threads", "device")}
    dates = sorted({own["date"] for own in known})
    date = " to ".join(dates[:1] + dates[1:][-1:])
    return {**about, "date": date, "versions": versions, "runs": [*map(_packed, results)]}


def _read(runs: Sequence[Path], until: dict[str, int]) -> list[Result]:
    """Every run once; a stopped one only where its task is cut before the end of it."""
    found = {result.run.key: result for place in runs for result in read_all(place)}
    for path in (path for folder in runs for path in sorted(folder.rglob("*.part"))):
        result = stopped_result(path)
        if result is not None and result.run.task in until:
            found.setdefault(result.run.key, result)
    kept = []
    for result in found.values():
        last = until.get(result.run.task, result.run.epochs)
        if result.epochs[-1]["epoch"] >= last or result.end["diverged"]:
            epochs = [epoch for epoch in result.epochs if epoch["epoch"] <= last]
            kept.append(Result(result.run.but(epochs=last), result.start, epochs, result.end))
    kept = [result for result in kept if result.run.task not in until or _all_have(kept, result.run)]
    return sorted(kept, key=lambda result: (result.run.task, result.run.name, result.run.seed))


def read_all(place: Path) -> list[Result]:
    """Finished runs: of a bundle, of a packed file, or of a folder with everything in it."""
    if place.suffix == ".json":
        return read_source(place).results
    if place.is_file():
        return read_bundle(place)
    bundled = [result for path in sorted(place.rglob(f"*{BUNDLE}")) for result in read_bundle(path)]
    return [*bundled, *read_results(place)]


def add_to_bundle(path: Path, result: Result) -> None:
    """Append a finished run, in one write: other processes may do the same, and a kill leaves whole lines."""
    line = {**_packed(result), "versions": result.start["versions"]}
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


def read_bundle(path: Path) -> list[Result]:
    """The runs of a bundle, each once; a last line that was broken off is left out."""
    found: dict[str, Result] = {}
    for line in path.read_text().splitlines():
        try:
            result = _unpacked(json.loads(line))
        except json.JSONDecodeError:
            continue
        found[result.run.key] = result
    return list(found.values())


def _all_have(results: Sequence[Result], run: Run) -> bool:
    """Whether every line of the task has the run's seed: means over different seeds cannot be compared."""
    lines: dict[str, set[int]] = {}
    for result in results:
        if result.run.task == run.task:
            lines.setdefault(result.run.name, set()).add(result.run.seed)
    return all(run.seed in seeds for seeds in lines.values())


def stopped_result(path: Path) -> Result | None:
    """A run that was stopped, as far as it came; its last line may be broken off."""
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not records:
        return None
    return Result(Run.from_json(records[0]["run"]), records[0], records[1:], {"diverged": False})


def _packed(result: Result) -> dict[str, Any]:
    metric = get_task(result.run.task).metric
    kept = dict.fromkeys([*KEPT, metric, f"ema_{metric}"])
    series = {k: [_six(e.get(k)) for e in result.epochs] for k in kept if k in result.epochs[0]}
    if result.run.measure_every > 1:  # else they count up
        series["epoch"] = [e["epoch"] for e in result.epochs]
    facts = {k: result.start[k] for k in FACTS if result.start.get(k) is not None}
    return {"run": result.run.to_json(), **facts, "diverged": result.end["diverged"], "epochs": series}


def _six(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def read_source(path: Path) -> Source:
    """A file that `pack` made."""
    about = json.loads(path.read_text())
    return Source(path, about, [_unpacked(entry) for entry in about.pop("runs")])


def _unpacked(entry: dict[str, Any]) -> Result:
    series: dict[str, list[Any]] = entry["epochs"]
    count = len(series["train_loss"])
    epochs = [{"epoch": e, **{k: values[e] for k, values in series.items()}} for e in range(count)]
    end = {"diverged": entry["diverged"], "eval_seconds": 0.0, "train_seconds": series["train_seconds"][-1]}
    start = {k: entry.get(k) for k in (*FACTS, "versions")}
    return Result(Run.from_json(entry["run"]), start, epochs, end)
