"""`python -m experiments diversity`: how far larger batches go on a task, against what the batch-size bound said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.commands.train import Lists, parse_options
from experiments.diversity.variants import MECHANISMS, variants
from experiments.tasks import TASKS, get_task


def diversity(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    batch_sizes: Annotated[
        str, typer.Option(help=f"Each a multiple of the one before. {Lists}")
    ] = "1,4,16,64,256,1024",
    mechanisms: Annotated[str, typer.Option(help=f"What raises diversity. {Lists}")] = ",".join(MECHANISMS),
    replication: Annotated[str, typer.Option(help=f"Times that a part of the examples is repeated. {Lists}")] = "4,16",
    orders: Annotated[str, typer.Option(help=f"Ordering rules; replacement draws with it. {Lists}")] = (
        "random,replacement,herd"
    ),
    epochs: Annotated[int, typer.Option(min=1, help="Of the smallest batch; what it reaches is the target.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each setting.")] = 3,
    option: Annotated[list[str] | None, typer.Option(help="A task's own, as NAME=JSON: limit=14080.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; small models are fastest with one.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Data folder; else HEELER_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results; by default runs/diversity-TASK.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure gradient diversity, and where larger batches stop to pay. A finished run is not repeated."""
    try:
        get_task(task)
        sizes = [int(size) for size in batch_sizes.split(",")]
        if not sizes or min(sizes) < 1:
            raise ValueError("--batch-sizes are positive numbers, with commas between")
        wanted = variants(_names(mechanisms), [int(r) for r in _names(replication)], _names(orders))
        options = parse_options(option or [])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    folder = out or Path("runs") / f"diversity-{task}"
    settings: dict[str, Any] = {"batch_sizes": sizes, "epochs": epochs, "seeds": seeds, "device": device}
    _carry_out_and_show(task, wanted, data, folder, {**settings, "options": options}, as_json, threads)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _carry_out_and_show(
    task: str,
    wanted: list[Any],
    data: Path | None,
    out: Path,
    settings: dict[str, Any],
    as_json: bool,
    threads: int,
) -> None:
    import torch
    from rich.console import Console

    from experiments.diversity.report import as_numbers, print_table, write_report
    from experiments.diversity.search import Sweep
    from experiments.folder import Folder, MissingData

    torch.set_num_threads(threads)
    console = Console(stderr=as_json)
    try:
        with console.status("") as status:

            def note(run: Any, record: dict[str, Any]) -> None:
                if not as_json and record["kind"] == "epoch":
                    where = f"batch {run.batch_size}, rate {run.lr:.3g}, seed {run.seed}"
                    status.update(f"{run.task}, {run.name}: {where}, epoch {record['epoch']}/{run.epochs}")

            for variant in wanted:
                Sweep(task, variant, Folder(data), out, on_record=note, **settings).carry_out()
        found = write_report(out)
    except (MissingData, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps([as_numbers(one) for one in found]))
    else:
        print_table(found, console)
        console.print(f"Pictures: {out / 'diversity.png'}. Report: {out / 'report.html'}.")
