"""Curves, drawn so that they can be read in grey, by any eyes, and without a legend to look things up in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from experiments.summary import Floats, Line, Summary
from experiments.tasks import get_task

# Okabe and Ito's colours, told apart with any colour vision. Known rules keep theirs from chart to chart.
COLOURS = {"random": "#7f7f7f", "id-grab": "#E69F00", "cd-grab": "#0072B2", "herd": "#D55E00"}
COLOURS |= {"herd, all layers": "#7A3300", "stratified": "#009E73", "sweeps": "#CC79A7", "herd, strata": "#7A3300"}
OTHERS = ("#009E73", "#CC79A7", "#56B4E9", "#000000", "#F0E442")
DASHES = ("-", "--", "-.", ":")
NAMES = {
    "suboptimality": "distance from the optimum, f(w) − f*",
    "train_loss": "training loss",
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "test_perplexity": "test perplexity",
    "test_smape": "test SMAPE, %",
}


def draw(summaries: Sequence[Summary], target: Path | BinaryIO, *, by_time: bool = True, title: str = "") -> None:
    """A row of panels per task: the curve by epoch, by training seconds, and the test metric. PNG."""
    plt = pyplot()
    columns = 3 if by_time else 2
    figure, grid = plt.subplots(
        len(summaries), columns, figsize=(5.2 * columns, 3.9 * len(summaries)), layout="constrained", squeeze=False
    )
    for row, summary in zip(grid, summaries, strict=True):
        panels = [("epoch", summary.quantity), ("epoch", summary.metric)]
        if by_time:
            panels.insert(1, ("seconds", summary.quantity))
        for axes, (x, y) in zip(row, panels, strict=True):
            panel(axes, summary.lines, x, y)
        row[0].set_title(get_task(summary.task).summary, loc="left", fontweight="bold")
    if title:
        figure.suptitle(title)
    figure.canvas.draw()
    for axes in grid.flat:
        name_lines(axes)
    figure.savefig(target, dpi=140, format="png")
    plt.close(figure)


def draw_grid(summaries: Sequence[Summary], target: Path | BinaryIO, columns: int = 3) -> None:
    """The curves by epoch of many tasks, a panel each. PNG."""
    plt = pyplot()
    rows = -(-len(summaries) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(4.6 * columns, 3.4 * rows), layout="constrained", squeeze=False)
    for axes, summary in zip(grid.flat, summaries, strict=False):
        panel(axes, summary.lines, "epoch", summary.quantity)
        axes.set_title(get_task(summary.task).summary, loc="left", fontsize=9, fontweight="bold")
    for axes in list(grid.flat)[len(summaries) :]:
        axes.set_axis_off()
    figure.canvas.draw()
    for axes in grid.flat:
        name_lines(axes)
    figure.savefig(target, dpi=90, format="png")
    plt.close(figure)


def draw_bounds(curves: dict[str, Floats], target: Path | BinaryIO) -> None:
    """Each line's herding bound by epoch, over that of a random order. PNG."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for (name, values), (colour, dash) in zip(curves.items(), styles(list(curves)), strict=True):
        axes.plot(np.arange(1, values.size + 1), values, color=colour, linestyle=dash, linewidth=2, label=name)
    axes.axhline(1.0, color="#7f7f7f", linewidth=1, linestyle=":")
    axes.set(xlabel="epoch", ylabel="herding bound ÷ random order's", yscale="log")
    axes.set_xlim(right=1.15 * axes.dataLim.x1)
    axes.xaxis.set_major_locator(whole_numbers())
    plain(axes)
    figure.canvas.draw()
    name_lines(axes)
    figure.savefig(target, dpi=120, format="png")
    plt.close(figure)


