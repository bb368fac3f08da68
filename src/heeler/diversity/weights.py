"""Diversity at the weights a model has right now: one pass over the data, and every number within a few percent.

A table's sketches alone leave the bound uncertain by 10 to 20% (see `sketching`). Here the sum of all gradients is
taken from the gradients themselves, and the sum of their squares is calibrated by the exact norms of some examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heeler.diversity.alignment import Sums, align_dataset
from heeler.diversity.measured import Diversity, Estimate
from heeler.diversity.sketching import Floats, SketchError, calibrate, pick_for_calibration, to_floats
from heeler.sketch import Sketcher

Loss = Callable[[nn.Module, Any], Tensor]

WHOLE = 2048
"""Parameters up to which every example's whole gradient is looked at."""
CALIBRATED_BY = 128
"""Examples whose exact norms are taken, a backward each."""


def measure(model: nn.Module, batches: Iterable[Any], loss: Loss, *, level: float = 0.95, seed: int = 0) -> Diversity:
    """Diversity, bound and noise scale of all examples in `batches`, at the model's present weights.

        found = heeler.diversity.measure(model, loader, lambda model, batch: loss_fn(model(batch[0]), batch[1]))

    The sum of gradients is exact. So is the rest for up to 2048 parameters; beyond, Σ‖g‖² comes from sketches of 256
    numbers and the exact norms of 128 examples picked by them, and the interval tells how far that may be off.

    It takes one forward and backward of every batch and 128 of single examples, and leaves the model as it was:
    gradients, buffers and mode. Inside a run with a handle, wrap it in `with handle.paused():`. For one process and a
    plain module: under DDP give `model.module`; a sharded model has no gradient to read.

    Args:
        model: called in training mode: with dropout the gradients are those of the masks that are drawn.
        batches: gone over twice, with the same examples in both rounds: a list, or a loader that does not shuffle. All
            training examples; or a random sample of several times as many as the bound.
        loss: `loss(model, batch)`, the mean over a batch's examples. Batches are tensors with the examples along the
            first dimension, or tuples, lists or mappings of them.
        seed: of the projections, and of the picks.
    """
    with _left_as_it_was(model), torch.enable_grad():
        sketcher = Sketcher(model, dim=lambda n: n if n <= WHOLE else 256, layers="all", seed=seed, reduction="sum")
        try:
            sums, squares = _one_pass(model, sketcher, batches, loss)
        finally:
            sketcher.detach()
        parameters = [p for p in model.parameters() if p.requires_grad]
        whole = Estimate(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
        total = Estimate(sums.squares)
        if sums.squares > 0 and not (sketcher.exact and sketcher.dim == sum(p.numel() for p in parameters)):
            picked = pick_for_calibration(squares, CALIBRATED_BY, seed)
            total = calibrate(squares, picked, _exact_squares(model, parameters, batches, loss, picked))
    return align_dataset(whole, total, sums.count, level, SketchError()).all()


def _one_pass(model: nn.Module, sketcher: Sketcher, batches: Iterable[Any], loss: Loss) -> tuple[Sums, Floats]:
    """Add up all gradients in the parameters' `grad`; the sums of the sketches, and each one's squared norm."""
    sums, squares = Sums(sketcher.dim), []
    for batch in batches:
        count = _count(batch)
        (loss(model, batch) * count).backward()
        rows = to_floats(sketcher.pop())
        if len(rows) != count:
            raise ValueError(f"a batch of {count} examples gave {len(rows)} gradients: call the model once in `loss`")
        sums.add(rows)
        squares.append(np.einsum("nk,nk->n", rows, rows))
    if not squares:
        raise ValueError("there are no batches: diversity needs examples")
    return sums, np.concatenate(squares)


def _exact_squares(
    model: nn.Module, parameters: list[nn.Parameter], batches: Iterable[Any], loss: Loss, picked: Any
) -> list[float]:
    """‖g‖² of the picked examples, in the order of the picks."""
    found: dict[int, float] = {}
    wanted, start = set(picked.tolist()), 0
    for batch in batches:
        count = _count(batch)
        for at in sorted(i for i in wanted if start <= i < start + count):
            alone = loss(model, _example(batch, at - start))
            gradients = torch.autograd.grad(alone, parameters, allow_unused=True)
            found[at] = sum(float(g.double().square().sum()) for g in gradients if g is not None)
        start += count
    if len(found) < len(wanted):
        raise ValueError("batches were not the same the second time: give a list, or a loader, not an iterator")
    return [found[i] for i in picked.tolist()]


def _count(batch: Any) -> int:
    if isinstance(batch, Tensor):
        return len(batch)
    parts = list(batch.values() if isinstance(batch, Mapping) else batch)
    return next(len(part) for part in parts if isinstance(part, Tensor) and part.ndim)


def _example(batch: Any, at: int) -> Any:
    """A batch of one."""
    if isinstance(batch, Tensor):
        return batch[at : at + 1] if batch.ndim else batch
    if isinstance(batch, Mapping):
        return {name: _example(part, at) for name, part in batch.items()}
    return type(batch)(_example(part, at) for part in batch) if isinstance(batch, (tuple, list)) else batch


@contextmanager
def _left_as_it_was(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers()]
    model.train()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for module, training in modes.items():
            module.training = training
