"""`python -m benchmarks diversity`: how near the batch-size bound comes to the exact one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def diversity(
    task: Annotated[str, typer.Option(help="Whose bound: digits, cifar10.")] = "digits",
    examples: Annotated[int, typer.Option(min=2, help="Of the task.")] = 500,
    seeds: Annotated[int, typer.Option(min=1, help="Of the projections.")] = 100,
    data: Annotated[Path | None, typer.Option(help="Data folder; else HEELER_DATA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """How near the batch-size bound comes to the exact one, and what it costs a training step."""
    import torch

    from benchmarks.diversity import accuracy, cost
    from experiments.folder import Folder, MissingData
    from experiments.training import versions

    torch.set_num_threads(1)
    try:
        rows = accuracy(task, Folder(data), examples=examples, seeds=seeds)
    except (MissingData, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    costs = [cost(model, batch) for model in ("lenet", "mlp") for batch in (16, 64)]
    if as_json:
        typer.echo(json.dumps({"versions": versions("cpu"), "accuracy": rows, "cost": costs}, indent=1))
        return
    for row in rows:
        typer.echo(
            f"{task} {row['moment']:<6} {row['way']:<8} exact {row['exact']:.4g}: within 10% {row['within']:.0%}, "
            f"covered {row['covered']:.0%}, rms error {row['rms']:.1%}"
        )
    for one in costs:
        typer.echo(
            f"{one['model']} batch {one['batch']}: step {one['step_ms']:.2f} ms; the table once per epoch "
            f"{one['table_us']:.1f} µs per step, {one['table_share']:.2%}; streaming {one['stream_us']:.1f} µs, "
            f"{one['stream_share']:.2%}"
        )
