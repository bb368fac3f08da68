"""The documentation's pictures, drawn from what the code does.

python -m experiments.pictures docs/images
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.charts import COLOURS
from experiments.drawing import arrow, box, canvas, note, pyplot

Floats = NDArray[np.float64]
FRONT, BACK, INK, PALE = COLOURS["cd-grab"], COLOURS["herd"], "#222222", "#9a9a9a"
WORKERS = (COLOURS["cd-grab"], COLOURS["id-grab"], "#009E73", "#CC79A7")


def two_weight_gradients(examples: int, seed: int = 0) -> Floats:
    """(N, 2) every example's gradient in a logistic regression with two weights, centred on their mean."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(examples, 2)) * (1.0, 0.7)
    labels = rng.random(examples) < 1 / (1 + np.exp(-inputs @ (2.0, -1.0)))
    gradients = (1 / (1 + np.exp(-inputs @ (0.5, 0.5))) - labels)[:, None] * inputs
    return np.asarray(gradients - gradients.mean(axis=0))


def prefix_sums() -> Any:
    """Where the sum of the gradients walks within an epoch: in a random order, after one sweep, and herded."""
    from heeler.herding import balance_sweep, herding_bound, solve

    gradients = two_weight_gradients(400)
    random = np.random.default_rng(0).permutation(len(gradients))
    orders = {
        "random order": (random, COLOURS["random"]),
        "after one balance sweep": (balance_sweep(gradients, random), COLOURS["cd-grab"]),
        "herded": (solve(gradients, random).order, COLOURS["herd"]),
    }
    figure, grid = pyplot().subplots(1, 3, figsize=(9.6, 3.5), layout="constrained", sharex=True, sharey=True)
    for axes, (name, (order, colour)) in zip(grid, orders.items(), strict=True):
        path = np.vstack([np.zeros(2), np.cumsum(gradients[order], axis=0)])
        axes.plot(*path.T, color=colour, linewidth=0.9)
        axes.plot(0, 0, "o", color=INK, markersize=4)
        axes.set_title(f"{name}: at most {herding_bound(gradients, order).two:.1f} away", fontsize=10)
        axes.set_aspect("equal")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("first weight")
    grid[0].set_ylabel("second weight")
    return figure


def balance_steps() -> Any:
    """One balance sweep over eight gradients, step by step, and the order that comes of it."""
    gradients = two_weight_gradients(8, seed=4354)  # large vectors, both signs
    figure, grid = pyplot().subplots(2, 4, figsize=(9.6, 5.6), sharex=True, sharey=True)
    figure.subplots_adjust(left=0.02, right=0.98, top=0.94, bottom=0.2, wspace=0.06, hspace=0.16)
    running = np.zeros(2)
    front: list[int] = []
    back: list[int] = []
    for i, axes in enumerate(grid.flat):
        joins_front = running @ gradients[i] <= 0
        step, colour = (gradients[i], FRONT) if joins_front else (-gradients[i], BACK)
        (front if joins_front else back).append(i)
        if running.any():
            arrow(axes, (0, 0), running, PALE)
        arrow(axes, running, running + step, colour, width=2)
        running = running + step
        axes.plot(0, 0, "o", color=INK, markersize=4)
        verdict = f"{i + 1} to the front, added" if joins_front else f"{i + 1} to the back, subtracted"
        axes.set_title(verdict, fontsize=10, color=colour, fontweight="bold")
        axes.set(xticks=[], yticks=[], aspect="equal", xlim=(-0.85, 0.85), ylim=(-0.85, 0.85))
        axes.spines[:].set_color("#e0e0e0")
    strip = figure.add_axes((0.02, 0.02, 0.96, 0.13))
    strip.set(xlim=(0, 17), ylim=(0, 2))
    strip.set_axis_off()
    note(strip, 0, 1, "grey: the sum so far", size=10, align="left", colour=PALE)
    note(strip, 6.9, 1, "the new order:", size=10, align="right")
    for place, i in enumerate(front + back[::-1]):
        box(strip, 7.2 + place * 1.15, 0.5, 1.0, 1.0, str(i + 1), FRONT if i in front else BACK)
    return figure


def sweeps() -> Any:
    """The herding bound by the number of balance sweeps over one table."""
    from heeler.herding import balance_sweep, herding_bound

    table = np.random.default_rng(0).normal(size=(10_000, 64))
    order = np.random.default_rng(1).permutation(len(table))
    bounds = [herding_bound(table, order).two]
    for _ in range(12):
        order = balance_sweep(table, order)
        bounds.append(herding_bound(table, order).two)
    figure, axes = pyplot().subplots(figsize=(6.4, 3.2), layout="constrained")
    axes.plot(range(len(bounds)), bounds, "o-", color=COLOURS["herd"], linewidth=2)
    axes.set(xlabel="balance sweeps over the same table", ylabel="largest prefix norm", yscale="log")
    axes.annotate("random order", (0, bounds[0]), (8, -3), textcoords="offset points", fontsize=9, color=INK)
    axes.annotate("one sweep, as GraB has it in one epoch", (1, bounds[1]), (8, -3), textcoords="offset points",
                  fontsize=9, color=INK)  # fmt: skip
    axes.set_yticks([30, 50, 100, 200, 500], ["30", "50", "100", "200", "500"])
    axes.minorticks_off()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    return figure


