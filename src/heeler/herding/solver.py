"""Several sweeps over one table, judged, the best order kept.

The objective is the root mean square, over batch boundaries, of the 2-norm of the centred prefix sum. The theorems
bound the error by the *largest* norm, but choosing by it trains worse: one example with a huge gradient sets the
largest norm of every order alike, and the choice between sweeps becomes noise. Measured on mortgage data (one row of
norm 352, four workers with local shards, after 5 epochs, two seeds): 5.0e-6 from the optimum when chosen by the largest
norm, 1.4e-7 by the root mean square; softmax regression on digits: 2.2e-3 and 9.5e-4. Only batch boundaries count, as
gradients are averaged within a batch anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from heeler.herding.sweeps import Problem, make_problem
from heeler.herding.validate import IntArray, check_positive

MOST_SWEEPS = 16
"""Of a solve for training; it ends by itself when sweeps stop helping."""
PATIENCE = 3
"""Sweeps without progress after which a solve ends."""
SWEEP_PROGRESS = 0.99
"""A sweep makes progress when it takes the best bound below this share of what it was."""


class Solution(NamedTuple):
    """What a solve found: the best order seen, after how many sweeps and seconds.

    Bounds are root mean squares of the prefixes' 2-norms at batch boundaries: of the given order, of the best, and of a
    random one drawn from the seed.
    """

    order: IntArray
    bound_before: float
    bound_after: float
    bound_random: float
    sweeps: int
    seconds: float
    unbalanced: float = 1.0
    """Of the squared sums of a random partition into steps, the share that is left; `solve` leaves steps to chance."""


def solve(
    vectors: Any,
    order: Any,
    *,
    sweeps: int = 10,
    batch_size: int = 1,
    seed: int = 0,
    shard_sizes: Sequence[int] | None = None,
    subset: bool = False,
) -> Solution:
    """The best order that up to `sweeps` balance sweeps find, never worse than `order` nor than a random one.

    One order is improved by mean-centred sweeps, local shards by coordinated pair sweeps: mean-centred ones let the
    workers' lists drift apart. The table is never copied.

    Args:
        vectors: (N, K) float16, float32 or float64, NumPy or CPU torch, memory-mapped files too; finite.
        order: (N,) int; where the sweeps start.
        sweeps: at most this many; fewer when they stop helping.
        batch_size: examples per worker in a batch: prefixes are judged at batch boundaries, and at the end.
        seed: of the random order that the result is compared with.
        shard_sizes: examples of each worker, shards side by side; None for one worker.
        subset: `order` may list only some rows of the table; `shard_sizes` then divide that list.
    """
    start = time.perf_counter()
    sweeps = check_positive(sweeps, "sweeps")
    problem = make_problem(vectors, order, batch_size=batch_size, shard_sizes=shard_sizes, subset=subset)
    best, *sums, boundaries, done = _improve(problem, sweeps, np.random.default_rng(seed))
    before, after, random = (math.sqrt(total / boundaries) for total in sums)
    return Solution(best, before, after, random, done, time.perf_counter() - start)


def _improve(problem: Problem, sweeps: int, rng: np.random.Generator) -> tuple[IntArray, float, float, float, int, int]:
    """(best order, sums of squared prefix norms of the given, the best and the random one, prefixes, sweeps done).

    A sweep judges the order it starts from, so that balancing and judging read the table once. Where that judgement is
    rounded (float32 sums) it only chooses among sweeps; `prefix_norms` decides who wins in the end.
    """
    group = sharing_groups(np.diff(problem.offsets), problem.table.shape[1])
    alone = group.size == 1
    random = problem.order.copy()
    for start, stop in zip(problem.offsets[:-1], problem.offsets[1:], strict=True):
        rng.shuffle(random[start:stop])
    _, _, bound_random, boundaries = problem.prefix_norms(random)
    current, following, best = problem.order.copy(), np.empty_like(problem.order), problem.order
    bound_given = bound_best = math.inf
    idle = done = 0
    while done < sweeps and idle < PATIENCE and bound_best > 0:
        bound = problem.balance(current, following) if alone else problem.pair_balance(current, following, group)
        done += 1
        if done == 1:
            bound_given = bound_best = bound
        elif bound < bound_best:
            idle = 0 if bound < SWEEP_PROGRESS**2 * bound_best else idle + 1
            best = np.empty_like(current) if best is problem.order else best
            np.copyto(best, current)
            bound_best = bound
        else:
            idle += 1
        if done == 1 and bound > 4 * bound_random:
            # A sweep halves the bound (a quarter squared), so a random start is worth more than the sweep just done.
            np.copyto(following, random)
        current, following = following, current
    finalists = [(bound_random, random), (problem.prefix_norms(current)[2], current)]
    if best is not problem.order:
        rounded = alone and problem.sums == np.float32
        finalists.append((problem.prefix_norms(best)[2] if rounded else bound_best, best))
    bound_best, best = min(finalists, key=lambda finalist: finalist[0])
    if bound_best > SWEEP_PROGRESS**2 * bound_given:  # too close for a rounded judgement
        bound_given = problem.prefix_norms(problem.order)[2]
        if bound_given <= bound_best:
            bound_best, best = bound_given, problem.order.copy()
    return best, bound_given, bound_best, bound_random, boundaries, done


def sharing_groups(sizes: IntArray, dim: int) -> IntArray:
    """Which workers' pairs are balanced against one running sum: (n,) group numbers, 0 for all where sizes are equal.

    A worker of m examples puts pair i at position i and, from the end, at m − 1 − i. Workers of equal size agree on
    both. Those of unequal size agree on the first only, and a shared sum leaves their second halves unbalanced, by
    about √(workers · difference in pairs) vectors; a sum of their own costs about √dim vectors, the floor of balancing.
    So workers of like size share as long as the former is the smaller. Measured (64 workers of 500 to 530, 64 numbers):
    largest prefix norm 170 with one sum for all, 152 by exact size, 106 so; 293 with a sum each.
    """
    pairs = sizes // 2
    group = np.zeros(sizes.size, np.int64)
    number, members, least = 0, 0, 0
    for j in np.argsort(pairs, kind="stable"):
        if members and (members + 1) * (pairs[j] - least) > dim:
            number, members = number + 1, 0
        if members == 0:
            least = pairs[j]
        members += 1
        group[j] = number
    return group
