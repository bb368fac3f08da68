"""Steps of two copies of a model, without and with sketches, taking turns."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heeler.herding import SketchTable
from heeler.ordering.host_copy import HostCopy
from heeler.sketch import Sketcher
from heeler.torch_private import is_compiled

Step = Callable[[], None]

TURNS = 9
TURN_SECONDS = 0.1


@dataclass(frozen=True)
class Timing:
    """Medians over the turns; `ratio` is the median of the turns' ratios, `low` and `high` its quartiles."""

    plain_ms: float
    sketched_ms: float
    ratio: float
    low: float
    high: float


def measure(model: nn.Module, loss: Callable[[nn.Module], Tensor], options: dict[str, Any]) -> Timing:
    """Time steps of plain SGD on copies of `model`, without and with the sketcher that `options` describe.

    The model, its gradients and the random generators are left as they were. A compiled model's copies are compiled
    again, and what was compiled in this process is forgotten afterwards: else its own first call would be taken for a
    second one.
    """
    is_wrapped, compiled = isinstance(model, torch._dynamo.OptimizedModule), is_compiled(model)
    root: Any = model._orig_mod if is_wrapped else model
    root = root.module if isinstance(root, nn.parallel.DistributedDataParallel) else root
    devices = {p.device.index for p in root.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        copies: list[Any] = [copy.deepcopy(root).train() for _ in range(2)]
        if is_wrapped:
            copies = [model.dynamo_ctx(net) for net in copies]  # type: ignore[operator]
        elif compiled:
            for net in copies:
                net.compile()
        sketcher = Sketcher(copies[1], **options)
        try:
            return _timing(_step(copies[0], loss), _step(copies[1], loss, sketcher), devices)
        finally:
            if compiled:
                torch._dynamo.reset()


def training_step(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, take: Step | None = None) -> Step:
    """One step: forward and loss, backward, optimizer; and `take`, which takes the sketches away, if there are any."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        if take is not None:
            take()

    return step


def timed(step: Step, count: int, devices: Iterable[Any]) -> tuple[float, float]:
    """Seconds per step: on the clock, and of the processor, which on a machine with other work tells more."""
    for device in devices:
        torch.cuda.synchronize(device)
    start, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        step()
    for device in devices:
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count, (time.process_time() - processor) / count


def take_turns(
    plain: Step, sketched: Step, turns: int, count: int, devices: Iterable[Any]
) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """What `timed` says of `count` steps of either, in every turn; who goes first alternates."""
    found = []
    for turn in range(turns):
        pair = (plain, sketched) if turn % 2 == 0 else (sketched, plain)
        taken = {step: timed(step, count, devices) for step in pair}
        found.append((taken[plain], taken[sketched]))
    return found


def _step(model: nn.Module, loss: Callable[[nn.Module], Tensor], sketcher: Sketcher | None = None) -> Step:
    table: SketchTable | None = None
    host_copy = HostCopy()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.0)

    def store() -> None:
        nonlocal table
        assert sketcher is not None
        rows = sketcher.pop()
        if not len(rows):
            raise ValueError(
                "a step of loss(model) left no sketch: it must call the model that it is given, once, on a batch"
            )
        table = table or SketchTable(len(rows), sketcher.dim)
        host_copy.send(np.arange(len(rows)), rows)
        for indices, vectors in host_copy.receive():
            table.put(indices, vectors)

    return training_step(lambda: loss(model), optimizer, store if sketcher is not None else None)


def _timing(plain: Step, sketched: Step, devices: set[Any]) -> Timing:
    for step in (plain, sketched):
        timed(step, 3, devices)  # warm up
    count = max(1, min(200, int(TURN_SECONDS / max(timed(plain, 1, devices)[0], 1e-6))))
    turns = [(a, b) for (a, _), (b, _) in take_turns(plain, sketched, TURNS, count, devices)]
    ratios = sorted(b / a for a, b in turns)
    plain_ms, sketched_ms = (1e3 * statistics.median(seconds) for seconds in zip(*turns, strict=True))
    return Timing(plain_ms, sketched_ms, statistics.median(ratios), ratios[TURNS // 4], ratios[-1 - TURNS // 4])
