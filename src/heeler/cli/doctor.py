"""`heeler doctor`: what Heeler would do in a run, before the run."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import typer


def doctor(
    model: Annotated[
        str, typer.Argument(help="package.module:NAME or script.py:NAME: a model, or a function that makes one.")
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of one worker in a step.")],
    examples: Annotated[int | None, typer.Option(min=1, help="Examples in the dataset.")] = None,
    dataset: Annotated[str | None, typer.Option(help="In place of --examples, named as the model.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of the run.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Number of workers.")] = 1,
    order: Annotated[str, typer.Option(help="The ordering rule.")] = "herd",
    layers: Annotated[str | None, typer.Option(help='Layers to sketch: "all"; by default by price.')] = None,
    dim: Annotated[int | None, typer.Option(min=1, help="Dimensions of a sketch, if not the default.")] = None,
    budget: Annotated[float, typer.Option(help="Share of the run's time that Heeler may take; 0: no limit.")] = 0.02,
    shards: Annotated[str, typer.Option(help="global, or local: each worker orders its own shard.")] = "global",
    loss: Annotated[
        str | None, typer.Option(help="Measure a step of this: a function from a model to its loss on one batch.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model first.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Report coverage, cost, break-even point and problems. Exits with 1 if Heeler cannot be used."""
    import torch

    import heeler

    if (examples is None) == (dataset is None):
        raise typer.BadParameter("give --examples N, or --dataset module:NAME")
    net = made(model)
    if not isinstance(net, torch.nn.Module):
        raise typer.BadParameter(f"{model} is a {type(net).__name__}, not a model nor a function that makes one")
    try:
        found = heeler.explain(
            torch.compile(net) if compiled else net,  # type: ignore[arg-type]
            examples if dataset is None else made(dataset),
            batch_size,
            epochs=epochs,
            workers=workers,
            order=order,
            dim=dim,
            layers=layers,
            budget=budget or None,
            shards=shards,  # type: ignore[arg-type]
            loss=None if loss is None else named(loss),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(json.dumps(found.as_dict()) if as_json else str(found))
    if not found.works:
        raise typer.Exit(1)


def made(where: str) -> Any:
    """What is named, or what it returns if it is a function or a class."""
    import torch

    thing = named(where)
    is_recipe = callable(thing) and not isinstance(thing, torch.nn.Module) and not hasattr(thing, "__getitem__")
    return thing() if is_recipe else thing


def named(where: str) -> Any:
    """package.module:NAME, or script.py:NAME; the script runs as if imported, so not what is under `__main__`."""
    place, found, name = where.rpartition(":")
    if not found or not place or not name:
        raise typer.BadParameter(f"{where!r} is not of the form package.module:NAME or script.py:NAME")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise typer.BadParameter(f"there is no file {place}")
        contents = runpy.run_path(place)
    else:
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` has it
        try:
            contents = vars(importlib.import_module(place))
        except ModuleNotFoundError as error:
            raise typer.BadParameter(f"{place} cannot be imported: {error}") from None
    if name not in contents:
        raise typer.BadParameter(f"{place} has no {name}")
    return contents[name]