def panel(axes: Any, lines: Sequence[Line], x: str, y: str) -> None:
    """One chart: the mean over seeds, with all seeds between the shaded edges."""
    logarithmic = _spans_decades(lines, y)
    for line, (colour, dash) in zip(lines, styles([line.name for line in lines]), strict=True):
        seeds = line.all_seeds(y)
        seeds = np.where(np.isfinite(seeds), seeds, np.nan)
        mean, low, high = seeds.mean(axis=0), seeds.min(axis=0), seeds.max(axis=0)
        along: Floats = line.seconds() if x == "seconds" else np.arange(mean.size, dtype=float)
        skip = 0 if y == "suboptimality" else 1  # before training a loss is so large that nothing else could be seen
        axes.plot(along[skip:], mean[skip:], color=colour, linestyle=dash, linewidth=2, label=line.name)
        if len(line.results) > 1:
            axes.fill_between(along[skip:], low[skip:], high[skip:], color=colour, alpha=0.15, linewidth=0)
    axes.set(xlabel="training seconds" if x == "seconds" else "epoch", ylabel=NAMES.get(y, y))
    room = 0.06 + 0.022 * max(len(line.name) for line in lines)  # for the lines' names
    axes.set_xlim(left=0, right=(1 + room) * axes.dataLim.x1)
    if x == "epoch":
        axes.xaxis.set_major_locator(whole_numbers())
    if logarithmic:
        axes.set_yscale("log")
        plain_decimals(axes)
    plain(axes)


def plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)


def whole_numbers() -> Any:
    """Ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=6, integer=True)


def plain_decimals(axes: Any) -> None:
    """On a short logarithmic scale 0.04, not 4 × 10⁻²."""
    low, high = axes.get_ylim()
    if low > 1e-3 and high < 100 * low:
        for which in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            which(lambda value, _: f"{value:g}" if float(f"{value:e}"[0]) in (1, 2, 3, 4, 5, 6, 8) else "")


def _spans_decades(lines: Sequence[Line], y: str) -> bool:
    """Whether a logarithmic scale is called for: a distance from the optimum, or a loss that falls to a fifth."""
    if y == "suboptimality":
        return True
    if not y.endswith("loss"):
        return False
    values = np.concatenate([line.mean(y)[1:] for line in lines])
    values = values[np.isfinite(values)]
    return bool(values.size and values.min() > 0 and values.max() > 5 * values.min())


def styles(names: Sequence[str]) -> list[tuple[Any, str]]:
    """Each line's colour and dash: a rule's own; its variants in shades of it; anything else one after the other."""
    found: list[tuple[Any, str]] = []
    variants: dict[str, list[str]] = {}
    for name in names:
        variants.setdefault(name.split()[0], []).append(name)
    for number, name in enumerate(names):
        rule, own = name.split()[0], variants[name.split()[0]]
        if name in COLOURS:
            found.append((COLOURS[name], "-"))
        elif rule in COLOURS:
            place = own.index(name)
            found.append((_shade(COLOURS[rule], place / max(len(own) - 1, 1)), DASHES[place % len(DASHES)]))
        else:
            found.append((OTHERS[number % len(OTHERS)], DASHES[(number // len(OTHERS)) % len(DASHES)]))
    return found


def _shade(colour: str, share: float) -> tuple[float, ...]:
    """From half white (0) to half black (1)."""
    channels = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    mixed = channels + (1 - channels) * (0.45 - 0.9 * share) if share < 0.5 else channels * (1 - 0.9 * (share - 0.5))
    return tuple(mixed.clip(0, 1).tolist())


def name_lines(axes: Any, gap: float = 14.0, width: float = 60.0) -> None:
    """Write each line's name at its end; names that would cover one another are set one above the other."""
    from matplotlib.patheffects import withStroke

    to_pixels, to_data = axes.transData, axes.transData.inverted()
    ends = []
    for line in axes.get_lines():
        if str(line.get_label()).startswith("_"):
            continue  # a rule drawn across, not a curve
        x, y = np.asarray(line.get_xdata(), float), np.asarray(line.get_ydata(), float)
        finite = np.flatnonzero(np.isfinite(y))
        if finite.size:
            ends.append((to_pixels.transform((x[finite[-1]], y[finite[-1]])), line))
    placed: list[tuple[float, float]] = []
    for (x, y), line in sorted(ends, key=lambda end: float(end[0][1])):
        height = y
        for other_x, other_height in placed:  # in rising order
            if abs(other_x - x) < width and abs(other_height - height) < gap:
                height = other_height + gap
        placed.append((x, height))
        right, up = to_data.transform((x + 6, height)).tolist()
        name = axes.annotate(
            str(line.get_label()), (right, up), color=line.get_color(), va="center", fontsize=9, fontweight="bold",
            annotation_clip=False,
        )  # fmt: skip
        name.set_path_effects([withStroke(linewidth=3, foreground="white")])  # readable across other lines


def pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ModuleNotFoundError("charts need matplotlib: pip install 'heeler[cli]'", name="matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
