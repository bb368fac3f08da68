"""Runs with a live display: what is trained now, its loss, and the time left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heeler.experiments.folder import Folder, MissingData
from heeler.experiments.records import Result, carry_out, from_records, is_finished, note_failure
from heeler.experiments.setup import Run
from heeler.experiments.summary import curve_quantity
from heeler.experiments.training import Record, train

if TYPE_CHECKING:
    from rich.console import Console


def run_all(
    runs: Sequence[Run],
    *,
    console: Console,
    folder: Folder | None = None,
    out: Path | None = None,
    quiet: bool = False,
) -> list[Result]:
    """Carry the runs out one after the other; with `out`, kept there, and what is there already is not repeated.

    A run that fails is noted beside the others' files, and told of at the end; without its data none can be made.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description:<28}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} epochs"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
    )
    results, failures = [], []
    with Progress(*columns, console=console, disable=quiet) as bar:
        fetching = bar.add_task("download", total=None, visible=False)

        def fetched(name: str, done: int, size: int) -> None:
            bar.update(
                fetching, description=f"download {name}", completed=done, total=size or None, visible=done < size
            )

        folder = folder or Folder(progress=fetched)
        folder.progress = folder.progress or fetched
        todo = [run for run in runs if out is None or not is_finished(out, run)]
        task = bar.add_task("", total=sum(run.epochs for run in todo))
        done = 0

        def note(run: Run, record: Record) -> None:
            if record["kind"] == "epoch":
                value = record.get(curve_quantity(run.task))
                loss = "diverged" if value is None else f"{value:.2e}"
                bar.update(
                    task,
                    completed=done + record["epoch"],
                    description=f"{run.task} {run.name} seed {run.seed}: {loss}",
                )

        for run in runs:
            try:
                results.append(carry_out(run, folder, out, note) if out is not None else _in_memory(run, folder, note))
            except MissingData:
                raise  # every run would say the same
            except Exception as error:
                if out is None:
                    raise
                failures.append((run, note_failure(run, out, error), str(error)))
            if run in todo:
                done += run.epochs
                bar.update(task, completed=done)
    for run, path, why in failures:
        console.print(f"[red]{run.task} {run.name} seed {run.seed} failed[/red]: {why} (see {path})")
    return results


def _in_memory(run: Run, folder: Folder, note: object) -> Result:
    records = []
    for record in train(run, folder):
        records.append(record)
        if callable(note):
            note(run, record)
    return from_records(run, records)
