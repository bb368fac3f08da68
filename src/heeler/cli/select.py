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
    method: Annotated[str, typer.Option(help="random, stratified, halve, kernel-thin, facility or match.")] = "halve",
    out: Annotated[Path | None, typer.Option(help="Where the choice goes: NAME.csv or NAME.json.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Where a picture goes: NAME.png.")] = None,
    labels: Annotated[Path | None, typer.Option(help="A class per example, (N,) in a .npy file.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed.")] = 0,
) -> None:
    """Choose examples, with weights, from the table of gradients that training left; say how chance would have done."""
    import heeler
    from heeler.ordering import CheckpointError

    if out is not None and out.suffix not in (".csv", ".json"):
        raise typer.BadParameter(f"{out} must end in .csv or .json")
    try:
        source = _array(state) if state.suffix == ".npy" else heeler.selection.rows_of(state)
        classes = None if labels is None else _array(labels)
        chosen = heeler.select(source, _number(k), method, labels=classes, seed=seed)
    except (ValueError, CheckpointError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if out is not None:
        write(chosen, out)
    if picture is not None:
        from heeler.cli.select_picture import draw

        draw(heeler.selection.rows_of(source), chosen, picture)
    typer.echo(str(chosen))


def write(chosen: Any, out: Path) -> None:
    """Indices and weights as CSV, a line per example; or all of it as JSON."""
    if out.suffix == ".json":
        out.write_text(json.dumps(chosen.as_dict()) + "\n")
        return
    with out.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "weight"])
        writer.writerows(zip(chosen.indices.tolist(), chosen.weights.tolist(), strict=True))


def _number(k: str) -> int | float:
    try:
        return float(k) if "." in k or "e" in k.lower() else int(k)
    except ValueError:
        raise typer.BadParameter(f"--k {k} is no number: give a count as 500, or a fraction as 0.1") from None


def _array(path: Path) -> Any:
    import numpy as np

    return np.load(path, mmap_mode="r", allow_pickle=False)
