"""`python -m benchmarks overhead`: what a tapped training step costs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from benchmarks.overhead import describe, measure_overhead


def overhead(
    model: Annotated[str, typer.Option(help="mlp, lenet, resnet or gpt.")] = "mlp",
    size: Annotated[
        str, typer.Option(help="mlp: widths such as 784-512-10; resnet: width; gpt: 124m, 2048 or small.")
    ] = "",
    batch: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 128,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile both models.")] = False,
    cuda_graph: Annotated[bool, typer.Option("--cuda-graph", help='Compile with mode="reduce-overhead".')] = False,
    layers: Annotated[str, typer.Option(help="default, all or linear.")] = "default",
    dim: Annotated[int, typer.Option(min=1, help="Numbers of a sketch.")] = 256,
    optimizer: Annotated[str, typer.Option(help="sgd or adamw.")] = "sgd",
    blocks: Annotated[int, typer.Option(min=1, help="How often plain and tapped take turns.")] = 15,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 leaves torch's choice.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Time plain and tapped training steps of the same model, taking turns; medians, with the spread."""
    try:
        result = measure_overhead(
            model=model,
            size=size,
            batch=batch,
            device=device,
            compile=compiled,
            cuda_graph=cuda_graph,
            layers=layers,
            dim=dim,
            optimizer=optimizer,
            blocks=blocks,
            threads=threads,
        )
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(json.dumps(result) if as_json else describe(result))
