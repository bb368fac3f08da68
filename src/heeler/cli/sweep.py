"""`heeler sweep`: the field's ablations by name, and reports of runs that were made elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from heeler.cli.train import carry_out_and_show, parse_options
from heeler.experiments import plans


def sweep(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(plans.SWEEPS)}.")],
    task: Annotated[str, typer.Option(help="The task it is made on.")] = "digits",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    option: Annotated[list[str] | None, typer.Option(help="A task's own, as NAME=JSON.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; small models are fastest with one.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Data folder; else HEELER_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results; by default runs/sweep-NAME-TASK.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Vary one thing: sketch size, passes, layers, age of sketches, shards, rate, workers, optimizer or noise."""
    try:
        changes = {"device": device, "options": parse_options(option or [])} | ({"epochs": epochs} if epochs else {})
        runs = plans.sweep(name, task, seeds, **changes)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    folder = out or Path("runs") / f"sweep-{name}-{task}"
    carry_out_and_show(runs, data=data, out=folder, as_json=as_json, threads=threads)


def report(
    out: Annotated[Path, typer.Argument(help="Folder of finished runs; read with the folders below it.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Draw curves.png and write report.html from runs that are finished, wherever they were made."""
    from rich.console import Console

    from heeler.experiments.report import write_report
    from heeler.experiments.tables import as_numbers, print_summary

    try:
        tables = write_report(out)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps([as_numbers(table) for table in tables]))
        return
    for table in tables:
        print_summary(table, Console())
