"""The learning rate of every step."""

from __future__ import annotations

import math

from experiments.setup import Run


def rate(run: Run, step: int, per_epoch: int) -> float:
    """The rate of step 0, 1, ... of a run with so many steps per epoch.

    A cosine or a straight line would be zero at the step after the last. The decay of a constant rate comes in whole
    epochs; a warm-up ends with the full rate, and the rest of the schedule has the steps that are left.
    """
    total = run.epochs * per_epoch
    warm = round(run.warmup * total)
    if step < warm:
        return run.lr * (step + 1) / warm
    if run.schedule == "constant":
        return run.lr * (run.decay ** (step // per_epoch // run.decay_every) if run.decay_every else 1.0)
    done = (step - warm) / (total - warm)
    return run.lr * (0.5 * (1 + math.cos(math.pi * done)) if run.schedule == "cosine" else 1 - done)
