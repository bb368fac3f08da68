"""A grid of the images that training cannot explain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from numpy.typing import NDArray

ACROSS = 10


def draw(found: dict[str, list[Any]], images: NDArray[Any], target: Path, titles: Sequence[str] | None = None) -> None:
    """PNG: the suspects' images in their order, each with its number and label, or its own title.

    images: (N, H, W) or (N, H, W, C).
    """
    count = len(found["index"])
    rows = max(1, math.ceil(count / ACROSS))
    figure = Figure(figsize=(ACROSS, 1.3 * rows), layout="constrained")
    axes = figure.subplots(rows, ACROSS, squeeze=False).reshape(-1)
    labels = found.get("label", [""] * count)
    for place, axis in enumerate(axes):
        axis.axis("off")
        if place < count:
            number = found["index"][place]
            axis.imshow(images[number], cmap="gray_r" if images.ndim == 3 else None)
            axis.set_title(titles[place] if titles else f"#{number}  {labels[place]}".strip(), fontsize=7)
    figure.savefig(target, dpi=120, format="png")
