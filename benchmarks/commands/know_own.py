"""`python -m benchmarks know-own`: does a sketch know its own example?"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.know_own import EPOCHS, measure_know_own
from experiments.folder import Folder


def know_own(
    data: Annotated[Path | None, typer.Option(help="Folder with the data.")] = None,
    runs: Annotated[int, typer.Option(min=0, help="Right runs to look for a false alarm in.")] = 200,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of each case.")] = EPOCHS,
    only: Annotated[str, typer.Option(help="Cases whose name has this in it.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write JSON to this file.")] = None,
) -> None:
    """Measure how often a new sketch is nearer to its example's old one, where rows are right and where not."""
    found = measure_know_own(Folder(data), runs=runs, epochs=epochs, only=only, tell=typer.echo)
    report = {
        "command": f"python -m benchmarks know-own --runs {runs} --epochs {epochs}",
        "machine": "2 cores of a shared AMD EPYC",
        "date": datetime.date.today().isoformat(),
        **found,
    }
    if out is not None:
        out.write_text(json.dumps(report, indent=1) + "\n")
    typer.echo(json.dumps(found["right_runs"]))
