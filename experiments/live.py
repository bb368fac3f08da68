"""Runs with a live display: what is trained now, its loss, and the time left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.folder import Folder, MissingData
from experiments.records import Result, carry_out, is_finished, note_failure
from experiments.setup import Run
from experiments.summary import curve_quantity
from experiments.training import Record

if TYPE_CHECKING:
    from rich.console import Console


def run_all(
    runs: Sequence[Run],
    *,
    console: Console,
    folder: Folder,
    out: Path,
    quiet: bool = False,
) -> list[Result]:
    """Carry the runs out one after the other; they are kept in `out`, and what is there already is not repeated.

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

        folder.progress = folder.progress or fetched
        todo = [run for run in runs if not is_finished(out, run)]
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
                results.append(carry_out(run, folder, out, note))
            except MissingData:
                raise  # every run would say the same
            except Exception as error:
                failures.append((run, note_failure(run, out, error), str(error)))
            if run in todo:
                done += run.epochs
                bar.update(task, completed=done)
    for run, path, why in failures:
        console.print(f"[red]{run.task} {run.name} seed {run.seed} failed[/red]: {why} (see {path})")
    return results
