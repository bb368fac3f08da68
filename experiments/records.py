"""Runs on disk: one JSON-lines file each, complete or not there at all, so that a sweep can be taken up again."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.folder import Folder
from experiments.setup import Run
from experiments.training import OneProcess, Record, train

OnRecord = Callable[[Run, Record], None]


@dataclass
class Result:
    """A finished run."""

    run: Run
    start: Record
    epochs: list[Record]
    """One per epoch, the first from before training."""
    end: Record = field(default_factory=dict)

    def series(self, key: str) -> list[float]:
        """The values of `key`, infinite where the run had diverged."""
        return [float("inf") if e.get(key) is None else float(e[key]) for e in self.epochs]


def from_records(run: Run, records: Iterable[Record]) -> Result:
    """A result from what `train` yields."""
    by_kind: dict[str, list[Record]] = {"start": [], "epoch": [], "end": []}
    for record in records:
        by_kind[record["kind"]].append(record)
    return Result(run, by_kind["start"][0], by_kind["epoch"], by_kind["end"][0])


def result_path(out: Path, run: Run) -> Path:
    """Where a finished run's records are."""
    return out / f"{run.key}.jsonl"


def is_finished(out: Path, run: Run) -> bool:
    """Whether the run need not be repeated."""
    return result_path(out, run).is_file()


def carry_out(
    run: Run, folder: Folder, out: Path, on_record: OnRecord | None = None, place: OneProcess | None = None
) -> Result:
    """Train, unless that was done before; the file gets its name only once the run has ended."""
    path = result_path(out, run)
    if path.is_file():
        return read_result(path)
    out.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w") as file:
        for record in train(run, folder, place):
            file.write(json.dumps(record) + "\n")
            file.flush()
            if on_record is not None:
                on_record(run, record)
    partial.replace(path)
    path.with_suffix(".failed").unlink(missing_ok=True)
    return read_result(path)


def note_failure(run: Run, out: Path, error: BaseException) -> Path:
    """Leave a file that says why a run failed; the next attempt removes it."""
    out.mkdir(parents=True, exist_ok=True)
    path = result_path(out, run).with_suffix(".failed")
    path.write_text(json.dumps({"run": run.to_json(), "error": traceback.format_exception(error)}, indent=1))
    return path


def read_result(path: Path) -> Result:
    """A finished run from its file."""
    records: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    return from_records(Run.from_json(records[0]["run"]), records)


def read_results(out: Path) -> list[Result]:
    """All finished runs in a folder and the folders below it."""
    return [read_result(path) for path in sorted(out.rglob("*.jsonl"))]
