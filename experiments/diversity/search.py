"""The runs: every batch size with the learning rate that suits it best, until it reaches what the smallest reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.diversity.place import DiversityPlace, langevin_sigma
from experiments.diversity.point import example_gradients, measure
from experiments.diversity.variants import Variant
from experiments.folder import Folder
from experiments.records import OnRecord, Result, carry_out
from experiments.setup import Run
from experiments.summary import Floats, Line, curve_quantity
from experiments.tasks import get_task
from experiments.training import load

PATIENCE = 5.0
"""Times the epochs of the batch size before that a batch size may take."""
MOST_EPOCHS = 400
MOST_RATES = 16


@dataclass(frozen=True)
class Trial:
    """A learning rate's outcome, over all seeds."""

    lr: float
    epochs: float
    """To the target; inf if not reached."""
    loss: float
    """At the end; inf if it diverged."""

    @property
    def rank(self) -> tuple[float, float]:
        return self.epochs, self.loss


def levels(curve: Floats) -> tuple[Floats, Floats]:
    """Epochs and losses of the curve that never rises and is nearest to a loss curve, by its logarithm: (m,) each.

    At a constant rate a loss jumps from epoch to epoch, and would meet any target early by luck. (This is isotonic
    regression: neighbours that rise are pooled; a pool stands at the middle of its epochs.) Of a run that diverged only
    the end is left, at infinity.
    """
    if not np.isfinite(curve).all():
        return np.array([float(len(curve) - 1)]), np.array([np.inf])
    pools: list[tuple[float, float, int]] = []  # sums of logarithms and of epochs, and how many
    for epoch, value in enumerate(np.log(np.maximum(curve, 1e-300))):
        pool = (float(value), float(epoch), 1)
        while pools and pools[-1][0] / pools[-1][2] <= pool[0] / pool[2]:
            before = pools.pop()
            pool = (before[0] + pool[0], before[1] + pool[1], before[2] + pool[2])
        pools.append(pool)
    logs, epochs, counts = (np.array(column, float) for column in zip(*pools, strict=True))
    return epochs / counts, np.exp(logs / counts)


def crossing(curve: Floats, target: float) -> float:
    """The epoch, with its fraction, at which a loss curve's `levels` meet the target; inf if they do not.

    Between levels the loss is taken to fall exponentially.
    """
    epochs, losses = levels(curve)
    if losses[-1] > target * (1 + 1e-12):
        return math.inf
    logs = np.log(losses)
    return float(np.interp(-math.log(target), -logs, epochs))


def final_loss(curve: Floats) -> float:
    """The last of its `levels`."""
    return float(levels(curve)[1][-1])


def search(attempt: Callable[[float], Trial], guess: float) -> Trial:
    """The best learning rate near a guess: steps by factors of 2 while they help, then one by √2 to either side."""
    trials: dict[int, Trial] = {}

    def at(step: int) -> Trial:
        if step not in trials:
            trials[step] = attempt(guess * 2 ** (step / 2))
        return trials[step]

    best, stride = 0, 2
    while len(trials) < MOST_RATES:
        better = min((best - stride, best, best + stride), key=lambda step: at(step).rank)
        if better != best:
            best = better
        elif stride == 2:
            stride = 1
        else:
            break
    return at(best)


@dataclass
class Sweep:
    """All runs of one variant of a task. Finished ones are read from `out`, not repeated."""

    task: str
    variant: Variant
    folder: Folder
    out: Path
    batch_sizes: Sequence[int]
    epochs: int = 5
    """Passes over the data that the smallest batch gets; the loss it reaches is the target of all."""
    seeds: int = 3
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    on_record: OnRecord | None = None

    def carry_out(self) -> None:
        """Runs for every batch size, until one does not reach the target any more."""
        smallest, *others = sorted(self.batch_sizes)
        guess = self._first_guess(smallest)
        best = search(lambda lr: self._attempt(smallest, lr, self.epochs, 0.0), guess)
        target = best.loss
        # The rate that ends lowest need not be the one that gets there first.
        best = search(lambda lr: self._attempt(smallest, lr, self.epochs, target), best.lr)
        self._measured(smallest, best.lr, self.epochs, "mechanisms" if self.variant == Variant() else "own")
        before = smallest
        for batch in others:
            budget = math.ceil(min(PATIENCE * best.epochs, MOST_EPOCHS))
            best = self._tune(batch, best.lr * batch / before, budget, target)
            if math.isinf(best.epochs):
                break
            before = batch
            if self.variant.mechanism == "none" and self.variant.replication == 1:
                self._measured(batch, best.lr, min(math.ceil(best.epochs), self.epochs), "own")

    def _tune(self, batch: int, guess: float, budget: int, target: float) -> Trial:
        limit = budget

        def attempt(lr: float) -> Trial:
            nonlocal limit
            trial = self._attempt(batch, lr, limit, target)
            if math.isfinite(trial.epochs):  # whoever needs longer than the best so far need not be waited for
                limit = min(limit, math.ceil(trial.epochs) + 2)
            return trial

        return search(attempt, guess)

    def _attempt(self, batch: int, lr: float, epochs: int, target: float) -> Trial:
        results = [self._run(self.run(batch, lr, epochs, seed)) for seed in range(self.seeds)]
        curve = Line(self.variant.name, results).mean(curve_quantity(self.task))
        return Trial(lr, crossing(curve, target) if target > 0 else math.inf, final_loss(curve))

    def _measured(self, batch: int, lr: float, epochs: int, what: str) -> None:
        """The first seed once more, with the diversity of every epoch: apart, for measuring takes time."""
        run = self.run(batch, lr, epochs, 0)
        self._run(run.but(options={**run.options, "measure": what}))

    def run(self, batch: int, lr: float, epochs: int, seed: int) -> Run:
        """The run's settings; every batch size has the same examples, a multiple of the largest."""
        rounded = float(f"{lr:.6g}")
        return self.variant.run(
            self.task, seed=seed, batch_size=batch, lr=rounded, epochs=epochs, device=self.device,
            options=self._settings,
        )  # fmt: skip

    def _run(self, run: Run) -> Result:
        return carry_out(run, self.folder, self.out, self.on_record, DiversityPlace(run))

    @cached_property
    def _settings(self) -> dict[str, Any]:
        """Options of all runs: what tells this sweep's runs from those of another in the same folder."""
        options = {**self.options, "examples": self._examples(), "reference_epochs": self.epochs}
        return {**options, "sigma": self._sigma(options)} if self.variant.mechanism == "langevin" else options

    def _examples(self) -> int:
        count = len(get_task(self.task).load(self.folder, dict(self.options)))
        largest = math.lcm(*self.batch_sizes, self.variant.replication)
        if count < largest:
            raise ValueError(
                f"{self.task} has {count} training examples, and {largest} are needed: take smaller batches, each a "
                "multiple of the one before"
            )
        return count // largest * largest

    def _sigma(self, options: dict[str, Any]) -> float:
        task = get_task(self.task)
        plain = Variant().run(self.task, batch_size=1, device=self.device, options=options)
        examples, _ = load(plain, self.folder)
        torch.manual_seed(0)
        model = task.model(examples, plain.options).to(self.device)
        found = measure(example_gradients(model, task, examples.train), 1)
        return langevin_sigma(found["mean_square"], model)

    def _first_guess(self, batch: int) -> float:
        """The task's published rate, scaled to the batch; momentum counts as 1/(1 − m) times the rate."""
        given = get_task(self.task).defaults
        published = given["lr"] / (1 - given.get("momentum", 0.0))
        return published * batch / (given["batch_size"] * given.get("workers", 1))
