"""`heeler select`: choose a subset from a saved state, into a file, with a picture."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Annotated, Any

import typer


def select(
    state: Annotated[Path, typer.Argument(help="A file that heeler.save wrote, or the rows as a .npy file (N, K).")],
    k: Annotated[str, typer.Option("--k", help="How many, or the fraction: 500, or 0.1.")],
    method: Annotated[str, typer.Option(help="random, stratified, halve, kernel-thin, facility, match, ...")] = "halve",
    out: Annotated[Path | None, typer.Option(help="Where the choice goes: NAME.csv or NAME.json.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where a picture goes: NAME.png.")] = None,
    labels: Annotated[Path | None, typer.Option(help="A class per example, (N,) in a .npy file.")] = None,
    target: Annotated[Path | None, typer.Option(help="Validation rows, (V, K) in a .npy file.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is random.")] = 0,
) -> None:
    """Choose examples, with weights, from the table of gradients that training left; say how chance would have done."""
    import heeler
    from heeler.ordering import CheckpointError

    if out is not None and out.suffix not in (".csv", ".json"):
        raise typer.BadParameter(f"{out} must end in .csv or .json")
    try:
        source = _array(state) if state.suffix == ".npy" else heeler.selection.rows_of(state)
        chosen = heeler.select(
            source,
            _number(k),
            method,
            labels=None if labels is None else _array(labels),
            target=None if target is None else _array(target),
            seed=seed,
        )
    except (ValueError, CheckpointError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if out is not None:
        write(chosen, out)
    if picture is not None:
        from heeler.cli.select_picture import draw

        draw(heeler.selection.rows_of(source), chosen, picture)
    typer.echo(str(chosen))


def write(chosen: Any, out: Path) -> None:
    """indices, weights and scores as CSV, a line per example; or all of it as JSON."""
    if out.suffix == ".json":
        out.write_text(json.dumps(chosen.as_dict()) + "\n")
        return
    columns = {"index": chosen.indices.tolist(), "weight": chosen.weights.tolist()}
    if chosen.scores is not None:
        columns["score"] = chosen.scores[chosen.indices].tolist()
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _number(k: str) -> int | float:
    try:
        return float(k) if "." in k or "e" in k.lower() else int(k)
    except ValueError:
        raise typer.BadParameter(f"--k {k} is no number: give a count as 500, or a fraction as 0.1") from None


def _array(path: Path) -> Any:
    import numpy as np

    return np.load(path, mmap_mode="r", allow_pickle=False)
