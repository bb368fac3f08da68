"""Pictures: how the work grows with the batch against what the bound said, and the bound while training goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from experiments import charts
from experiments.diversity.saturation import DELTA, Saturation
from experiments.diversity.variants import MECHANISMS, PLAIN
from experiments.tasks import get_task

# Okabe and Ito's colours, told apart with any colour vision; the same variant has the same one in every panel.
COLOURS = {"with replacement": "#0072B2", "dropout": "#E69F00", "langevin": "#CC79A7", "quantize": "#8C6D31"}
OTHERS = ("#56B4E9", "#009E73", "#7f7f7f")
BLACK = "#000000"


def colour_of(one: Saturation, lines: Sequence[Saturation]) -> str:
    """A variant's own; replicated ones one after the other."""
    if one.variant == PLAIN:
        return BLACK
    if one.variant.startswith("order"):
        return charts.COLOURS.get(one.variant.removeprefix("order "), OTHERS[-1])
    rest = [other.variant for other in lines if other.variant.startswith("replicated")]
    return COLOURS.get(one.variant) or OTHERS[rest.index(one.variant) % len(OTHERS)]


def draw(found: Sequence[Saturation], target: Path | BinaryIO) -> None:
    """A row per task: the plain task's work by batch and its speed-up; the work of all variants; their bounds. PNG."""
    plt = charts.pyplot()
    tasks = {one.task: [other for other in found if other.task == one.task] for one in found}
    columns = 4 if any(len(lines) > 1 for lines in tasks.values()) else 3
    figure, grid = plt.subplots(
        len(tasks), columns, figsize=(5.2 * columns, 4.2 * len(tasks)), layout="constrained", squeeze=False
    )
    for row, (task, lines) in zip(grid, tasks.items(), strict=True):
        work_panel(row[0], lines[:1])
        row[0].set_title(get_task(task).summary, loc="left", fontweight="bold")
        speedup_panel(row[1], lines[0])
        if columns == 4:
            work_panel(row[2], lines)
            row[2].set_title("all variants; dashed: by the bound", loc="left", fontsize=10)
        bound_panel(row[-1], lines)
        row[-1].set_title("while the smallest batch trains", loc="left", fontsize=10)
    figure.canvas.draw()
    for axes in grid.flat:
        charts.name_lines(axes)
    figure.savefig(target, dpi=90, format="png")
    plt.close(figure)


def work_panel(axes: Any, lines: Sequence[Saturation]) -> None:
    """Passes over the data to the same loss, over those of the smallest batch; measured, and by the bound."""
    for one in lines:
        colour = colour_of(one, lines)
        sizes = np.array([p.batch for p in one.points], float)
        axes.plot(sizes, [one.growth(p) for p in one.points], color=colour, marker="o", linewidth=2, label=one.variant)
        if np.isfinite(one.bound):
            smooth = np.geomspace(sizes[0], max(sizes[-1], 2 * sizes[0]), 60)
            axes.plot(smooth, [one.predicted_growth(b) for b in smooth], color=colour, linestyle="--", linewidth=1)
    if len(lines) == 1:
        _mark(axes, lines[0])
    axes.axhline(1 + DELTA, color="#7f7f7f", linewidth=1, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="work to the same loss ÷ smallest batch's")
    ticks = sorted({p.batch for one in lines for p in one.points})
    axes.set_xticks(ticks, [str(size) for size in ticks], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:.0e}"[0] in "235" else "")
    charts.plain(axes)


def speedup_panel(axes: Any, one: Saturation) -> None:
    """Steps of the smallest batch over those of others: what many workers gain where a step takes as long for all."""
    sizes = np.array([p.batch for p in one.points], float)
    ideal = sizes / sizes[0]
    axes.plot(sizes, ideal, color="#7f7f7f", linewidth=1, label="ideal")
    axes.plot(
        sizes, ideal / [one.growth(p) for p in one.points], color=BLACK, marker="o", linewidth=2, label="measured"
    )
    if np.isfinite(one.bound):
        said = ideal / [one.predicted_growth(b) for b in sizes]
        axes.plot(sizes, said, color=BLACK, linestyle="--", linewidth=1, label="by the bound")
    axes.set(xscale="log", yscale="log", xlabel="batch size", ylabel="fewer steps to the same loss, times")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")
    charts.plain(axes)


def _mark(axes: Any, one: Saturation) -> None:
    """Where work has grown by δ: said and measured."""
    places = (("bound", one.predicted), ("measured", one.measured))
    for height, (name, batch) in zip((0.97, 0.89), places, strict=True):
        if batch is not None and np.isfinite(batch):
            axes.axvline(batch, color="#7f7f7f", linewidth=1, linestyle="--" if name == "bound" else "-")
            inner = batch**2 < one.points[0].batch * one.points[-1].batch  # write towards the middle
            axes.annotate(
                f" +{DELTA:.0%}, {name}: {batch:.0f} ", (batch, height), xycoords=("data", "axes fraction"), fontsize=9,
                va="top", ha="left" if inner else "right",
            )  # fmt: skip


def bound_panel(axes: Any, lines: Sequence[Saturation]) -> None:
    """B(w) by epoch; logarithmic."""
    for one in lines:
        bounds = np.array([np.nan if b is None else b for b in one.bounds], float)
        if np.isfinite(bounds).any():
            colour = colour_of(one, lines)
            axes.plot(np.arange(bounds.size), bounds, color=colour, linewidth=2, label=one.variant)
    axes.set(yscale="log", xlabel="epoch", ylabel="batch-size bound B(w)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:,g}")
    charts.plain(axes)


def in_order(found: Sequence[Saturation]) -> list[Saturation]:
    """The plain task first, then replicated examples, mechanisms, and orders."""

    def place(one: Saturation) -> tuple[int, int]:
        kinds = (PLAIN, "with replacement", "replicated", *MECHANISMS, "order")
        kind = next((i for i, kind in enumerate(kinds) if one.variant.startswith(kind)), len(kinds))
        digits = "".join(c for c in one.variant if c.isdigit())
        return kind, int(digits or 0)

    return sorted(found, key=place)
