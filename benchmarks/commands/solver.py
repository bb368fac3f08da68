"""`python -m benchmarks solver`: a balance sweep and solves against the floor of reading the table once."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from benchmarks.solver import bench_solver


def solver(
    examples: Annotated[int, typer.Option(min=1, help="Rows of the table.")] = 1_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Numbers in a row.")] = 256,
    dtype: Annotated[str, typer.Option(help="float16 or float32.")] = "float16",
    sweeps: Annotated[int, typer.Option(min=1, help="Sweeps in the solve, at most.")] = 10,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step in herd's solve.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs that the medians are taken over.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the table and its order.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time one balance sweep, one solve by sweeps and one of herd against reading the rows once and adding them up."""
    try:
        result = bench_solver(
            examples=examples,
            dim=dim,
            dtype=dtype,
            sweeps=sweeps,
            batch_size=batch_size,
            repeats=repeats,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{examples:,} × {dim}, {dtype}, median of {repeats}")
    for column in ("", "seconds", "× floor"):
        table.add_column(column, justify="right" if column else "left")
    floor = result["gather_sum_seconds"]
    table.add_row("floor: read and add up", f"{floor:.3f}", "1")
    table.add_row("one balance sweep", f"{result['pass_seconds']:.3f}", f"{result['ratio']:.2f}")
    walked = f"one solve, {result['solve_passes']} sweeps"
    table.add_row(walked, f"{result['solve_seconds']:.3f}", f"{result['solve_ratio']:.1f}")
    by_batches = f"herd: one solve, {result['batches_rounds']} rounds, batches of {batch_size}"
    table.add_row(by_batches, f"{result['batches_seconds']:.3f}", f"{result['batches_ratio']:.1f}")
    Console().print(table)
    Console().print(
        f"peak memory: {result['peak_memory_ratio']:.2f} × the table by sweeps, "
        f"{result['batches_peak_memory_ratio']:.2f} × with herd\n"
        f"squares of the steps' sums with herd: {result['batches_left']:.2f} × random's"
    )
