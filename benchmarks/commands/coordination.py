"""`python -m benchmarks coordination`: what many workers' common order costs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from benchmarks.coordination import measure_coordination


def coordination(
    workers: Annotated[str, typer.Option(help="Numbers of workers, with commas between.")] = "4,16,64",
    examples: Annotated[int, typer.Option(min=2, help="Examples of all workers together.")] = 100_000,
    dim: Annotated[int, typer.Option(min=1, help="Numbers in a sketch.")] = 256,
    parameters: Annotated[int, typer.Option(min=1, help="Numbers in a full gradient, for CD-GraB.")] = 1_000_000,
    step_ms: Annotated[float, typer.Option(min=0.0, help="What a training step takes, in milliseconds.")] = 50.0,
    batch: Annotated[int, typer.Option(min=1, help="Examples of one worker in a step.")] = 16,
    shards: Annotated[str, typer.Option(help="global: one order, dealt out; local: every worker's own.")] = "global",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Run real processes over gloo and count bytes, seconds and waits, against published CD-GraB."""
    try:
        counts = [int(count) for count in workers.split(",")]
    except ValueError:
        raise typer.BadParameter(f"--workers takes numbers such as 4,16, not {workers!r}") from None
    if min(counts) < 2:
        raise typer.BadParameter("--workers: one worker alone has nobody to coordinate with")
    if shards not in ("global", "local"):
        raise typer.BadParameter(f"--shards is global or local, not {shards!r}")
    result = measure_coordination(
        counts,
        examples=examples,
        dim=dim,
        parameters=parameters,
        step_ms=step_ms,
        batch_size=batch,
        shards=shards,
        say=lambda line: None if as_json else typer.echo(line, err=True),
    )
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(
        f"{examples:,} examples, sketches of {dim}, {parameters:,} parameters, steps of {step_ms:g} ms with {batch} "
        f"examples per worker, {shards} shards, {result['cores']} cores"
    )
    for row in result["workers"]:
        typer.echo(_lines(row))


def _lines(row: dict[str, Any]) -> str:
    ours, alike, published = row["heeler"], row["all_ranks_alike"], row["published_cd_grab"]
    return (
        f"{row['workers']} workers, an epoch of {row['epoch_seconds']:.1f} s:\n"
        f"  Heeler: {ours['bytes_per_example']:,.0f} bytes per example, {ours['bytes_per_worker'] / 1e6:,.2f} MB per "
        f"worker; exchange {ours['exchange_seconds']:.2f} s + solve {ours['solve_seconds']:.2f} s "
        f"({ours['exchange_and_solve_share']:.1%} of the epoch); training waits {ours['wait_seconds']:.3f} s "
        f"({ours['wait_share']:.2%}), after the first epoch {ours['first_wait_seconds']:.2f} s "
        f"({ours['first_wait_share']:.1%}); epochs take {ours['epoch_ratio']:.3f} of those without, the first "
        f"{ours['epoch_ratio_each'][0]:.3f}\n"
        f"  all ranks alike: {alike['bytes_per_example']:,.0f} bytes per example, "
        f"{alike['bytes_per_worker'] / 1e6:,.2f} MB per worker; exchange {alike['exchange_seconds']:.2f} s + solve "
        f"{alike['solve_seconds']:.2f} s ({alike['exchange_and_solve_share']:.1%})\n"
        f"  published CD-GraB: {published['bytes_per_example']:,.0f} bytes per example "
        f"({row['times_fewer_bytes']:,.0f}×), {published['bytes_per_worker'] / 1e6:,.0f} MB per worker; exchange "
        f"{published['exchange_seconds']:.1f} s ({published['exchange_share']:.0%}); {published['note']}"
    )
