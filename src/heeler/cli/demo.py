"""`heeler demo`: two small models trained in three orders, a table and a picture in about a minute."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

if TYPE_CHECKING:
    from rich.console import Console

    from heeler.cli.demo_runs import Curves, Task

COLOURS = {"random": "#7f7f7f", "cd-grab": "#0072B2", "herd": "#D55E00"}  # told apart with any colour vision
AXES = {"suboptimality": "distance from the optimum, f(w) − f*", "train_loss": "training loss"}


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each, from different starts.")] = 3,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of each run.")] = 30,
    plot: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("demo.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train softmax regression and a small network on handwritten digits in random order, CD-GraB's and Heeler's."""
    import torch
    from rich.console import Console

    torch.set_num_threads(1)  # on models this small, threads spend their time waiting for one another
    started = time.perf_counter()
    console = Console(stderr=as_json)
    found = run(seeds, epochs, console, quiet=as_json)
    draw(found, plot, f"Digits, {seeds} seeds: line = mean, shade = all seeds")
    if as_json:
        typer.echo(json.dumps([as_numbers(task, lines) for task, lines in found.items()]))
        return
    for task, lines in found.items():
        show(task, as_numbers(task, lines), console)
    console.print(
        "random: a new random order every epoch. cd-grab: as published, 4 simulated workers with their own quarter of "
        "the data, full gradients, one balance sweep per epoch. herd: Heeler's default, one order of all examples from "
        "exact gradients (regression) or sketches of 256 numbers (network). All have the same starts, batches of 16 "
        "and budget."
    )
    console.print(f"Curves: [bold]{plot}[/bold]. {time.perf_counter() - started:.0f} s in all.")


def run(seeds: int, epochs: int, console: Console, *, quiet: bool) -> dict[Task, dict[str, Curves]]:
    """Task → order → (seeds, 3, epochs + 1) curves, with a progress bar unless `quiet`."""
    from rich.progress import track

    from heeler.cli.demo_runs import ORDERS, TASKS, train

    for order in ORDERS:
        train(TASKS[0], order, 0, 2)  # has its loops compiled before any clock runs
    found: dict[Task, dict[str, list[Curves]]] = {task: {order: [] for order in ORDERS} for task in TASKS}
    runs = [(task, order, seed) for task in TASKS for order in ORDERS for seed in range(seeds)]
    for task, order, seed in track(runs, f"{len(runs)} runs", console=console, disable=quiet):
        found[task][order].append(train(task, order, seed, epochs))
    return {task: {order: np.stack(curves) for order, curves in lines.items()} for task, lines in found.items()}


def as_numbers(task: Task, lines: dict[str, Curves]) -> dict[str, Any]:
    """Means and standard deviations over seeds, and when an order comes to where random ends."""

    def spread(values: Any) -> dict[str, float]:
        return {"mean": float(values.mean()), "sd": float(values.std(ddof=1)) if len(values) > 1 else 0.0}

    target = lines["random"][:, 0, -1].mean()
    rules = {}
    for order, curves in lines.items():
        values, accuracy, seconds = curves.transpose(1, 0, 2)
        last = values.shape[1] - 1
        reached = np.flatnonzero(values.mean(0)[1:] <= target)
        epochs = int(reached[0]) + 1 if reached.size else None
        rules[order] = {
            "seeds": len(curves),
            "by_epoch": {str(e): spread(values[:, e]) for e in sorted({1, 2, 5, 10, 20, 30, last}) if e <= last},
            "epochs_to_target": epochs,
            "seconds_to_target": None if epochs is None else float(seconds.mean(0)[epochs]),
            "final_metric": spread(accuracy[:, -1]),
            "seconds_per_epoch": float(seconds[:, -1].mean() / last),
        }
    named = {"task": task.name, "quantity": task.quantity, "metric": "test_accuracy", "baseline": "random"}
    return {**named, "target": float(target), "rules": rules}


def show(task: Task, numbers: dict[str, Any], console: Console) -> None:
    """A table; the early epochs go first where the terminal is narrow."""
    from rich import box
    from rich.table import Table

    epochs = list(numbers["rules"]["random"]["by_epoch"])[-max(1, (console.width - 48) // 18) :]
    title = f"{task.title}: {AXES[task.quantity]} after epoch …, mean ± s.d."
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("", *epochs, "epochs / s to\nrandom's last", "test\naccuracy", "s per\nepoch"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for order, row in numbers["rules"].items():
        cells = ["{mean:.3g} ±{sd:.0g}".format(**row["by_epoch"][e]) for e in epochs]
        epochs_to = row["epochs_to_target"]
        reached = "not reached" if epochs_to is None else f"{epochs_to} / {row['seconds_to_target']:.2g} s"
        accuracy = "{:.1f} ±{:.1f}%".format(*(100 * row["final_metric"][key] for key in ("mean", "sd")))
        table.add_row(order, *cells, reached, accuracy, f"{row['seconds_per_epoch']:.3f}")
    console.print(table)


def draw(found: dict[Task, dict[str, Curves]], target: Path, title: str) -> None:
    """A row of panels per task: what is minimised by epoch and by training seconds, and the test accuracy. PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, grid = plt.subplots(len(found), 3, figsize=(15.6, 3.9 * len(found)), layout="constrained")
    for row, (task, lines) in zip(grid, found.items(), strict=True):
        skip = 0 if task.quantity == "suboptimality" else 1  # the first loss would leave no room for the others
        for axes, y in zip(row, (0, 0, 1), strict=True):
            for order, curves in lines.items():
                by_time = axes is row[1]
                x = curves[:, 2].mean(0) if by_time else np.arange(curves.shape[2])
                values, first = curves[:, y], 1 if y else skip
                axes.plot(x[first:], values.mean(0)[first:], color=COLOURS[order], linewidth=2, label=order)
                low, high = values.min(0)[first:], values.max(0)[first:]
                axes.fill_between(x[first:], low, high, color=COLOURS[order], alpha=0.15, linewidth=0)
            axes.set(xlabel="training seconds" if by_time else "epoch", yscale="linear" if y else "log")
            axes.set(ylabel="test accuracy" if y else AXES[task.quantity], xlim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not by_time))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
            axes.legend(frameon=False, labelcolor="linecolor")
        row[0].set_title(task.title, loc="left", fontweight="bold")
    figure.suptitle(title)
    figure.savefig(target, dpi=140, format="png")
    plt.close(figure)
