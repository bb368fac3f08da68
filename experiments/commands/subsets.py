"""`python -m experiments subsets`: train on subsets chosen by every method, random and stratified beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from experiments.subset_methods import METHODS
from experiments.subsets import FRACTIONS
from experiments.tasks import TASKS


def subsets(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    out: Annotated[
        Path,
        typer.Option(help="Where the JSON goes. Beside it, in NAME.jsonl, is every result as soon as it is there."),
    ] = Path("subsets.json"),
    methods: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(METHODS),
    fractions: Annotated[str, typer.Option(help="Shares of the examples, with commas.")] = ",".join(
        map(str, FRACTIONS)
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    warm_up: Annotated[int, typer.Option(min=1, help="Epochs on all examples that leave the table.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training on a subset.")] = 1000,
    weighted: Annotated[bool, typer.Option(help="Weight the losses by the selection's weights.")] = True,
    lr: Annotated[float | None, typer.Option(help="Learning rate; as published by default.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A task's own, as NAME=JSON: limit=14080.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Processes, each with a training of its own.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads, with one process.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Data folder; else HEELER_DATA.")] = None,
) -> None:
    """Train a task on subsets of its examples and print a table of test accuracies. What is done is not repeated."""
    import torch

    from experiments.commands.train import parse_options
    from experiments.subset_jobs import Place, carry_out, collected, entry_jobs
    from experiments.subsets import table_of
    from experiments.subsets_run import say

    torch.set_num_threads(threads)
    entry = {"task": task, "seeds": seeds, "warm_up": warm_up, "steps": steps, "weighted": weighted}
    entry["methods"] = [name for name in methods.split(",") if name]
    entry |= {} if lr is None else {"lr": lr}
    try:
        entry["fractions"] = [float(share) for share in fractions.split(",")]
        entry["options"] = parse_options(option or [])
        wanted = entry_jobs(entry, device)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    place = Place(data, out.with_suffix(".tables"), out.with_suffix(".jsonl"))
    missing = carry_out(wanted, place, processes=jobs, minutes=None, say=say)
    found = collected(wanted, place).get(task)
    if found is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")
        typer.echo(table_of(found["records"]))
    if missing:
        typer.echo(f"{missing} trainings are missing: see above", err=True)
        raise typer.Exit(1)
