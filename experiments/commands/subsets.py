"""`python -m experiments subsets`: train on subsets chosen by every method, random and stratified beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from experiments.subsets import FRACTIONS
from experiments.tasks import TASKS
from heeler.selection import METHODS


def subsets(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    out: Annotated[Path, typer.Option(help="Where the JSON goes; written anew after every seed.")] = Path(
        "subsets.json"
    ),
    methods: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(METHODS),
    fractions: Annotated[str, typer.Option(help="Shares of the examples, with commas.")] = ",".join(
        map(str, FRACTIONS)
    ),
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each.")] = 3,
    warm_up: Annotated[int, typer.Option(min=1, help="Epochs on all examples that leave the table.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of training on a subset.")] = 1000,
    weighted: Annotated[bool, typer.Option(help="Weight the losses by the selection's weights.")] = True,
    option: Annotated[list[str] | None, typer.Option(help="A task's own, as NAME=JSON: limit=14080.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Data folder; else HEELER_DATA.")] = None,
) -> None:
    """Train a task on subsets of its examples and print a table of test accuracies."""
    import torch

    from experiments.commands.train import parse_options
    from experiments.folder import Folder
    from experiments.subsets import subsets as carried_out
    from experiments.subsets import table_of

    torch.set_num_threads(threads)
    records = []
    try:
        names = [name for name in methods.split(",") if name]
        shares = [float(share) for share in fractions.split(",")]
        for record in carried_out(
            task,
            Folder(data),
            methods=names,
            fractions=shares,
            seeds=seeds,
            warm_up=warm_up,
            steps=steps,
            weighted=weighted,
            device=device,
            options=parse_options(option or []),
        ):
            records.append(record)
            if record.get("method") == names[-1] and record["fraction"] == shares[-1]:  # a seed is done
                out.write_text(json.dumps({"setting": records[0], "records": records[1:]}, indent=1) + "\n")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(table_of(records[1:]))
