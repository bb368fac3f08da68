"""Diversity at the weights a model has right now: one pass over the data, and every number within a few percent.

A table's sketches alone leave the bound uncertain by 10 to 20%. Here the sum of all gradients is taken from the
gradients themselves, and the sum of their squares is corrected by the exact norms of some examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heeler.diversity.estimators import bound_from_sums
from heeler.diversity.measured import Diversity, from_bound
from heeler.diversity.sketch_error import SketchError
from heeler.diversity.vectors import Floats, to_floats
from heeler.sketch import Sketcher

Loss = Callable[[nn.Module, Any], Tensor]

WHOLE = 2048
"""Parameters up to which every example's whole gradient is looked at."""
EXACT_NORMS = 128
"""Examples whose exact norms are taken, a backward each."""


def measure(model: nn.Module, batches: Iterable[Any], loss: Loss, *, seed: int = 0) -> Diversity:
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
            squares = _one_pass(model, sketcher, batches, loss)
        finally:
            sketcher.detach()
        parameters = [p for p in model.parameters() if p.requires_grad]
        whole = sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None)
        total, variance = float(squares.sum()), 0.0
        if total > 0 and not (sketcher.exact and sketcher.dim == sum(p.numel() for p in parameters)):
            picked = pick_by_square(squares, EXACT_NORMS, seed)
            total, variance = corrected_sum(squares, picked, _exact_squares(model, parameters, batches, loss, picked))
    return from_bound(bound_from_sums(whole, total, len(squares), SketchError(variance)), len(squares))


def pick_by_square(squares: Floats, count: int, seed: int) -> Any:
    """(count,) examples, drawn with replacement in proportion to `squares`, (N,)."""
    return np.random.default_rng(seed).choice(len(squares), count, p=squares / squares.sum())


def corrected_sum(squares: Floats, picked: Any, exact: list[float]) -> tuple[float, float]:
    """A = Σ‖g_i‖² and its relative variance, from all sketches' squares (N,) and the exact ones of the picked, (n,).

    As example i is picked with probability ‖s_i‖²/Â, the mean of Â·‖g_i‖²/‖s_i‖² over the picked is unbiased for A
    (Hansen & Hurwitz 1943). Its spread is that of the *ratio*, so heavy tails of the norms do not enter.
    """
    ratios = np.asarray(exact) / squares[picked]
    mean = float(ratios.mean())
    variance = float(ratios.var(ddof=1)) / len(ratios) / mean**2 if mean > 0 else 0.0
    return float(squares.sum()) * mean, variance


def _one_pass(model: nn.Module, sketcher: Sketcher, batches: Iterable[Any], loss: Loss) -> Floats:
    """Add up all gradients in the parameters' `grad`; returns the squared norm of each example's sketch."""
    squares = []
    for batch in batches:
        count = _count(batch)
        (loss(model, batch) * count).backward()
        rows = to_floats(sketcher.pop())
        if len(rows) != count:
            raise ValueError(f"a batch of {count} examples gave {len(rows)} gradients: call the model once in `loss`")
        squares.append(np.einsum("nk,nk->n", rows, rows))
    if not squares:
        raise ValueError("there are no batches: diversity needs examples")
    return np.concatenate(squares)


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
