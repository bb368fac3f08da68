"""How near the batch-size bound comes to the exact one, how often its interval covers it, and what it costs.

    python -m benchmarks diversity --task digits
    python -m benchmarks diversity --task cifar10 --data DIR

Accuracy: a task's model before, in the middle and at the end of a short training, on some examples, with many seeds of
the projections. "sketches" are tables of 256 numbers per example; "default" is what the library keeps by default, exact
gradients of small models; "measure" is `heeler.diversity.measure`. Cost: the table's reading once per epoch, and a
streaming update at every step, against a training step of the same model: the processor time of one thread, which other
work on the machine does not lengthen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.overhead import build
from experiments.diversity.point import example_gradients
from experiments.diversity.point import measure as exactly
from experiments.folder import Folder
from experiments.tasks import Examples, Task, get_task
from heeler.diversity import Measured, StreamingDiversity, batch_size_bound, diversity_of, layouts_of, measure
from heeler.ordering.setup import EXACT
from heeler.sketch import Sketcher

MOMENTS = {"start": 0, "middle": 5, "end": 40}
"""Epochs of training before each."""
WITHIN = 0.1
BATCH = 32


def accuracy(task_name: str, folder: Folder, *, examples: int = 500, seeds: int = 100) -> list[dict[str, Any]]:
    """A row for every moment and way to the bound."""
    task = get_task(task_name)
    tensors = tuple(t[:examples] for t in task.load(folder, {}).train)
    rows = []
    for moment, model in trained(task, tensors):
        exact = exactly(example_gradients(model, task, tensors), 1)["batch_size_bound"]
        small = sum(p.numel() for p in model.parameters()) <= EXACT
        for way, bound in WAYS.items():
            if way == "default" and not small:
                continue  # sketches are the default
            found = [bound(model, task, tensors, seed) for seed in range(seeds)]
            rows.append({"task": task_name, "moment": moment, "way": way, "exact": exact, **score(found, exact)})
    return rows


def trained(task: Task, tensors: tuple[Tensor, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The task's model at every one of `MOMENTS`, trained at its published rate with momentum."""
    torch.manual_seed(0)
    model = task.model(Examples(tensors, tensors), {})
    step = task.defaults["batch_size"] * task.defaults.get("workers", 1)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=task.defaults["lr"] * BATCH / step, momentum=task.defaults.get("momentum", 0.0)
    )
    done = 0
    for moment, epochs in MOMENTS.items():
        for _ in range(epochs - done):
            for rows in torch.randperm(len(tensors[0])).split(BATCH):
                task.losses(model, *(t[rows] for t in tensors)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        done = epochs
        yield moment, model


def from_table(model: nn.Module, task: Task, tensors: tuple[Tensor, ...], seed: int, **options: Any) -> Measured:
    """From a table of sketches, as half precision keeps it."""
    sketcher = Sketcher(model, layers="all", seed=seed, reduction="sum", **options)
    task.losses(model, *tensors).sum().backward()
    sketches = sketcher.pop().half().numpy()
    sketcher.detach()
    model.zero_grad()
    return batch_size_bound(sketches, sketch=layouts_of(sketcher))


def by_default(model: nn.Module, task: Task, tensors: tuple[Tensor, ...], seed: int) -> Measured:
    """As `heeler.diversity.of(handle)` has it."""
    return from_table(model, task, tensors, seed, dim=EXACT)


def at_weights(model: nn.Module, task: Task, tensors: tuple[Tensor, ...], seed: int) -> Measured:
    """By `heeler.diversity.measure`."""

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return task.losses(model, *batch).mean()

    batches = list(zip(*(t.split(128) for t in tensors), strict=True))
    return measure(model, batches, loss, seed=seed).bound


WAYS: dict[str, Callable[[nn.Module, Task, tuple[Tensor, ...], int], Measured]] = {
    "sketches": from_table,
    "default": by_default,
    "measure": at_weights,
}


def score(found: list[Measured], exact: float) -> dict[str, float]:
    """Of all seeds: how many are within 10%, how many intervals cover, the relative error's mean, and its size."""
    errors: NDArray[np.float64] = np.array([f.value / exact - 1 for f in found])
    tiny = 1e-3 * exact  # an exact bound's interval is a point, and half precision rounds
    covers = [f.low - tiny <= exact <= f.high + tiny for f in found]
    return {
        "seeds": len(found),
        "within": float(np.mean(np.abs(errors) <= WITHIN)),
        "covered": float(np.mean(covers)),
        "bias": float(errors.mean()),
        "rms": float(np.sqrt(np.mean(errors**2))),
    }


def cost(model: str, batch: int, *, examples: int = 12_800, blocks: int = 15) -> dict[str, Any]:
    """Milliseconds and microseconds of processor time per step, the medians of turns; `share`s are of the step."""
    torch.manual_seed(0)
    net, x, y = build(model, "", batch, "cpu")
    sketcher = Sketcher(net, layers="all")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    nn.functional.cross_entropy(net(x), y).backward()
    sketches = sketcher.pop()
    layouts = layouts_of(sketcher)
    sketcher.detach()
    table = sketches.half().numpy().repeat(-(-examples // batch), axis=0)
    stream = StreamingDiversity(sketcher.dim, sketch=layouts)

    def step() -> None:
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    times: dict[str, list[float]] = {"step": [], "table": [], "stream": []}
    for _ in range(blocks):
        times["step"].append(_seconds(step, 10))
        times["table"].append(_seconds(lambda: diversity_of(table, sketch=layouts), 1) * batch / len(table))
        times["stream"].append(_seconds(lambda: stream.update(sketches), 64))
    middle = {name: statistics.median(values) for name, values in times.items()}
    return {
        "model": model,
        "batch": batch,
        "examples": len(table),
        "threads": torch.get_num_threads(),
        "step_ms": 1e3 * middle["step"],
        "table_us": 1e6 * middle["table"],
        "stream_us": 1e6 * middle["stream"],
        "table_share": middle["table"] / middle["step"],
        "stream_share": middle["stream"] / middle["step"],
    }


def _seconds(call: Callable[[], Any], times: int) -> float:
    call()
    started = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - started) / times
