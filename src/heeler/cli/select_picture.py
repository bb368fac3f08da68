"""The picture of a selection: the table in two dimensions, chosen examples marked, weights as sizes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from heeler.selection import Rows, Selection

SHOWN = 20_000
"""Points of each kind that are drawn at most, and rows that the two directions are found from."""


def draw(rows: Rows, chosen: Selection, target: Path) -> None:
    """PNG: the two directions in which the rows vary most."""
    rng = np.random.default_rng(0)
    every = some(np.arange(len(rows)), rng)
    places = some(np.arange(len(chosen)), rng)
    sample = rows.take(every)
    centre = sample.mean(axis=0)
    axes_ = directions(sample - centre)
    figure = Figure(figsize=(7.2, 6.2), layout="constrained")
    axes = figure.subplots()
    x, y = axes_ @ (sample - centre).T
    axes.scatter(x, y, s=4, color="#c8c8c8", linewidths=0, label=f"all {len(rows):,} examples")
    x, y = axes_ @ (rows.take(chosen.indices[places]) - centre).T
    weights = chosen.weights[places]
    sizes = 14 * weights / weights.mean()
    axes.scatter(
        x, y, s=sizes, color="#D55E00", alpha=0.6, linewidths=0, label=f"{len(chosen):,} chosen, area = weight"
    )
    chance = chosen.random_error
    axes.set_title(f"{chosen.method}: error {chosen.error:.2g}, random {chance.mean:.2g} ± {chance.sd:.1g}", loc="left")
    axes.set(xlabel="first principal direction", ylabel="second")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(target, dpi=140, format="png")


def directions(centred: NDArray[np.floating]) -> NDArray[np.floating]:
    """(2, K) principal directions of (n, K) centred rows; zeros for a missing second one."""
    found = np.linalg.eigh(centred.T.astype(np.float64) @ centred)[1].T[::-1][:2]
    return np.vstack([found, np.zeros((2 - len(found), centred.shape[1]))])


def some(values: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    return values if values.size <= SHOWN else np.sort(rng.choice(values, SHOWN, replace=False))
