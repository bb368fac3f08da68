"""`python -m benchmarks levels`, `levels-scale`, `scale-constants`, `scale-needs`: orders in two levels."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.levels import compare_levels, run_scale
from benchmarks.scale import measure_constants, scale_table


def levels(
    examples: Annotated[int, typer.Option(min=2, help="Rows of the table.")] = 1_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Numbers in a row.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 64,
    block_size: Annotated[int | None, typer.Option(min=1, help="Examples per block; by default herd's own.")] = None,
    decay: Annotated[float, typer.Option(min=0, help="Numbers fall off as 1/k^decay; 0: all alike.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the table and the orders.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Compare herd in two levels with herd in one: the bounds of their orders, and the time to find them."""
    result = compare_levels(examples, dim, batch_size, block_size, decay, seed)
    if as_json:
        typer.echo(json.dumps(result))
        return
    for name in ("one", "two"):
        bound = result[f"{name}_bound"]
        typer.echo(
            f"{name}: {result[f'{name}_seconds']:.2f} s, prefixes {bound['rms']:.4g}, at most {bound['two']:.4g}"
        )
    typer.echo(
        f"two levels: {result['seconds_ratio']:.2f} × the time, {result['bound_ratio']['rms']:.2f} × the prefixes "
        f"(random {result['random_bound']['rms']:.4g}); {examples:,} × {dim}, blocks of {result['block_size']:,}"
    )


def levels_scale(
    examples: Annotated[int, typer.Option(min=2, help="Examples.")] = 100_000_000,
    dim: Annotated[int, typer.Option(min=1, help="Numbers in a sketch.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 4096,
    folder: Annotated[Path | None, typer.Option(help="Where the table's file goes, and is removed from.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run two epochs' bookkeeping with the table in a file: seconds, memory, and every example once."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        result = run_scale(Path(scratch) / "table", examples, dim, batch_size)
    if as_json:
        typer.echo(json.dumps(result))
        return
    for epoch in ("epoch_1", "epoch_2"):
        found = result[epoch]
        typer.echo(
            f"{epoch}: {found['seconds']:.0f} s, of it {found['filing_seconds']:.0f} s to file sketches and "
            f"{found['first_index_seconds']:.1f} s to the first index; prefixes {found['bound']:.4g}"
        )
    typer.echo(
        f"{examples:,} × {dim}: at most {result['peak_bytes'] / 1e9:.2f} GB of memory, of it "
        f"{result['check_bytes'] / 1e9:.2f} GB for this check; file {result['file_bytes'] / 1e9:.2f} GB, "
        f"state {result['state_bytes'] / 1e6:.1f} MB in {result['state_seconds']:.2f} s"
    )


def scale_constants(
    folder: Annotated[Path | None, typer.Option(help="Where the tables' files go, and are removed from.")] = None,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of each table.")] = 8,
) -> None:
    """Measure what filing, closing, expanding and drawing take per example, as JSON."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        typer.echo(json.dumps(measure_constants(Path(scratch), blocks), indent=2))


def scale_needs(
    constants: Annotated[Path, typer.Argument(help="What scale-constants printed.")],
    examples: Annotated[int, typer.Option(min=1, help="Examples of all workers.")] = 10**9,
) -> None:
    """Compute what each of 8 to 1,024 workers needs for its share of the examples, as a table."""
    typer.echo(scale_table(json.loads(constants.read_text()), examples))
