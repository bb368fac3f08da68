"""`python -m benchmarks epoch`: what the turnover between epochs costs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from benchmarks.epoch import measure_epoch


def epoch(
    examples: Annotated[int, typer.Option(min=2, help="Examples in the dataset.")] = 1_000_000,
    dim: Annotated[int, typer.Option(min=2, help="Numbers in a sketch.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Examples in a batch.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time the wait between two epochs, and every index against RandomSampler."""
    result = measure_epoch(examples=examples, dim=dim, batch_size=batch)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(
        f"{examples:,} examples, sketches of {dim}: {result['turnover_seconds']:.2f} s from the last step of an epoch "
        f"to the next one's first index\n(the solve takes {result['solve_seconds']:.2f} s, most of it while the last "
        f"batches train; after the first epoch, which cannot start early: {result['first_turnover_seconds']:.2f} s)\n"
        f"an index: {result['index_ns']:.0f} ns, RandomSampler {result['random_sampler_index_ns']:.0f} ns: "
        f"{result['ratio']:.2f}×"
    )
