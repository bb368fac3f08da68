"""`python -m experiments sweep`: the field's ablations by name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from experiments import plans
from experiments.commands.train import carry_out_and_show, parse_options


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
