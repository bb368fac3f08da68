"""`python -m benchmarks select`: the cost of choosing a subset, and how its error falls with k."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.select import METHODS, bench_select, digits_table, head_table, mixture, mortgages_table, slopes


def select(
    examples: Annotated[int, typer.Option(min=16, help="Rows of the table.")] = 1_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Columns of the table.")] = 256,
    fraction: Annotated[float, typer.Option(help="Share of the rows to choose.")] = 0.1,
    methods: Annotated[str, typer.Option(help="Names, with commas.")] = ",".join(METHODS),
    dtype: Annotated[str, typer.Option(help="float16 or float32.")] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Of the table and the choice.")] = 0,
    out: Annotated[Path | None, typer.Option(help="JSON goes here as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time selections from a mixture against one read of it, with peak memory and errors beside those of chance."""
    try:
        result = bench_select(
            examples=examples, dim=dim, fraction=fraction, methods=methods.split(","), dtype=dtype, seed=seed
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _keep(result, out)
    if as_json:
        typer.echo(json.dumps(result))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{fraction:g} of {examples:,} × {dim}, {dtype}; one read: {result['read_seconds']:.3f} s")
    for column in ("", "seconds", "of CPU", "× read", "peak memory\n× table", "error\n(random)", "mmd\n(random)"):
        table.add_column(column, justify="right" if column else "left")
    for method, row in result["methods"].items():
        cells = [
            f"{row['seconds']:.2f}",
            f"{row['cpu_seconds']:.2f}",
            f"{row['ratio']:.1f}",
            f"{row['peak_memory_ratio']:.2f}",
        ]
        cells += [f"{row[name]:.2g} ({row['random_' + name]['mean']:.2g})" for name in ("error", "mmd")]
        table.add_row(method, *cells)
    Console().print(table)


def select_slopes(
    seeds: Annotated[int, typer.Option(min=1, help="Of the choices.")] = 3,
    data: Annotated[Path | None, typer.Option(help="Data folder; else HEELER_DATA.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON goes here as well.")] = None,
) -> None:
    """How the errors of halving and kernel thinning fall with k, on mixtures and on the tables of real tasks."""
    from experiments.folder import Folder

    methods, folder = ("random", "halve", "kernel-thin", "kernel-thin-linear"), Folder(data)
    result = {
        "mixture 8192 × 16": slopes(mixture(8192, 16, "float32", 0)[0], methods, range(2, 7), seeds),
        "mixture 262144 × 256": slopes(mixture(1 << 18, 256, "float32", 0)[0], methods[:2], range(1, 7), 1),
        "digits 1536 × 650": slopes(digits_table(), methods, range(1, 6), seeds),
        "mortgages 8192 × 19": slopes(mortgages_table(folder), methods, range(2, 7), seeds),
        "LeNet's head 8192 × 850": slopes(head_table(folder), methods[:2], range(1, 6), seeds),
        "the same, sketches 8192 × 64": slopes(head_table(folder, 64), methods, range(2, 7), seeds),
    }
    _keep(result, out)
    typer.echo(json.dumps(result))


def _keep(result: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