def tap() -> Any:
    """What is taken from a layer: two thin products and one sum over tokens."""
    figure, axes = canvas(12, 5.2)
    box(axes, 0.2, 3.4, 1.9, 1.1, "input a\n(B, T, n)", PALE)
    box(axes, 3.4, 3.4, 2.0, 1.1, "layer\ny = Wa + b", INK)
    box(axes, 6.8, 3.4, 2.0, 1.1, "loss", PALE)
    arrow(axes, (2.1, 4.2), (3.4, 4.2), INK)
    arrow(axes, (5.4, 4.2), (6.8, 4.2), INK)
    arrow(axes, (6.8, 3.7), (5.4, 3.7), BACK)
    note(axes, 6.1, 3.4, "gradient g", colour=BACK)
    box(axes, 0.2, 1.2, 1.9, 1.1, "a · P_in\n(B, T, 16)", FRONT)
    arrow(axes, (1.15, 3.4), (1.15, 2.3), FRONT)
    note(axes, 1.3, 2.85, "forward", align="left", colour=FRONT)
    box(axes, 5.2, 1.2, 1.9, 1.1, "g · P_out\n(B, T, 16)", BACK)
    arrow(axes, (6.1, 3.2), (6.1, 2.3), BACK)
    note(axes, 6.3, 2.75, "backward", align="left", colour=BACK)
    box(axes, 2.8, 1.2, 1.7, 1.1, "sum over\ntokens", INK)
    arrow(axes, (2.1, 1.75), (2.8, 1.75), FRONT)
    arrow(axes, (5.2, 1.75), (4.5, 1.75), BACK)
    arrow(axes, (3.65, 1.2), (3.65, 0.75), INK)
    arrow(axes, (3.65, 0.7), (9.4, 0.7), INK)
    note(axes, 6.3, 0.35, "16 × 16 numbers per example, added up over all tapped layers")
    for i in range(6):
        box(axes, 9.5, 0.3 + 0.62 * i, 2.2, 0.5, "" if i != 1 else "256 numbers", INK if i == 1 else "#d5d5d5")
    note(axes, 10.6, 4.35, "table: one row\nper example, in\nhalf precision")
    return figure


def timeline() -> Any:
    """When things happen: training, exchange and solve over three epochs."""
    figure, axes = canvas(12, 3.9)
    starts = (1.5, 5.2, 8.45)
    orders = ("epoch 1: random order", "epoch 2: herded", "epoch 3: herded")
    for start, name, colour in zip(starts, orders, (PALE, BACK, BACK), strict=True):
        box(axes, start, 2.7, 3.2, 0.7, name, colour)
    for y, name in ((3.05, "training"), (1.85, "sketches go\nto the table"), (0.75, "solve,\nin a thread")):
        note(axes, 1.3, y, name, align="right")
    for start in starts:
        for k in range(4):
            box(axes, start + 0.8 * k, 1.6, 0.7, 0.5, "", FRONT)
    box(axes, 4.75, 0.5, 0.4, 0.5, "", INK)
    note(axes, 4.95, 0.2, "once, the first time,\ntraining waits", size=9)
    box(axes, 7.95, 0.5, 0.4, 0.5, "", INK)
    note(axes, 8.15, 0.2, "from then on in the\nepoch's last 3%", size=9)
    arrow(axes, (5.0, 1.0), (5.25, 2.7), INK)
    arrow(axes, (8.15, 1.0), (8.5, 2.7), INK)
    axes.set_ylim(-0.35, 3.6)
    return figure


def workers() -> Any:
    """Four workers, one order: sketches go to rank 0, every rank's part of the next order comes back."""
    figure, axes = canvas(12, 5.0)
    box(axes, 4.6, 3.3, 2.8, 1.4, "rank 0\ntable, solve", WORKERS[0])
    for rank, x in ((1, 0.4), (2, 4.9), (3, 9.4)):
        box(axes, x, 1.6, 2.2, 0.8, f"rank {rank}", WORKERS[rank])
        low, high = x + 1.1, 6.0 + (rank - 2) * 1.1
        arrow(axes, (low - 0.15, 2.4), (high - 0.15, 3.3), INK)
        arrow(axes, (high + 0.15, 3.3), (low + 0.15, 2.4), PALE)
    note(axes, 2.2, 3.4, "sketches:\n516 bytes per example", align="center")
    note(axes, 9.9, 3.4, "its part of the next order:\n4 bytes per example", colour="#666666")
    note(axes, 0.4, 1.15, "one order of all examples, dealt out batch by batch:", align="left")
    for batch in range(3):
        for rank in range(4):
            for example in range(2):
                x = 0.4 + batch * 3.85 + rank * 0.92 + example * 0.43
                box(axes, x, 0.45, 0.38, 0.4, "", WORKERS[rank])
        note(axes, 0.4 + batch * 3.85 + 1.82, 0.15, f"global batch {batch + 1}", size=9)
    return figure


PICTURES: dict[str, Callable[[], Any]] = {
    "how-prefix-sums": prefix_sums,
    "how-balance-steps": balance_steps,
    "how-passes": sweeps,
    "how-tap": tap,
    "how-timeline": timeline,
    "how-workers": workers,
}


def draw_all(folder: Path) -> list[Path]:
    """Draw every picture as SVG, the same file in every run."""
    plt = pyplot()
    drawn = []
    with plt.rc_context({"svg.hashsalt": "heeler", "svg.fonttype": "none", "font.family": "sans-serif"}):
        for name, draw in PICTURES.items():
            figure = draw()
            drawn.append(folder / f"{name}.svg")
            figure.savefig(drawn[-1], metadata={"Date": None}, facecolor="white")
            plt.close(figure)
    return drawn


if __name__ == "__main__":
    draw_all(Path(sys.argv[1]))
