"""One run of `benchmarks.clock`, in a process of its own: `python -m benchmarks.clock_run SPEC.json`.

Before the clock: torch is imported, data are loaded, the model and its optimizer are made, CUDA is started. In it:
everything that an order needs, from `import heeler` to the last step. After it: the loss. Nothing here imports Heeler
but `ordered`, and that only for an order that needs it.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import RandomSampler

from benchmarks.clock_tasks import Task
from benchmarks.clock_training import Tensors, Training, training_of
from benchmarks.losses import objective

HEAVY = ("heeler", "numba", "scipy", "sklearn", "triton")
"""What would make Heeler's start too short if it were loaded before the clock."""


@dataclass(frozen=True)
class Spec:
    """What a run's process is told."""

    task: Task
    order: str
    """random, stratified, heeler, or "heeler, strata"."""
    seed: int
    rate: float
    epochs: float
    device: str
    data: str
    """The file with the examples."""
    out: str
    """The file for what came out."""
    threads: int | None = None
    budget: list[float | None] | None = None
    """What to give `heeler.Sampler` as `budget`, in a list of one; None: nothing."""
    rank: int = 0
    meeting: str = ""
    """The file by which several workers find each other."""


class Clock:
    """Seconds since it was made, epoch by epoch; on a GPU they are the GPU's own, and nothing waits for them."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.marks: list[Any] = []
        self.synchronize()
        self.mark()
        self.begun, self.cpu_begun = time.perf_counter(), time.process_time()

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self) -> None:
        """An epoch is over."""
        if self.cuda:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def stop(self) -> dict[str, Any]:
        self.synchronize()
        seconds, cpu = time.perf_counter() - self.begun, time.process_time() - self.cpu_begun
        pairs = zip(self.marks[:-1], self.marks[1:], strict=True)
        epochs = [a.elapsed_time(b) / 1e3 if self.cuda else b - a for a, b in pairs]
        return {"seconds": seconds, "cpu_seconds": cpu, "epoch_seconds": epochs}


def ordered(spec: Spec, data: Tensors, training: Training) -> tuple[Any, Any]:
    """The sampler, and Heeler's handle if there is one."""
    if spec.order == "random":
        return RandomSampler(data[0]), None
    import heeler

    kind, _, strata = spec.order.partition(", ")
    options: dict[str, Any] = {"strata": data[-1]} if strata or kind == "stratified" else {}
    if kind == "stratified":
        options["order"] = "stratified"
    elif spec.budget is not None:
        options["budget"] = spec.budget[0]
    if spec.task.workers > 1:
        options["shards"] = "local"
    sampler = heeler.Sampler(len(data[0]), batch_size=spec.task.batch, seed=spec.seed, **options)
    if kind == "stratified":
        return sampler, None
    return sampler, heeler.attach(training.model, sampler, **training.attach_options)


def start_device(device: str) -> None:
    """CUDA's context, cuBLAS and cuDNN: both sides have them before the clock."""
    if device != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    images = torch.randn(64, 3, 32, 32, device=device)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(14400, 10)).to(
        device
    )
    net(images).sum().backward()
    torch.cuda.synchronize()


def run(spec: Spec) -> dict[str, Any]:
    """Train, by the clock."""
    task = spec.task
    if spec.threads or task.threads:
        torch.set_num_threads(spec.threads or task.threads or 1)
    stored = torch.load(spec.data, weights_only=True)
    everything: Tensors = stored["train"]
    share = len(everything[0]) // task.workers
    data = tuple(t[spec.rank * share : (spec.rank + 1) * share] for t in everything)
    torch.manual_seed(spec.seed)
    training = training_of(task, everything, spec.device, spec.rate)
    torch.manual_seed(1000 * spec.seed + spec.rank)  # other draws on each rank
    start_device(spec.device)
    early = [name for name in HEAVY if name in sys.modules]
    meet(task)

    clock = Clock(spec.device)
    sampler, handle = ordered(spec, data, training)
    loader = training.loader(data, sampler)
    steps, taken, sketched = max(1, round(spec.epochs * len(loader))), 0, []
    while taken < steps:
        for batch in loader:
            training.step(batch, taken / steps)
            taken += 1
            if taken == steps:
                break
        clock.mark()
        sketched.append(handle is not None and handle.sketcher.sketching)
    meet(task)
    found = clock.stop()

    found |= {"loaded_before_the_clock": early, "threads": torch.get_num_threads(), "sketched": sketched}
    found |= {"steps": steps, "steps_per_epoch": len(loader), "examples": len(everything[0])}
    found["heeler_was_imported"] = "heeler" in sys.modules
    if handle is not None:
        found["metrics"], found["verdict"] = handle.metrics(), str(handle.verdict)
    if task.evaluate:
        found["loss"] = final_loss(training.net, task, everything, stored.get("least"))
    return found


def final_loss(net: nn.Module, task: Task, data: Tensors, least: float | None) -> float:
    """The training loss in evaluation mode; the distance from the optimum, in double precision, of a convex task."""
    if least is None:
        return objective(net, data)
    doubled = tuple(t.double() if t.dtype.is_floating_point else t for t in data)
    return objective(net.double(), doubled, task.decay) - least


def meet(task: Task) -> None:
    """Workers begin and end together."""
    if task.workers > 1:
        torch.distributed.barrier()


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    spec = Spec(**{**told, "task": Task(**told["task"])})
    if spec.task.workers > 1:
        method = f"file://{spec.meeting}"
        torch.distributed.init_process_group("gloo", method, rank=spec.rank, world_size=spec.task.workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        found = run(spec)
    found["warnings"] = sorted({str(warning.message) for warning in caught})
    if spec.rank == 0:
        Path(spec.out).write_text(json.dumps(found))
    if spec.task.workers > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
