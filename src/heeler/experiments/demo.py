"""The demo's runs: small enough for a minute on two cores."""

from __future__ import annotations

from collections.abc import Sequence

from heeler.experiments.records import Result
from heeler.experiments.setup import Run
from heeler.experiments.summary import Summary, group, summarise
from heeler.experiments.tasks import get_task, settings

TASKS = ("digits", "digits-mlp")
EPOCHS = 30


def demo_runs(tasks: Sequence[str] = TASKS, seeds: int = 3, epochs: int = EPOCHS) -> list[Run]:
    """Random order and Heeler with one worker; CD-GraB as published, with four that make up the same batches of 16."""
    runs = []
    for name in tasks:
        task = get_task(name)
        for seed in range(seeds):
            runs.append(settings(task, "random", seed, epochs=epochs))
            share = task.defaults["batch_size"] // 4
            runs.append(settings(task, "cd-grab", seed, epochs=epochs, workers=4, batch_size=share, shards="local"))
            runs.append(settings(task, "herd", seed, epochs=epochs))
    return runs


def summaries(results: Sequence[Result]) -> list[Summary]:
    """One table a task."""
    return [summarise(task, lines) for task, lines in group(results).items()]
