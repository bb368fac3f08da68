"""Pictures: how the work grows with the batch against what the bound said, and the bound while training goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from heeler.experiments import charts
from heeler.experiments.diversity.saturation import DELTA, Saturation
from heeler.experiments.diversity.variants import PLAIN
from heeler.experiments.tasks import get_task

COLOURS = ("#000000", "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#D55E00")


def draw(found: Sequence[Saturation], target: Path | BinaryIO) -> None:
    """A row a task: the plain task's work by batch, that of all variants, and their bounds by epoch. PNG."""
    plt = charts.pyplot()
    tasks = list(dict.fromkeys(one.task for one in found))
    figure, grid = plt.subplots(len(tasks), 3, figsize=(16, 4.2 * len(tasks)), layout="constrained", squeeze=False)
    for row, task in zip(grid, tasks, strict=True):
        lines = [one for one in found if one.task == task]
        for axes, kinds in zip(row, (("work", lines[:1]), ("work", lines), ("bound", lines)), strict=True):
            draw_panel = work_panel if kinds[0] == "work" else bound_panel
            draw_panel(axes, kinds[1])
        row[0].set_title(get_task(task).summary, loc="left", fontweight="bold")
        row[1].set_title("all variants; dashed: by the bound", loc="left", fontsize=10)
        row[2].set_title("while the smallest batch trains", loc="left", fontsize=10)
    figure.canvas.draw()
    for axes in grid.flat:
        charts.name_lines(axes)
    figure.savefig(target, dpi=120, format="png")
    plt.close(figure)


def work_panel(axes: Any, lines: Sequence[Saturation]) -> None:
    """Passes over the data to the same loss, over those of the smallest batch; measured, and by the bound."""
    for number, one in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        sizes = np.array([p.batch for p in one.points], float)
        axes.plot(sizes, [one.growth(p) for p in one.points], color=colour, marker="o", linewidth=2, label=one.variant)
        if np.isfinite(one.bound):
            smooth = np.geomspace(sizes[0], max(sizes[-1], 2 * sizes[0]), 60)
            axes.plot(smooth, [one.predicted_growth(b) for b in smooth], color=colour, linestyle="--", linewidth=1)
    if len(lines) == 1:
        _mark(axes, lines[0])
    axes.axhline(1 + DELTA, color="#7f7f7f", linewidth=1, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="work to the same loss ÷ smallest batch's")
    charts.plain(axes)


def _mark(axes: Any, one: Saturation) -> None:
    """Where work has grown by δ: said and measured."""
    places = (("bound", one.predicted), ("measured", one.measured))
    for height, (name, batch) in zip((0.97, 0.89), places, strict=True):
        if batch is not None and np.isfinite(batch):
            axes.axvline(batch, color="#7f7f7f", linewidth=1, linestyle="--" if name == "bound" else "-")
            axes.annotate(
                f" +{DELTA:.0%}, {name}: {batch:.0f}", (batch, height), xycoords=("data", "axes fraction"), fontsize=9,
                va="top",
            )  # fmt: skip


def bound_panel(axes: Any, lines: Sequence[Saturation]) -> None:
    """B(w) by epoch; logarithmic."""
    for number, one in enumerate(lines):
        bounds = np.array([np.nan if b is None else b for b in one.bounds], float)
        if np.isfinite(bounds).any():
            axes.plot(
                np.arange(bounds.size), bounds, color=COLOURS[number % len(COLOURS)], linewidth=2, label=one.variant
            )
    axes.set(yscale="log", xlabel="epoch", ylabel="batch-size bound B(w)")
    charts.plain(axes)


def first_is_plain(found: Sequence[Saturation]) -> list[Saturation]:
    """The plain task before its variants."""
    return sorted(found, key=lambda one: one.variant != PLAIN)  # a stable sort
