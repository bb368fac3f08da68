"""Gradient codes of the literature, and how many workers a step with one of them waits for: simulated, and in theory.

The data are cut into batches. A code is a matrix, (workers, batches): worker i sends Σ_b code[i, b] · g_b, where g_b
is the summed gradient of batch b. The sum over all data is known as soon as weights a exist with Σ_i a_i · code[i] = 1
over the workers that have answered (`decode`).

* `assign_bcc` of `heeler.stragglers`: every worker holds one batch, drawn at random (Li et al., 1710.09990).
* `assign_fractional`: fractional repetition (Tandon et al., 1612.03301). Groups of s + 1 workers hold the same batch.
* `cyclic_code`: the cyclic code of the same paper. Worker i holds batches i, …, i + s.

`python -m benchmarks.stragglers thresholds` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

DRAWS = 16
"""Of so many cyclic codes the one with the smallest coefficients is taken: with 50 workers and s = 9 the weights of
`decode` are then three times smaller than those of a single draw."""
EXACT = 1e-6
"""How far Σ a_i · code[i] may be from 1. Sets that suffice leave less than 1e-8, others about 1."""


def assign_fractional(workers: int, stragglers: int) -> IntArray:
    """(workers,) the batch of each worker: groups of stragglers + 1 neighbours hold the same one."""
    if workers % (stragglers + 1):
        raise ValueError(f"groups of {stragglers + 1} workers do not divide {workers} workers evenly")
    return np.arange(workers, dtype=np.int64) // (stragglers + 1)


def code_of(assignment: Sequence[int] | IntArray) -> FloatArray:
    """(workers, batches) the code of an assignment of one batch per worker: ones and zeros."""
    assigned = np.asarray(assignment, dtype=np.int64)
    return np.eye(int(assigned.max()) + 1)[assigned]


def cyclic_code(workers: int, stragglers: int, seed: int = 0, draws: int = DRAWS) -> FloatArray:
    """(workers, workers) a code of as many batches as workers; row i is not zero in i, …, i + stragglers (mod workers).

    Any `stragglers` workers can be missing. As Tandon et al. make it: H, (stragglers, workers), is random with
    H · 1 = 0, and row i solves H · code[i] = 0. Then all rows lie in the null space of H, which holds 1, and any
    workers - stragglers of them span it. Rows have norm 1.
    """
    rng = np.random.default_rng(seed)
    drawn = [_cyclic_rows(rng.standard_normal((stragglers, workers))) for _ in range(draws if stragglers else 1)]
    code = min(drawn, key=lambda rows: float(np.abs(rows).max()))
    return np.asarray(code / np.linalg.norm(code, axis=1, keepdims=True))


def _cyclic_rows(checks: FloatArray) -> FloatArray:
    stragglers, workers = checks.shape
    checks = checks - checks.mean(axis=1, keepdims=True)  # H · 1 = 0
    code = np.eye(workers)
    for i in range(workers):
        others = (i + np.arange(1, stragglers + 1)) % workers
        code[i, others] = -np.linalg.solve(checks[:, others], checks[:, i])
    return code


def decode(code: FloatArray, arrived: Sequence[int] | IntArray) -> FloatArray | None:
    """(len(arrived),) weights with which the messages of the workers `arrived` add up to the sum over all batches.

    None if they do not suffice. Of workers that send the same, the first counts and the others have weight 0, so with
    one batch per worker (`code_of`) all weights are 0 or 1 and nothing is rounded.
    """
    workers = np.asarray(arrived, dtype=np.int64)
    weights = np.zeros(len(workers))
    rows, first = np.unique(code[workers], axis=0, return_index=True)
    if not (rows != 0).any(axis=0).all():  # no worker that has arrived holds this batch
        return None
    if ((rows != 0).sum(axis=1) == 1).all() and len(rows) == code.shape[1]:
        weights[first] = 1 / rows.sum(axis=1)
        return weights
    ones = np.ones(code.shape[1])
    solved = np.linalg.lstsq(rows.T, ones, rcond=None)[0]
    if np.abs(solved @ rows - ones).max() > EXACT:
        return None
    weights[first] = solved
    return weights


def coupons(batches: int) -> float:
    """B · (1 + 1/2 + … + 1/B): random draws until every one of B batches has come, on average (BCC, n → ∞)."""
    return batches * sum(1 / k for k in range(1, batches + 1))


def first_of_all(groups: int, size: int) -> float:
    """Mean place at which the last of some groups of equal size first appears in a random order: exactly."""
    workers = groups * size
    return sum((-1) ** (k + 1) * math.comb(groups, k) * (workers + 1) / (k * size + 1) for k in range(1, groups + 1))


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


def simulate(codes: Sequence[FloatArray], seconds: FloatArray) -> tuple[IntArray, FloatArray]:
    """Steps with these codes, in turn, and workers that answer after so many seconds, (runs, workers).

    (runs,) workers that had answered when the sum was known, and (runs,) when that was.
    """
    thresholds = np.empty(len(seconds), np.int64)
    for run, times in enumerate(seconds):
        thresholds[run] = recovery_threshold(codes[run % len(codes)], np.argsort(times, kind="stable"))
    return thresholds, np.sort(seconds, axis=1)[np.arange(len(seconds)), thresholds - 1]
