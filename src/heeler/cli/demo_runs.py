"""What `heeler demo` does: two small models on handwritten digits, each trained in four orders, and shown."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler

import heeler
from heeler.herding import make_rule
from heeler.sketch import Sketcher

ORDERS = {"random": "#7f7f7f", "stratified": "#009E73", "cd-grab": "#0072B2", "herd": "#D55E00"}
"""With colours that are told apart with any colour vision."""
EXAMPLES, BATCH, WORKERS, L2 = 1536, 16, 4, 1e-3
LEAST = 0.26392335812250756
"""The regression's least objective f*, by L-BFGS in double precision."""
Curves = NDArray[np.float64]
"""(..., 3, epochs + 1), before training and after every epoch: what is minimised, test accuracy, training seconds."""


@dataclass(frozen=True)
class Task:
    """What is trained, and what of it is shown."""

    name: str
    title: str
    quantity: str
    rates: dict[str, float] = field(hash=False)
    """Order → first learning rate of its cosine."""
    model: Callable[[], nn.Module]
    measure: Callable[[nn.Module, Tensor, Tensor], float]


def run(seeds: int, epochs: int, console: Console, *, quiet: bool) -> dict[Task, dict[str, Curves]]:
    """Task → order → (seeds, 3, epochs + 1) curves, with a progress bar unless `quiet`."""
    for order in ORDERS:
        train(TASKS[0], order, 0, 2)  # has its loops compiled before any clock runs
    runs = [(task, order, seed) for task in TASKS for order in ORDERS for seed in range(seeds)]
    shown = track(runs, f"{len(runs)} runs", console=console, disable=quiet)
    curves = {one: train(*one, epochs) for one in shown}
    return {task: {o: np.stack([curves[task, o, seed] for seed in range(seeds)]) for o in ORDERS} for task in TASKS}


def train(task: Task, order: str, seed: int, epochs: int) -> Curves:
    """One run."""
    x, y, test_x, test_y = digits()
    torch.manual_seed(seed)
    model = task.model()
    batches = in_order(order, model, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rates[order], weight_decay=L2)
    seconds, found, steps, taken = 0.0, [], epochs * EXAMPLES // BATCH, 0
    for epoch in range(epochs + 1):
        started = time.perf_counter()
        for rows in batches() if epoch else ():
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.param_groups[0]["lr"] = task.rates[order] * (0.5 * (1 + math.cos(math.pi * taken / steps)))
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
        seconds += time.perf_counter() - started
        with torch.no_grad():
            accuracy = float((model(test_x).argmax(-1) == test_y).double().mean())
            found.append((task.measure(model, x, y), accuracy, seconds))
    return np.array(found).T


def in_order(order: str, model: nn.Module, seed: int) -> Callable[[], Iterable[list[int]]]:
    """What gives an epoch's batches."""
    if order == "cd-grab":
        return as_published(model, seed)
    strata = digits()[1] if order == "stratified" else None
    sampler = heeler.Sampler(EXAMPLES, batch_size=BATCH, order=order, seed=seed, strata=strata)
    if order == "herd":
        heeler.attach(model, sampler)
    return lambda: BatchSampler(sampler, BATCH, drop_last=False)


def as_published(model: nn.Module, seed: int) -> Callable[[], Iterator[list[int]]]:
    """CD-GraB with full gradients, and workers that hold their own part of the examples.

    The workers are simulated: the gradient of their joined batches is the one that they would average.
    """
    sketcher, own = Sketcher(model, layers="all", exact=True), BATCH // WORKERS
    parts = [EXAMPLES // WORKERS] * WORKERS
    rule = make_rule("cd-grab", EXAMPLES, sketcher.dim, seed=seed, batch_size=own, shard_sizes=parts)

    def epoch() -> Iterator[list[int]]:
        for rows in np.asarray(rule.order).reshape(WORKERS, -1, own).transpose(1, 0, 2).reshape(-1, BATCH):
            yield rows.tolist()
            rule.observe(rows, sketcher.pop().numpy())
        rule.next_order()

    return epoch


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs and labels for training, then for testing; from scikit-learn's wheel, the same split everywhere."""
    pixels, digit = load_digits(return_X_y=True)
    mixed = np.random.default_rng(0).permutation(len(pixels))
    x, y = torch.tensor(pixels[mixed] / 16.0, dtype=torch.float32), torch.tensor(digit[mixed])
    return x[:EXAMPLES], y[:EXAMPLES], x[EXAMPLES:], y[EXAMPLES:]


def regression() -> nn.Module:
    model = nn.Linear(64, 10)
    nn.utils.vector_to_parameters(torch.zeros(650), model.parameters())
    return model


def network() -> nn.Module:
    # Projections depend on the parameters' names: with the empty layer these are those of the experiments' network.
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Identity(), nn.Linear(32, 10))


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return float(cross_entropy(model(x), y, reduction="none").double().mean())


