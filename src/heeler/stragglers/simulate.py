"""How many workers, and how long, a step waits for: simulated, and by the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from heeler.herding.validate import IntArray
from heeler.stragglers.assign import FloatArray, decode


@dataclass(frozen=True)
class Simulation:
    """Of many simulated steps."""

    thresholds: IntArray
    """(runs,) workers that had answered when the sum was known."""
    seconds: FloatArray
    """(runs,) when that was."""

    @property
    def threshold(self) -> float:
        """The mean number of workers waited for."""
        return float(self.thresholds.mean())


def coupons(batches: int) -> float:
    """B · (1 + 1/2 + … + 1/B): random draws until every one of B batches has come, on average (BCC, n → ∞)."""
    if batches < 1:
        raise ValueError(f"there must be a batch, not {batches}")
    return batches * sum(1 / k for k in range(1, batches + 1))


def recovery_threshold(code: FloatArray, order: Sequence[int] | IntArray) -> int:
    """How many workers must answer, in this order, (workers,), before `decode` gives the sum over all batches."""
    if decode(code, order) is None:
        raise ValueError("not even all of these workers suffice: the code, or the order, lacks some of them")
    low, high = 1, len(order)
    while low < high:  # more answers never hurt, so halving finds the first that suffices
        middle = (low + high) // 2
        if decode(code, order[:middle]) is None:
            low = middle + 1
        else:
            high = middle
    return high


def delays(loads: Sequence[float] | FloatArray, runs: int, *, shift: float, rate: float, seed: int = 0) -> FloatArray:
    """(runs, workers) seconds until each worker has answered: a shifted exponential, as usual.

    A worker with `loads[i]` units of data needs at least shift · loads[i] seconds, and beyond that on average
    loads[i] / rate: P(T ≤ t) = 1 − exp(−rate / load · (t − shift · load)).
    """
    load = np.asarray(loads, dtype=np.float64)
    if load.ndim != 1 or not load.size or (load <= 0).any():
        raise ValueError("loads are positive numbers, one per worker")
    if runs < 1 or shift < 0 or rate <= 0:
        raise ValueError("there must be a run, and shift >= 0 and rate > 0")
    rng = np.random.default_rng(seed)
    return np.asarray(shift * load + load / rate * rng.standard_exponential((runs, len(load))))


def simulate(codes: Sequence[FloatArray], seconds: FloatArray) -> Simulation:
    """Steps with these codes, in turn, and workers that answer after so many seconds, (runs, workers)."""
    if not codes or seconds.ndim != 2 or any(len(code) != seconds.shape[1] for code in codes):
        raise ValueError("seconds has a row per run and a column per worker of every code")
    thresholds = np.empty(len(seconds), np.int64)
    for run, times in enumerate(seconds):
        thresholds[run] = recovery_threshold(codes[run % len(codes)], np.argsort(times, kind="stable"))
    ended = np.sort(seconds, axis=1)[np.arange(len(seconds)), thresholds - 1]
    return Simulation(thresholds, ended)
