"""Which examples share a step, and in which order they come: the two freedoms of an order, used one after the other.

Within a step gradients are averaged, so what a step does wrong is the sum of its examples' deviations from the mean.

1. *Short prefixes*: balance sweeps over all examples.
2. *Balanced steps*: the epoch is halved again and again, and examples of the two halves are exchanged as long as the
   prefix between them gets shorter. In the end that is so of any two neighbouring steps; and where all prefixes are
   short, so are the sums of the steps between them. Own shards exchange within a worker; it is the sum over all workers
   that is balanced.

Strata are columns of the vectors (`strata_units`), so that steps and prefixes also hold about their share of each.

docs/how-it-works.md says why, RESULTS.md what it is worth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.solver import Solution
from heeler.herding.sweeps import sharing_groups
from heeler.herding.validate import IntArray
from heeler.herding.vectors import AXES, Vectors, make_vectors
from heeler.native import loops

SWEEPS = 10
"""Balance sweeps before examples are exchanged: twice as many leave 0.98 of the prefixes (`benchmarks.realized`)."""
STAYS = 1 / 8
"""The share of an epoch that keeps its place as steps are turned (`python -m benchmarks.turned`)."""
SWEEP_SECONDS, EXCHANGE_SECONDS = 4e-9, 1.7e-8
"""Seconds of a solve per number of the table, and per number that exchanges look at. One core of a shared AMD EPYC,
2026-11-19: 7,188 × 1,024 took 78 ms, and 10^6 × 256, of which exchanges look at all numbers, 5.4 s
(`python -m benchmarks solver`)."""


def solve_batches(
    vectors: Any,
    *,
    batch_size: int,
    seed: Any = 0,
    shard_sizes: Sequence[int] | None = None,
    strata: IntArray | None = None,
    seen: NDArray[np.bool_] | None = None,
) -> Solution:
    """A new order of all N examples in which every prefix and every step is balanced.

    The same arguments give the same order; another seed gives another one that is as good.

    Args:
        vectors: (N, K) float16, float32 or float64, NumPy or CPU torch, finite where seen. Half precision is copied
            only if strided.
        batch_size: examples per worker and step.
        seed: of the random order it starts from, and of who meets whom.
        shard_sizes: examples of each worker, side by side; None for one worker.
        strata: (N,) codes, 0 or more; every step then holds about its share of each.
        seen: (N,) which examples have a vector; the others count as the mean. All by default.

    Returns:
        The order with its bound, of which strata are a part; `bound_before` and `bound_random` are what random orders
        have on average.
    """
    begun = time.perf_counter()
    floats = check.as_floats(vectors)
    batch_size = check.check_positive(batch_size, "batch_size")
    shards = check.as_offsets(shard_sizes, len(floats))
    strata = None if strata is None else _checked_strata(strata, len(floats))
    seen = None if seen is None else check.as_seen(seen, len(floats))
    made = make_vectors(floats, shards, seen=seen, strata=strata)
    return order_batches(made, batch_size=batch_size, seed=seed, begun=begun)


def order_batches(vectors: Vectors, *, batch_size: int, seed: Any, begun: float | None = None) -> Solution:
    """The same for vectors that have been checked. begun: when the work began, if that was before."""
    begun = time.perf_counter() if begun is None else begun
    rng = np.random.default_rng(seed)
    order = np.concatenate([a + rng.permutation(b - a) for a, b in pairwise(vectors.shards.tolist())])
    order = _swept(vectors, order, rng)
    steps = make_steps(vectors.shards, batch_size)
    short, means = vectors.short
    rows = np.ascontiguousarray(vectors.signed(order[steps.places]))
    loops.exchange_tree(short, means, rows, steps.workers, steps.offsets, int(rng.integers(2**62)))
    order[steps.places] = np.where(rows >= 0, rows, -1 - rows)
    sums, prefixes = loops.step_squares(vectors.rows, vectors.means, rows, steps.workers, steps.offsets)
    random_sums, random_prefixes = expected_squares(vectors.shards, vectors.spread, batch_size)
    bound, random = (math.sqrt(each / steps.count) * vectors.unit for each in (prefixes, random_prefixes))
    left = sums / random_sums if random_sums > 0 else 1.0
    return Solution(order, random, bound, random, SWEEPS, time.perf_counter() - begun, left)


def turned(order: IntArray, shards: IntArray, batch_size: int, rng: np.random.Generator) -> IntArray:
    """(N,) another order that is about as good, at no cost: the same steps, from another one on, perhaps backwards.

    The sum of the first t steps is the difference of two prefixes of the old order, or minus one. The last `STAYS` of
    the steps keep their places: sweeps end an epoch with small gradients, and what the last steps do wrong stays where
    the rate is constant. Within a step examples are shuffled.
    """
    out, full = order.copy(), int(np.diff(shards).min()) // batch_size  # steps that all workers take with a full batch
    turning = full - math.ceil(STAYS * full)
    steps = np.roll(np.arange(turning), -int(rng.integers(max(turning, 1))))[:: -1 if rng.integers(2) else 1]
    steps = np.append(steps, np.arange(turning, full))
    for a in shards[:-1].tolist():
        own = slice(a, a + full * batch_size)
        out[own] = rng.permuted(order[own].reshape(full, batch_size)[steps], axis=1).reshape(-1)
    return out


def solve_seconds(examples: int, dim: int) -> float:
    """What a solve takes, about, on one core."""
    return examples * (SWEEP_SECONDS * dim + EXCHANGE_SECONDS * (dim if dim <= 2 * AXES else AXES))


@dataclass(frozen=True)
class Steps:
    """An epoch's steps: places step by step, in each worker by worker."""

    places: IntArray
    """(N,) where in the workers' lists, side by side, each place lies."""
    workers: IntArray
    """(N,) whose each place is."""
    offsets: IntArray
    """(T + 1,) where each step begins."""

    @property
    def count(self) -> int:
        return self.offsets.size - 1


