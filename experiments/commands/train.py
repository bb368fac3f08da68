"""`python -m experiments train`: one of the papers' tasks, each rule and seed, a table, curves.png and report.html."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.plans import RULES, comparison
from experiments.tasks import TASKS, get_task

Lists = "Several with commas between."


def train(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    rules: Annotated[str, typer.Option(help=f"Ordering rules. {Lists}")] = ",".join(RULES),
    workers: Annotated[int | None, typer.Option(min=1, help="Workers; as published by default.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each rule.")] = 3,
    shards: Annotated[str | None, typer.Option(help="local (each worker its own) or global.")] = None,
    sorted_shards: Annotated[bool, typer.Option(help="Shards cut from the examples sorted by label.")] = False,
    lr: Annotated[str | None, typer.Option(help=f"Learning rate. {Lists}")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples of one worker in a step.")] = None,
    block_size: Annotated[int | None, typer.Option(min=1, help="Examples per block: herd in two levels.")] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Numbers in a sketch; else the library's default.")] = None,
    layers: Annotated[str | None, typer.Option(help="Layers tapped: all, or a budget such as 2%.")] = None,
    exact: Annotated[bool | None, typer.Option(help="Full gradients, not sketches; else as the task has it.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A task's own, as NAME=JSON: limit=14080.")] = None,
    bounds: Annotated[bool, typer.Option(help="Record every rule's herding bound; costs time.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; small models are fastest with one.")] = 1,
    data: Annotated[Path | None, typer.Option(help="Data folder; else HEELER_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of results; by default runs/TASK.")] = None,
    simulate: Annotated[bool, typer.Option(help="All workers in this process, or real ones over gloo.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train a task in several orders and compare them. A finished run is not repeated."""
    given = {"workers": workers, "epochs": epochs, "shards": shards, "batch_size": batch_size, "exact": exact}
    given |= {"dim": dim, "layers": layers, "block_size": block_size}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    changes |= {"device": device, "sorted_shards": sorted_shards, "bounds": bounds}
    try:
        get_task(task)
        changes["options"] = parse_options(option or [])
        names = [name.strip() for name in rules.split(",") if name.strip()]
        rates = [float(rate) for rate in lr.split(",")] if lr else []
        runs = []
        for rate in rates or [get_task(task).defaults["lr"]]:
            label = f"{{rule}} lr={rate:g}" if len(rates) > 1 else ""
            runs += comparison(task, names, seeds, label, **{**changes, "lr": rate})
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not simulate:
        from experiments.processes import carry_out_in_processes

        carry_out_in_processes(runs, data, out or Path("runs") / task)
    carry_out_and_show(runs, data=data, out=out or Path("runs") / task, as_json=as_json, threads=threads)


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """ "limit=64" → {"limit": 64}; a value that is not JSON is text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, found, value = pair.partition("=")
        if not found:
            raise ValueError(f"--option {pair!r} is not NAME=VALUE")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def carry_out_and_show(runs: list[Any], *, data: Path | None, out: Path, as_json: bool, threads: int = 1) -> None:
    """Run what is not finished, with live progress; then the table, the picture and the report."""
    import torch
    from rich.console import Console

    from experiments.folder import Folder, MissingData
    from experiments.live import run_all
    from experiments.report import write_report
    from experiments.summary import group, summarise
    from experiments.tables import as_numbers, print_summary

    torch.set_num_threads(threads)
    console = Console(stderr=as_json)
    try:
        results = run_all(runs, console=console, folder=Folder(data), out=out, quiet=as_json)
    except MissingData as error:
        raise typer.BadParameter(str(error)) from None
    if not results:
        raise typer.Exit(1)
    tables = [summarise(task, lines) for task, lines in group(results).items()]
    write_report(out)
    if as_json:
        typer.echo(json.dumps([as_numbers(table) for table in tables]))
    else:
        for table in tables:
            print_summary(table, console)
        console.print(f"Curves: {out / 'curves.png'}. Report: {out / 'report.html'}.")
    if len(results) < len(runs):
        raise typer.Exit(1)
