"""`heeler demo`: two small models trained in four orders, and wrong labels found, in about a minute."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer


def demo(
    seeds: Annotated[int, typer.Option(min=1, help="Runs per order, from different starts.")] = 3,
    epochs: Annotated[int, typer.Option(min=2, help="Epochs of each run.")] = 30,
    plot: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("demo.png"),
    labels: Annotated[Path, typer.Option(help="And the picture of suspected labels.")] = Path("suspects.png"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Train softmax regression and a small network on handwritten digits in four orders, and find wrong labels."""
    import torch
    from rich.console import Console

    from heeler.cli import demo_labels, demo_runs

    torch.set_num_threads(1)  # on models this small, threads spend their time waiting for one another
    started = time.perf_counter()
    console = Console(stderr=as_json)
    found = demo_runs.run(seeds, epochs, console, quiet=as_json)
    demo_runs.draw(found, plot, f"Digits, {seeds} seeds: line = mean, shade = all seeds")
    numbers = [demo_runs.as_numbers(task, lines) for task, lines in found.items()]
    if as_json:
        typer.echo(json.dumps(numbers))
        return
    flipped, right = demo_labels.run(labels)
    for task, of_task in zip(found, numbers, strict=True):
        demo_runs.show(task, of_task, console)
    console.print(
        "random: a new random order every epoch. stratified: random, but every batch has its share of each digit. "
        "cd-grab: as published, 4 simulated workers with their own quarter of the data, full gradients, one balance "
        "sweep per epoch. herd: Heeler's default, one order of all examples from exact gradients. All have the same "
        "starts, batches of 16 and epochs, a cosine schedule, and the best of six learning rates each.\n"
    )
    for task, of_task in zip(found, numbers, strict=True):
        console.print(demo_runs.conclusion(task, of_task))
    console.print(
        "Means over seeds. Seconds are of steps and of orders; importing, compiling and measuring are not in them. "
        "cd-grab's are those of one process that does the work of its four. Another model has another ratio: "
        "`python -m benchmarks.clock`, in a clone, times whole runs."
    )
    console.print(
        f"\nWrong labels: {flipped} of {demo_runs.EXAMPLES} digits were given another label, and a network was trained "
        f"on them. Of the first {flipped} that `heeler.suspects` names, {right} are these: [bold]{labels}[/bold]."
    )
    console.print(f"Curves: [bold]{plot}[/bold]. {time.perf_counter() - started:.0f} s in all.")
