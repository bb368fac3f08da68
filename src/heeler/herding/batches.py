"""Which examples share a step, and in which order they come: the two freedoms of an order, used one after the other.

Within a step gradients are averaged, so what a step does wrong is the sum of its examples' deviations from the mean.

1. *Short prefixes*: balance sweeps over all examples (`solve`).
2. *Balance*: examples are exchanged between steps that are near each other as long as the steps' sums and the prefixes
   between them get shorter, Σ_t ‖sum_t‖² and Σ_t ‖prefix_t‖² in one objective. Own shards exchange within a worker;
   it is the sum over all workers that is balanced. The examples with small gradients, with which sweeps end an epoch,
   stay there.
   Where steps differ in size, those of each size are first made to add up to about nothing by themselves, since only
   steps of one size exchange examples.

Strata are columns of the vectors (`append_strata_columns`), so that steps and prefixes also hold about their share of
each.

docs/how-it-works.md says why, RESULTS.md what it is worth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.solver import MOST_SWEEPS, Solution, solve
from heeler.herding.steps import Steps, centre
from heeler.herding.strata import append_strata_columns
from heeler.herding.validate import Array, IntArray

ROUNDS, ROUNDS_OF_LARGE, LARGE = 4, 3, 512
"""Rounds of exchanges, at most; the second between steps of more examples than the third. In each, every step meets one
at every distance that `steps.reach` allows. With steps of 64 more than four leave 0.99 of the prefixes. With the 1,024
of many workers a fourth leaves 0.98, and takes a quarter more time than the steps beside which a leader solves."""


def solve_batches(
    vectors: Any,
    *,
    batch_size: int,
    seed: Any = 0,
    shard_sizes: Sequence[int] | None = None,
    strata: IntArray | None = None,
    seen: NDArray[np.bool_] | None = None,
    rounds: int | None = None,
) -> Solution:
    """A new order of all N examples in which every prefix and every step is balanced.

    The same arguments give the same order; another seed gives another one that is as good.

    Args:
        vectors: (N, K) float16, float32 or float64, NumPy or CPU torch, finite where seen; copied only if strided.
        batch_size: examples per worker and step.
        seed: of the random order it starts from, and of who meets whom.
        shard_sizes: examples of each worker, side by side; None for one worker.
        strata: (N,) codes, 0 or more; every step then holds about its share of each.
        seen: (N,) which examples have a vector; the others count as the mean. All by default.
        rounds: of exchanges, at most; by default by the size of a step.

    Returns:
        The order with its bound, of which strata are a part; `bound_before` and `bound_random` are that of the random
        order it starts from.
    """
    begun = time.perf_counter()
    floats = check.as_floats(vectors)
    batch_size = check.check_positive(batch_size, "batch_size")
    shards = check.as_offsets(shard_sizes, len(floats))
    strata = None if strata is None else _checked_strata(strata, len(floats))
    seen = None if seen is None else check.as_seen(seen, len(floats))
    if strata is not None:
        _, scale = centre(floats, check.as_bits(floats), shards, seen)
        floats = append_strata_columns(floats, strata, 1 / scale)
    rng = np.random.default_rng(seed)
    start = np.concatenate([a + rng.permutation(b - a) for a, b in pairwise(shards.tolist())])
    steps = Steps(floats, start, shards, batch_size, seen)
    before, bound_random = steps.total, steps.bound()
    steps.rearrange(_swept(floats, start, shards, batch_size, seen, rng))
    steps.level(rng)
    done = steps.balance((ROUNDS_OF_LARGE if steps.largest > LARGE else ROUNDS) if rounds is None else rounds, rng)
    seconds = time.perf_counter() - begun
    left = steps.total / before if before > 0 else 1.0
    return Solution(steps.order(), bound_random, steps.bound(), bound_random, done, seconds, left)


def _checked_strata(strata: Any, examples: int) -> IntArray:
    codes = check.as_integers(strata, "strata")
    if codes.shape != (examples,) or codes.min() < 0:
        raise ValueError(
            f"strata must hold one code, 0 or more, for each of {examples} examples, got shape {codes.shape} with "
            f"{codes.min()} as the least: number them with numpy.unique(labels, return_inverse=True)"
        )
    return codes


def _swept(
    floats: Array,
    start: IntArray,
    shards: IntArray,
    batch_size: int,
    seen: NDArray[np.bool_] | None,
    rng: np.random.Generator,
) -> IntArray:
    """(N,) each worker's examples by balance sweeps from `start`; those without a vector come at random, in front."""
    start = start if seen is None else _unseen_in_front(start, shards, seen, rng)
    known = start if seen is None else start[seen[start]]
    workers = np.searchsorted(shards, known, side="right") - 1
    sizes = np.bincount(workers, minlength=shards.size - 1)
    order = start.copy()
    places = np.arange(start.size) if seen is None else np.flatnonzero(seen[start])
    if known.size:
        shard_sizes, seed = None if sizes.size == 1 else sizes.tolist(), int(rng.integers(2**32))
        options: dict[str, Any] = {"sweeps": MOST_SWEEPS, "batch_size": batch_size, "seed": seed, "subset": True}
        order[places] = solve(floats, known, shard_sizes=shard_sizes, **options).order
    return order


def _unseen_in_front(start: IntArray, shards: IntArray, seen: NDArray[np.bool_], rng: np.random.Generator) -> IntArray:
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