def distance(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """f(w) − f*, which becomes so small that f must be computed in double precision."""
    weight, bias = (p.detach().double() for p in model.parameters())
    penalty = L2 / 2 * (weight.square().sum() + bias.square().sum())
    return float(cross_entropy(x.double() @ weight.T + bias, y) + penalty) - LEAST


# The best of six rates for every order, three seeds, 30 epochs: `python -m benchmarks.demo_rates` in a clone. Every
# order's network breaks down at the next higher one.
RATES_OF_REGRESSION = {"random": 1.4, "stratified": 1.4, "cd-grab": 1.4, "herd": 2.0}
RATES_OF_NETWORK = {"random": 0.8, "stratified": 0.8, "cd-grab": 0.6, "herd": 0.8}
TASKS = (
    Task("digits", "digits, softmax regression (convex)", "suboptimality", RATES_OF_REGRESSION, regression, distance),
    Task("digits-mlp", "digits, network 64-32-10", "train_loss", RATES_OF_NETWORK, network, mean_loss),
)
AXES = {"suboptimality": "distance from the optimum, f(w) − f*", "train_loss": "training loss"}


def as_numbers(task: Task, lines: dict[str, Curves]) -> dict[str, Any]:
    """Means and standard deviations over seeds, and when an order comes to where random ends."""

    def spread(values: Any) -> dict[str, float]:
        return {"mean": float(values.mean()), "sd": float(values.std(ddof=1)) if len(values) > 1 else 0.0}

    target = float(lines["random"][:, 0, -1].mean())
    rules = {}
    for order, curves in lines.items():
        values, accuracy, seconds = curves.transpose(1, 0, 2)
        last = values.shape[1] - 1
        epochs = next((e for e in range(1, last + 1) if values[:, e].mean() <= target), None)
        rules[order] = {
            "seeds": len(curves),
            "seeds_below_random": int((values[:, -1] < lines["random"][:, 0, -1]).sum()),
            "by_epoch": {str(e): spread(values[:, e]) for e in sorted({1, 2, 5, 10, 20, 30, last}) if e <= last},
            "epochs_to_target": epochs,
            "seconds_to_target": None if epochs is None else float(seconds[:, epochs].mean()),
            "final_metric": spread(accuracy[:, -1]),
            "seconds": float(seconds[:, -1].mean()),
            "seconds_per_epoch": float(seconds[:, -1].mean() / last),
        }
    named = {"task": task.name, "quantity": task.quantity, "metric": "test_accuracy", "baseline": "random"}
    return {**named, "target": target, "rules": rules}


def show(task: Task, numbers: dict[str, Any], console: Console) -> None:
    """A table; the early epochs go first where the terminal is narrow."""
    epochs = list(numbers["rules"]["random"]["by_epoch"])[-max(1, (console.width - 48) // 18) :]
    title = f"{task.title}: {AXES[task.quantity]} after epoch …, mean ± s.d."
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for head in ("", *epochs, "epochs / s to\nrandom's last", "test\naccuracy", "s in\nall"):
        table.add_column(head, justify="right" if head else "left", no_wrap=True)
    for order, row in numbers["rules"].items():
        cells = ["{mean:.3g} ±{sd:.0g}".format(**row["by_epoch"][e]) for e in epochs]
        reached = "{epochs_to_target} / {seconds_to_target:.2g} s" if row["epochs_to_target"] else "not reached"
        accuracy = "{:.1f} ±{:.1f}%".format(*(100 * row["final_metric"][key] for key in ("mean", "sd")))
        table.add_row(order, *cells, reached.format(**row), accuracy, f"{row['seconds']:.2f}")
    console.print(table)


def conclusion(task: Task, numbers: dict[str, Any]) -> str:
    """Who won by epochs and who by seconds, in words, as this run found it."""
    rules, last = numbers["rules"], max(map(int, numbers["rules"]["random"]["by_epoch"]))
    ends = {order: row["by_epoch"][str(last)]["mean"] for order, row in rules.items()}
    lowest = min(ends, key=lambda order: ends[order])
    words = f"{task.title}. By epochs: {lowest} is lowest after {last}"
    if lowest != "random":
        words += f", {ends[lowest]:.2g} against random's {ends['random']:.2g}"
        words += f", and lower in {rules[lowest]['seeds_below_random']} of {rules[lowest]['seeds']} seeds"
    epochs = {order: row["epochs_to_target"] for order, row in rules.items() if row["epochs_to_target"]}
    first = [order for order in epochs if epochs[order] == min(epochs.values())]
    words += f"; {' and '.join(first)} needed the fewest to get to random's last value, {epochs[first[0]]}. "
    seconds = {order: rules[order]["seconds_to_target"] for order in epochs}
    fastest = min(seconds, key=lambda order: seconds[order])
    words += f"By seconds: {fastest} was there first, after {seconds[fastest]:.2f} s"
    others = [f"{order} after {seconds[order]:.2f}" for order in seconds if order != fastest]
    return words + (f" ({', '.join(others)})." if others else ".")


def draw(found: dict[Task, dict[str, Curves]], target: Path, title: str) -> None:
    """A row of panels per task: what is minimised by epoch and by training seconds, and the test accuracy. PNG."""
    figure = Figure(figsize=(15.6, 3.9 * len(found)), layout="constrained")
    for row, (task, lines) in zip(figure.subplots(len(found), 3), found.items(), strict=True):
        skip = int(task.quantity != "suboptimality")  # the first loss would leave no room for the others
        for axes, y, by_time, first in zip(row, (0, 0, 1), (False, True, False), (skip, skip, 1), strict=True):
            for order, curves in lines.items():
                x = (curves[:, 2].mean(0) if by_time else np.arange(curves.shape[2]))[first:]
                values = curves[:, y, first:]
                axes.plot(x, values.mean(0), color=ORDERS[order], linewidth=2, label=order)
                axes.fill_between(x, values.min(0), values.max(0), color=ORDERS[order], alpha=0.15, linewidth=0)
            axes.set(xlabel="training seconds" if by_time else "epoch", yscale="linear" if y else "log")
            axes.set(ylabel="test accuracy" if y else AXES[task.quantity], xlim=(0, None))
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=not by_time))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
            axes.legend(frameon=False, labelcolor="linecolor")
        row[0].set_title(task.title, loc="left", fontweight="bold")
    figure.suptitle(title)
    figure.savefig(target, dpi=140, format="png")
