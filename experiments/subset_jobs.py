"""Many trainings on subsets as jobs: which there are, in which order, and the file that keeps what is done.

A job either makes a seed's table or trains on one subset chosen from it. The order is such that a plan that is cut
short has whole tables: every task's first seed, then every task's second.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.crew import Say, in_processes
from experiments.folder import Folder
from experiments.subset_methods import METHODS, select
from experiments.subsets import ALL, FRACTIONS, Record, Setting, described, left_behind, measured
from experiments.tasks import get_task
from experiments.tasks.base import settings

TABLE = "table"
"""The job that a seed's other jobs wait for, but for training on all."""
_OWN = ("task", "steps", "warm_up", "weighted", "methods", "fractions", "seeds")
"""What an entry of a plan says beside the settings of `Run`."""


@dataclass(frozen=True)
class Job:
    """One table, or one training."""

    setting: Setting
    seed: int
    method: str
    fraction: float

    @property
    def key(self) -> str:
        return _key(self.setting.key, self.seed, self.method, self.fraction)

    @property
    def table_key(self) -> str | None:
        """The job that must be done before; None: no such."""
        return None if self.method in (TABLE, ALL) else _key(self.setting.key, self.seed, TABLE, 1.0)


def _key(setting: str, seed: int, method: str, fraction: float) -> str:
    return f"{setting}-{seed}-{method}-{fraction:g}"


def read_plan(path: Path, device: str | None = None) -> list[Job]:
    """A JSON list, an entry per task: "task", "steps", "warm_up", "weighted", "methods", "fractions", "seeds" and any
    setting of `Run`; what is left out is as the task or `python -m experiments subsets` has it."""
    entries = json.loads(path.read_text())
    groups = []
    for number, entry in enumerate(entries):
        try:
            groups.append(entry_jobs(entry, device))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, entry {number}: {error}") from None
    return in_turn(groups)


def entry_jobs(entry: dict[str, Any], device: str | None = None) -> list[Job]:
    """One task's jobs, seed by seed: its table first, then all, then fraction by fraction."""
    changes = {name: value for name, value in entry.items() if name not in _OWN}
    if device:
        changes["device"] = device
    run = settings(get_task(entry["task"]), "herd", **changes)
    given = {name: entry[name] for name in ("steps", "warm_up", "weighted") if name in entry}
    setting = Setting(run, **given)
    methods, fractions = entry.get("methods", METHODS), entry.get("fractions", FRACTIONS)
    unknown = [method for method in methods if method not in METHODS]
    if unknown:
        raise ValueError(f"there is no method {unknown[0]!r}: choose among {', '.join(METHODS)}")
    jobs = []
    for seed in range(entry.get("seeds", 3)):
        jobs += [Job(setting, seed, TABLE, 1.0), Job(setting, seed, ALL, 1.0)]
        jobs += [Job(setting, seed, method, fraction) for fraction in fractions for method in methods]
    return jobs


def in_turn(groups: Sequence[Sequence[Job]]) -> list[Job]:
    """Seed by seed, and of each seed the tasks' jobs in turn."""
    placed = [(job.seed, place, number, job) for number, jobs in enumerate(groups) for place, job in _places(jobs)]
    return [job for *_, job in sorted(placed, key=lambda entry: entry[:3])]


def _places(jobs: Sequence[Job]) -> Iterable[tuple[int, Job]]:
    first: dict[int, int] = {}
    for place, job in enumerate(jobs):
        yield place - first.setdefault(job.seed, place), job


