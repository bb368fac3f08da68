"""`heeler demo`: two small models trained in three orders, a table and a picture in about a minute."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer

from heeler.experiments.demo import EPOCHS, TASKS, demo_runs, summaries


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, from different starts.")] = 3,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of each run.")] = EPOCHS,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train softmax regression and a small network on handwritten digits in random order, CD-GraB's and Heeler's."""
    import torch
    from rich.console import Console

    from heeler.experiments.charts import draw
    from heeler.experiments.live import run_all
    from heeler.experiments.tables import as_numbers, print_summary

    torch.set_num_threads(1)  # on models this small, threads spend their time waiting for one another
    started = time.perf_counter()
    console = Console(stderr=as_json)
    tables = summaries(run_all(demo_runs(TASKS, seeds, epochs), console=console, quiet=as_json))
    title = f"Digits, {seeds} seeds: line = mean, shade = all seeds"
    draw(tables, plot, title=title)
    if as_json:
        typer.echo(json.dumps([as_numbers(table) for table in tables]))
        return
    for table in tables:
        print_summary(table, console)
    console.print(
        "random: a new random order every epoch. cd-grab: as published, 4 simulated workers with their own quarter of "
        "the data, full gradients, one balance pass an epoch. herd: Heeler's default, one order of all examples from "
        "whole gradients (regression) or sketches of 256 numbers (network). All have the same starts, batches of 16 "
        "and budget."
    )
    console.print(f"Curves: [bold]{plot}[/bold]. {time.perf_counter() - started:.0f} s in all.")
