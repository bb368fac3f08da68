"""Who computes what, so that a gradient is whole before every worker has answered. Pure functions on arrays.

The data are cut into batches. A code is a matrix, (workers, batches): worker i sends Σ_b code[i, b] · g_b, where g_b
is the summed gradient of batch b. The sum over all data is known as soon as weights a exist with Σ_i a_i · code[i] = 1
over the workers that have answered (`decode`).

* `assign_bcc`: batched coupon collection (Li et al., 1710.09990). Every worker holds one batch, drawn at random.
* `assign_fractional`: fractional repetition (Tandon et al., 1612.03301). Groups of s + 1 workers hold the same batch.
* `cyclic_code`: the cyclic code of the same paper. Worker i holds batches i, …, i + s.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray

FloatArray = NDArray[np.float64]

REDRAWS = 10_000
"""Draws of `assign_bcc` before it gives up."""
DRAWS = 16
"""Of cyclic codes, the one with the smallest coefficients is taken: with 50 workers and s = 9 the weights of `decode`
are then three times smaller than those of a single draw (`python -m benchmarks.stragglers thresholds`)."""
EXACT = 1e-6
"""How far Σ a_i · code[i] may be from 1. Sets that suffice leave less than 1e-8, others about 1."""


def assign_bcc(workers: int, batches: int, seed: int = 0) -> IntArray:
    """(workers,) the batch of each worker, uniformly at random among the draws in which every batch has a worker.

    One draw can miss a batch (8 workers and 4 batches: 38% of draws do), and then no number of answers is enough: such
    draws are thrown away.
    """
    _check_counts(workers, batches)
    rng = np.random.default_rng(seed)
    for _ in range(REDRAWS):
        assignment = rng.integers(0, batches, workers, dtype=np.int64)
        if len(np.unique(assignment)) == batches:
            return assignment
    raise ValueError(
        f"{workers} workers that draw at random hardly ever cover {batches} batches: take fewer batches (about "
        "workers / log(workers)), or assign_fractional, which leaves nothing to chance"
    )


def assign_fractional(workers: int, stragglers: int) -> IntArray:
    """(workers,) the batch of each worker: groups of stragglers + 1 neighbours hold the same one.

    There are workers / (stragglers + 1) batches, and any `stragglers` workers can be missing.
    """
    _check_stragglers(workers, stragglers)
    if workers % (stragglers + 1):
        raise ValueError(
            f"groups of {stragglers + 1} workers do not divide {workers} workers evenly: use cyclic_code, which has no "
            "such condition, or another number of workers"
        )
    return np.arange(workers, dtype=np.int64) // (stragglers + 1)


def code_of(assignment: Sequence[int] | IntArray) -> FloatArray:
    """(workers, batches) the code of an assignment of one batch per worker: ones and zeros."""
    assigned = np.asarray(assignment, dtype=np.int64)
    if assigned.ndim != 1 or not assigned.size or assigned.min() < 0:
        raise ValueError("an assignment is a list of batch numbers from 0 on, one per worker")
    batches = int(assigned.max()) + 1
    missing = sorted(set(range(batches)) - set(assigned.tolist()))
    if missing:
        raise ValueError(f"no worker has batch {missing[0]}: the sum over all batches could never be known")
    return np.eye(batches)[assigned]


def cyclic_code(workers: int, stragglers: int, seed: int = 0) -> FloatArray:
    """(workers, workers) a code of as many batches as workers; row i is not zero in i, …, i + stragglers (mod workers).

    Any `stragglers` workers can be missing. As Tandon et al. make it: H, (stragglers, workers), is random with
    H · 1 = 0, and row i solves H · code[i] = 0. Then all rows lie in the null space of H, which holds 1, and any
    workers - stragglers of them span it. Rows have norm 1.
    """
    _check_stragglers(workers, stragglers)
    rng = np.random.default_rng(seed)
    drawn = [_cyclic_rows(rng.standard_normal((stragglers, workers))) for _ in range(DRAWS if stragglers else 1)]
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
    one batch per worker all weights are 0 or 1 (with `code_of`) and nothing is rounded.
    """
    code = np.asarray(code, dtype=np.float64)
    if code.ndim != 2:
        raise ValueError("a code is a matrix, (workers, batches): make one of an assignment with code_of(assignment)")
    workers = np.asarray(arrived, dtype=np.int64)
    if workers.size and (workers.min() < 0 or workers.max() >= len(code)):
        raise ValueError(f"the code is of workers 0..{len(code) - 1}, but {arrived} have arrived")
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


def _check_counts(workers: int, batches: int) -> None:
    if batches < 1 or workers < batches:
        raise ValueError(
            f"{workers} workers with one batch each cannot cover {batches} batches: 1 <= batches <= workers"
        )


def _check_stragglers(workers: int, stragglers: int) -> None:
    if not 0 <= stragglers < workers:
        raise ValueError(f"of {workers} workers 0 to {workers - 1} can be missing, not {stragglers}")
