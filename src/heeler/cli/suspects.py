"""`heeler suspects`: the examples that training cannot explain, from a saved state."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Annotated

import typer


def suspects(
    state: Annotated[Path, typer.Argument(help="A file that heeler.save wrote.")],
    k: Annotated[int, typer.Option("--k", min=1, help="How many.")] = 20,
    labels: Annotated[Path | None, typer.Option(help="A class per example, (N,) in a .npy file.")] = None,
    images: Annotated[Path | None, typer.Option(help="The images, (N, H, W) or (N, H, W, C) in a .npy file.")] = None,
    picture: Annotated[Path, typer.Option(help="Where a picture goes, if there are images.")] = Path("suspects.png"),
) -> None:
    """Print, as CSV, the examples that training cannot explain: often their labels are wrong."""
    import numpy as np

    import heeler

    try:
        classes = None if labels is None else np.load(labels, allow_pickle=False)
        found = heeler.suspects(state, k, classes)
        pixels = None if images is None else np.load(images, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError) as error:  # CheckpointError is a ValueError
        raise typer.BadParameter(str(error)) from None
    writer = csv.writer(sys.stdout)
    writer.writerow(found)
    writer.writerows(zip(*found.values(), strict=True))
    if pixels is not None:
        from heeler.cli.suspects_picture import draw

        draw(found, pixels, picture)
