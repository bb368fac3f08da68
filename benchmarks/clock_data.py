"""The data of `benchmarks.clock`. The measuring program reads it and stores it for the runs.

So a run's process imports neither scikit-learn nor anything else that Heeler would otherwise have to load by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import small_tasks
from benchmarks.clock_tasks import EVERY, TASKS, Task
from benchmarks.clock_training import Tensors, linear
from experiments.folder import Folder, MissingData
from experiments.tasks import get_task
from experiments.tasks.chargpt import CHARACTERS
from experiments.tasks.digits import load_digits, shifted


def tasks() -> dict[str, Task]:
    """Name → task: the convex ones of `small_tasks`, and those that it does not have."""
    folder = Folder.at(Path("."))
    found = [_of_small(name, small) for name, small in small_tasks.tasks(folder).items() if small.convex]
    return {task.name: task for task in (*TASKS[:1], *found, *TASKS[1:])}


def _of_small(name: str, small: small_tasks.Small) -> Task:
    if (small.schedule, small.warm_up, small.prepare) != ("cosine", 0.0, None):
        raise ValueError(f"{name} trains in a way that the clock does not know")
    return Task(
        *(name, name, "linear", small.rate, small.epochs, small.batch, small.optimizer, small.decay),
        modes=EVERY,
        threads=1,
        labelled=small.labelled,
        convex=True,
    )


def store(task: Task, folder: Folder | None, path: Path) -> str:
    """Write the task's training data, and the least objective of a convex task; says where the data come from.

    Without a folder the data that do not come with scikit-learn are random: enough for what a run costs.
    """
    torch.manual_seed(0)
    if task.data in small_tasks.tasks(Folder.at(Path("."))):
        train, source = small_tasks.tasks(_some(folder))[task.data].load(_some(folder)).train, "real"
    else:
        load, at_random = LOADERS[task.data]
        train, source = _loaded(load, at_random, folder)
    if task.small_examples:
        train = tuple(t[: task.small_examples] for t in train)
    found: dict[str, Any] = {"train": tuple(t.clone() for t in train)}
    if task.convex:
        found["least"] = small_tasks.least_of(linear(train), train, task.decay)
    torch.save(found, path)
    return source


def _loaded(load: Any, at_random: Any, folder: Folder | None) -> tuple[Tensors, str]:
    if load is not None and (folder is not None or at_random is None):
        return load(_some(folder)), "real"
    return at_random(), "random"


def _some(folder: Folder | None) -> Folder:
    return Folder.cache() if folder is None else folder


def digits_four_times(folder: Folder) -> Tensors:
    """All 1,797 digits four times, each copy shifted by up to a pixel and with noise of its own."""
    found = load_digits(folder)
    pixels, digit = (torch.cat(both) for both in zip(found.train, found.test, strict=True))
    moved = shifted(pixels.repeat(4, 1))
    return moved + 0.05 * torch.randn_like(moved), digit.repeat(4)


def experiment(name: str, **options: int) -> Callable[[Folder], Tensors]:
    return lambda folder: get_task(name).load(folder, options).train


def some_mortgages(folder: Folder) -> Tensors:
    """256 batches of 16 for each of four workers: four processes on few cores take milliseconds for a step."""
    return tuple(t[:16_384] for t in get_task("hmda").load(folder, {}).train)


def pictures(count: int) -> Callable[[], Tensors]:
    return lambda: (torch.randn(count, 3, 32, 32), torch.randint(10, (count,)))


def texts(count: int, length: int, characters: int) -> Callable[[], Tensors]:
    def make() -> Tensors:
        text: Tensor = torch.randint(characters, (count, length + 1))
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return make


def table(count: int, columns: int) -> Callable[[], Tensors]:
    def make() -> Tensors:
        x = torch.randn(count, columns)
        return x, (x @ torch.randn(columns) / math.sqrt(columns) + torch.randn(count) > 0).long()

    return make


LOADERS: dict[str, tuple[Callable[[Folder], Tensors] | None, Callable[[], Tensors] | None]] = {
    "digits four times": (digits_four_times, None),
    "characters 32": (experiment("char-gpt"), texts(1024, 32, CHARACTERS + 1)),
    "characters 128": (experiment("char-gpt-96"), texts(3072, 128, CHARACTERS + 1)),
    "16,384 mortgages": (some_mortgages, table(16_384, 18)),
    "images": (experiment("cifar10-resnet", limit=12_800), pictures(12_800)),
    "all images": (experiment("cifar10-resnet"), pictures(50_000)),
    "random images": (None, pictures(19_200)),
    "few tokens": (None, texts(64, 64, 512)),
    "tokens": (None, texts(1024, 1024, 50_257)),
}
"""Name → real data of a folder, and random ones of the same shape; None where there are none of the kind."""
__all__ = ["LOADERS", "MissingData", "store", "tasks"]