def make_steps(shards: IntArray, batch_size: int) -> Steps:
    """Of workers with these shards, (n + 1,), who take `batch_size` examples each by step."""
    sizes = np.diff(shards)
    worker = np.repeat(np.arange(sizes.size), sizes)
    step = (np.arange(shards[-1]) - np.repeat(shards[:-1], sizes)) // batch_size
    places = np.argsort(step, kind="stable") if sizes.size > 1 else np.arange(shards[-1])
    return Steps(places, worker[places], np.append(0, np.cumsum(np.bincount(step))))


def expected_squares(shards: IntArray, spreads: NDArray[np.float64], batch_size: int) -> tuple[float, float]:
    """Σ_t E‖sum_t‖² and Σ_t E‖prefix_t‖² over random orders of each worker's examples.

    shards: (n + 1,) where each worker's examples begin; spreads: (n,) their mean squared deviations from their mean. A
    sum of t of m vectors drawn without replacement, which add up to zero and have the mean square v, has the expected
    square t (m - t) / (m - 1) · v. Workers' sums are independent.
    """
    of_steps = of_prefixes = 0.0
    sizes = np.diff(shards)
    ends = np.arange(1, -(-int(sizes.max()) // batch_size) + 1) * batch_size
    for size, spread in zip(sizes.tolist(), spreads.tolist(), strict=True):
        if size < 2:
            continue
        up_to = np.minimum(ends, size)
        own = np.diff(up_to, prepend=0)
        of_steps += float((own * (size - own)).sum()) * spread / (size - 1)
        of_prefixes += float((up_to * (size - up_to)).sum()) * spread / (size - 1)
    return of_steps, of_prefixes


def _checked_strata(strata: Any, examples: int) -> IntArray:
    codes = check.as_integers(strata, "strata")
    if codes.shape != (examples,) or codes.min() < 0:
        raise ValueError(
            f"strata must hold one code, 0 or more, for each of {examples} examples, got shape {codes.shape} with "
            f"{codes.min()} as the least: number them with numpy.unique(labels, return_inverse=True)"
        )
    return codes


def _swept(vectors: Vectors, start: IntArray, rng: np.random.Generator) -> IntArray:
    """(N,) each worker's examples by balance sweeps from `start`; those without a vector come at random, in front."""
    seen = vectors.seen
    order = start if seen is None else unseen_in_front(start, vectors.shards, seen, rng)
    places = slice(None) if seen is None else np.flatnonzero(seen[order])
    known = order[places]
    if known.size == 0:
        return order
    workers = np.searchsorted(vectors.shards, known, side="right") - 1
    shards = np.append(0, np.cumsum(np.bincount(workers, minlength=vectors.workers)))
    group = sharing_groups(np.diff(shards), vectors.rows.dim)
    for _ in range(SWEEPS):
        if vectors.workers == 1:
            known = loops.balance_sweep(vectors.rows, known, vectors.means[0])
        else:  # mean-centred sweeps would let the workers' lists drift apart
            known = loops.pair_sweep(vectors.rows, known, shards, group)
    order[places] = known
    return order


def unseen_in_front(start: IntArray, shards: IntArray, seen: NDArray[np.bool_], rng: np.random.Generator) -> IntArray:
    """(N,) as `start`, with each worker's examples without a vector at random places of its first half.

    Anywhere, a sixth of them undoes the solve, and more: nothing balances them, and what the last steps do wrong stays.
    In the first half they cost little (`benchmarks.late_rows`).
    """
    order = start.copy()
    for a, b in pairwise(shards.tolist()):
        known = seen[start[a:b]]
        unseen = int((~known).sum())
        if 0 < unseen < b - a:
            front = np.zeros(b - a, np.bool_)
            front[rng.choice(max(unseen, (b - a) // 2), unseen, replace=False)] = True
            order[a:b][front], order[a:b][~front] = start[a:b][~known], start[a:b][known]
    return order
