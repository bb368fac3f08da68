"""`python -m experiments herding`: the published simulation, each rule's bound after every round."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from experiments.simulation import RULES, Trace, simulate

# Okabe and Ito's colours, told apart with any colour vision; black and grey last.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def herding(
    rules: Annotated[str, typer.Option(help="Rules by name, with commas between.")] = ",".join(RULES),
    workers: Annotated[int, typer.Option(min=1, help="Workers, each with its own vectors.")] = 20,
    examples: Annotated[int, typer.Option(min=1, help="Vectors on each worker.")] = 50_000,
    dim: Annotated[int, typer.Option(min=1, help="Numbers in a vector.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often each rule sees all vectors.")] = 15,
    seed: Annotated[int, typer.Option(min=0, help="Of the vectors and of the rules.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the bounds into this PNG file.")] = None,
) -> None:
    """Simulate herding: how small each rule makes the largest prefix sum of unit vectors, round by round."""
    names = [name.strip() for name in rules.split(",") if name.strip()]
    try:
        traces = run(names, workers, examples, dim, rounds, seed, quiet=as_json)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        typer.echo(json.dumps({"rules": {name: trace._asdict() for name, trace in traces.items()}}))
    else:
        show(traces)
    if plot is not None:
        draw(traces, f"{workers} workers × {examples:,} unit vectors, {dim} dimensions", plot)


def run(
    names: list[str], workers: int, examples: int, dim: int, rounds: int, seed: int, *, quiet: bool
) -> dict[str, Trace]:
    """Simulate, with a progress bar on standard error unless `quiet`."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<24}"), BarColumn(), TextColumn("{task.completed}/{task.total} rounds"))
    bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), disable=quiet)
    with bar:
        task = bar.add_task("drawing vectors", total=rounds * len(names))

        def progress(name: str, done: int, bound: float) -> None:
            bar.update(task, advance=1, description=f"{name}: {bound:.3g}")

        return simulate(names, workers=workers, examples=examples, dim=dim, rounds=rounds, seed=seed, progress=progress)


def show(traces: dict[str, Trace]) -> None:
    """A table with the bound after the first, some middle and the last round."""
    from rich.console import Console
    from rich.table import Table

    rounds = len(next(iter(traces.values())).bound)
    shown = sorted({r for r in (1, 2, 5, 10, rounds) if r <= rounds})
    table = Table(title="Herding bound (largest prefix sum, infinity norm)")
    table.add_column("rule")
    for r in shown:
        table.add_column(f"round {r}", justify="right")
    table.add_column("seconds", justify="right")
    for name, trace in traces.items():
        table.add_row(name, *(f"{trace.bound[r - 1]:.3g}" for r in shown), f"{trace.seconds:.1f}")
    Console().print(table)


def draw(traces: dict[str, Trace], title: str, path: Path) -> None:
    """Bounds over rounds on a logarithmic scale, each line named at its end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for (name, trace), colour in zip(traces.items(), COLOURS * len(traces), strict=False):
        marker = "o" if len(trace.bound) == 1 else None
        axes.plot(range(1, len(trace.bound) + 1), trace.bound, color=colour, linewidth=2, label=name, marker=marker)
    axes.set(yscale="log", xlabel="round", title=title, ylabel="largest prefix sum, ‖·‖∞ (log scale)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.canvas.draw()
    to_pixels, to_data = axes.transData, axes.transData.inverted()
    height = -float("inf")
    for line in sorted(axes.get_lines(), key=lambda line: traces[str(line.get_label())].bound[-1]):
        name = str(line.get_label())
        x, y = to_pixels.transform((len(traces[name].bound), traces[name].bound[-1]))
        height = max(y, height + 16)  # names of lines that end together are set one above the other
        right, up = to_data.transform((x + 8, height)).tolist()
        axes.annotate(name, (right, up), color=line.get_color(), va="center", fontweight="bold", annotation_clip=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
