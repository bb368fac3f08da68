"""Plain and tapped steps of two copies of a model, taking turns."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heeler.herding import SketchTable
from heeler.sketch import Courier, Sketcher

TURNS = 9
TURN_SECONDS = 0.1


@dataclass(frozen=True)
class Timing:
    """Medians over the turns; `ratio` is the median of the turns' ratios, `low` and `high` its quartiles."""

    plain_ms: float
    tapped_ms: float
    ratio: float
    low: float
    high: float


def measure(model: nn.Module, loss: Callable[[nn.Module], Tensor], options: dict[str, Any]) -> Timing:
    """Time steps of plain SGD on copies of `model`, without and with the taps that `options` ask for.

    The model, its gradients and the random generators are left as they were. A compiled model's copies are compiled
    anew, and what was compiled in this process is forgotten afterwards: else its own first call would be taken for a
    second one.
    """
    is_wrapped = isinstance(model, torch._dynamo.OptimizedModule)
    is_compiled = is_wrapped or getattr(model, "_compiled_call_impl", None) is not None
    root: Any = model._orig_mod if is_wrapped else model
    root = root.module if isinstance(root, nn.parallel.DistributedDataParallel) else root
    devices = {p.device.index for p in root.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices), torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        copies: list[Any] = [copy.deepcopy(root).train() for _ in range(2)]
        if is_wrapped:
            copies = [model.dynamo_ctx(net) for net in copies]  # type: ignore[operator]
        elif is_compiled:
            for net in copies:
                net.compile()
        sketcher = Sketcher(copies[1], **options)
        try:
            return _take_turns(_stepper(copies[0], loss), _stepper(copies[1], loss, sketcher), devices)
        finally:
            if is_compiled:
                torch._dynamo.reset()


def _stepper(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], sketcher: Sketcher | None = None
) -> Callable[[], None]:
    table: SketchTable | None = None
    courier = Courier()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.0)

    def step() -> None:
        nonlocal table
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if sketcher is not None:
            rows = sketcher.pop()
            if not len(rows):
                raise ValueError(
                    "a step of loss(model) left no sketch: it must call the model that it is given, once, on a batch"
                )
            table = table or SketchTable(len(rows), sketcher.dim)
            courier.send(np.arange(len(rows)), rows)
            for indices, vectors in courier.receive():
                table.put(indices, vectors)

    return step


def _take_turns(plain: Callable[[], None], tapped: Callable[[], None], devices: set[Any]) -> Timing:
    for step in (plain, tapped):
        _seconds(step, 3, devices)  # warm up
    count = max(1, min(200, int(TURN_SECONDS / max(_seconds(plain, 1, devices), 1e-6))))
    turns = []
    for turn in range(TURNS):
        pair = (plain, tapped) if turn % 2 == 0 else (tapped, plain)
        taken = {step: _seconds(step, count, devices) for step in pair}
        turns.append((taken[plain], taken[tapped]))
    ratios = sorted(b / a for a, b in turns)
    plain_ms, tapped_ms = (1e3 * statistics.median(seconds) for seconds in zip(*turns, strict=True))
    return Timing(plain_ms, tapped_ms, statistics.median(ratios), ratios[TURNS // 4], ratios[-1 - TURNS // 4])


def _seconds(step: Callable[[], None], count: int, devices: set[Any]) -> float:
    """A step, on average."""
    for device in devices:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    for device in devices:
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count