class Place:
    """Where data come from, where tables are kept, and the file that every record is appended to."""

    def __init__(self, data: Path | None, tables: Path, out: Path) -> None:
        self.data, self.tables, self.out = data, tables, out
        tables.mkdir(parents=True, exist_ok=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_file() and not out.read_bytes().endswith(b"\n"):
            self._append_raw(b"\n")  # a line that was broken off must not swallow the next

    def finished(self) -> set[str]:
        """Keys of what need not be done again."""
        found = {record["key"] for record in self.records() if "key" in record}
        return found | {path.stem for path in self.tables.glob("*.npy")}

    def records(self) -> list[Record]:
        """All lines of the file; one that was broken off is left out."""
        lines = self.out.read_text().splitlines() if self.out.is_file() else []
        found = []
        for line in lines:
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return found

    def attempt(self, job: Job, say: Say) -> None:
        """Carry the job out, or say why that was not possible; the others go on."""
        start = time.perf_counter()
        try:
            told = self._done(job)
        except Exception as error:  # one job's failure must not cost the others
            where = traceback.extract_tb(error.__traceback__)[-1]
            say(f"FAILED {job.key}: {type(error).__name__}: {error} ({where.name}, line {where.lineno})")
            return
        say(f"{job.key}: {told}, {time.perf_counter() - start:.0f} s")

    def _done(self, job: Job) -> str:
        folder = Folder(self.data)
        if job.method == TABLE:
            rows = left_behind(job.setting, folder, job.seed)
            scratch = self.tables / f".{job.key}.{os.getpid()}.npy"
            np.save(scratch, rows)
            scratch.replace(self.tables / f"{job.key}.npy")  # whole or not at all
            return f"{rows.shape[0]} × {rows.shape[1]}"
        table = None if job.table_key is None else np.load(self.tables / f"{job.table_key}.npy", mmap_mode="r")
        record = measured(job.setting, folder, table, job.method, job.fraction, job.seed)
        if job.method == ALL:
            self._append({"setting": job.setting.key, **described(job.setting, folder)})
        self._append({"setting": job.setting.key, "key": job.key, **record})
        return str(record.get("refused") or record.get("test_accuracy"))

    def _append(self, record: Record) -> None:
        """In one write: other processes may do the same, and a kill leaves whole lines."""
        self._append_raw(json.dumps(record, separators=(",", ":")).encode() + b"\n")

    def _append_raw(self, raw: bytes) -> None:
        with self.out.open("ab", buffering=0) as file:
            file.write(raw)


class Agenda:
    """The jobs that are not done; those whose table is not there yet wait for it."""

    def __init__(self, jobs: Sequence[Job], finished: set[str]) -> None:
        self._rank = {job.key: rank for rank, job in enumerate(jobs)}
        left = [job for job in jobs if job.key not in finished]
        needed = {job.table_key for job in left}
        left = [job for job in left if job.method != TABLE or job.key in needed]
        self.waiting = deque(job for job in left if job.table_key is None or job.table_key in finished)
        self._blocked = [job for job in left if not (job.table_key is None or job.table_key in finished)]

    def done(self, key: str) -> None:
        """Jobs that waited for this one may begin, each in its place of the order."""
        free = [job for job in self._blocked if job.table_key == key]
        if free:
            self._blocked = [job for job in self._blocked if job.table_key != key]
            self.waiting = deque(sorted([*self.waiting, *free], key=lambda job: self._rank[job.key]))


def carry_out(jobs: Sequence[Job], place: Place, *, processes: int, minutes: float | None, say: Say) -> int:
    """Do what is not done yet; returns how many trainings are missing at the end."""
    deadline = time.time() + 60 * minutes if minutes else float("inf")
    agenda = Agenda(jobs, place.finished())
    if processes > 1:
        compile_methods({job.method for job in agenda.waiting} | {job.method for job in jobs})
        in_processes(agenda, place, processes, deadline, say)
    else:
        while agenda.waiting and time.time() < deadline:
            job = agenda.waiting.popleft()
            place.attempt(job, say)
            agenda.done(job.key)
    finished = place.finished()
    return sum(job.method != TABLE and job.key not in finished for job in jobs)


def compile_methods(methods: Iterable[str]) -> None:
    """Have every loop compiled and kept on disk once, rather than by all processes at the same time."""
    rows = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    for method in sorted(set(methods) & set(METHODS)):
        select(rows, 0.25, method, labels=np.arange(64) % 2, target=rows[:8])


def collected(jobs: Sequence[Job], place: Place) -> dict[str, Record]:
    """Task → {"setting", "records"}, the records of these jobs in their order, however they were done."""
    wanted = {job.key: job for job in jobs if job.method != TABLE}
    lines = place.records()
    records = {line["key"]: line for line in lines if line.get("key") in wanted}
    found: dict[str, Record] = {}
    for job in sorted(wanted.values(), key=lambda job: job.seed):
        if job.key in records:
            own = found.setdefault(job.setting.run.task, {"setting": None, "records": []})
            own["records"].append({k: v for k, v in records[job.key].items() if k not in ("key", "setting")})
    for line in lines:
        if line.get("task") in found and line["setting"] in {job.setting.key for job in jobs}:
            about = {name: value for name, value in line.items() if name != "setting"}
            found[line["task"]]["setting"] = {
                **about,
                "seeds": len({r["seed"] for r in found[line["task"]]["records"]}),
            }
    return found
