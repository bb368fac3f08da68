"""Which examples share a step, and in which order they come: the two freedoms of an order, used one after the other.

Within a step gradients are averaged, so what a step does wrong is the sum of its examples' deviations from the mean.

1. *Short prefixes*: balance sweeps over all examples (`solve`). With strata, a stratified shuffle whose steps
   are put in order by sweeps over their sums.
2. *Balance*: examples are exchanged between steps that are near each other as long as the steps' sums and the prefixes
   between them get shorter, Σ_t ‖sum_t‖² and Σ_t ‖prefix_t‖² in one objective. Own shards exchange within a worker,
   strata within a stratum; it is the sum over all workers that is balanced. The examples with small gradients, with
   which sweeps end an epoch, stay there.
   Where steps differ in size, those of each size are first made to add up to about nothing by themselves, since only
   steps of one size can change places later.
3. *A quiet end*, with strata; sweeps over examples have one anyway. A step's error fades with the steps that follow
   it, at rate η in a direction of curvature h by (1 − ηh) per step. Nearby steps change places so that what is left at
   the epoch's end becomes small on all time scales at once, Σ_τ ‖Σ_t (1 − 1/τ)^(T−1−t) sum_t‖² / τ for τ = 1, 2, 4,
   ..., as long as squared prefixes grow by no more than SLACK.

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
from heeler.herding.solver import Solution, solve
from heeler.herding.steps import SWEEPS, Steps
from heeler.herding.strata import stratified_order
from heeler.herding.validate import Array, IntArray

ROUNDS = 2
"""Of exchanges, at most. In each, every step meets one at every distance up to NEAR. Four rounds up to 4 take two to
three times as long and leave 0.8 to 0.95 of Σ ‖sum‖² and 0.9 of the prefixes (`python -m benchmarks.order_quality`)."""


def solve_batches(
    vectors: Any,
    *,
    batch_size: int,
    seed: Any = 0,
    shard_sizes: Sequence[int] | None = None,
    strata: IntArray | None = None,
    portions: int = 1,
    seen: NDArray[np.bool_] | None = None,
    rounds: int = ROUNDS,
) -> Solution:
    """A new order of all N examples in which every prefix and every step is balanced, with strata the end too.

    The same arguments give the same order; another seed gives another one that is as good.

    Args:
        vectors: (N, K) float16, float32 or float64, NumPy or CPU torch, finite where seen; copied only if strided.
        batch_size: examples per worker and step.
        seed: of the random order it starts from, and of who meets whom.
        shard_sizes: examples of each worker, side by side; None for one worker.
        strata: (N,) codes, 0 or more; every step then holds its share of each, as in `stratified_order`.
        portions: as in `stratified_order`.
        seen: (N,) which examples have a vector; the others count as the mean. All by default.
        rounds: of exchanges, at most.

    Returns:
        The order with its bound; `bound_before` and `bound_random` are that of the random order it starts from,
        which with strata is a stratified one.
    """
    begun = time.perf_counter()
    floats = check.as_floats(vectors, "(N, K)")
    batch_size = check.check_positive(batch_size, "batch_size")
    shards = check.as_offsets(shard_sizes, len(floats))
    portions = check.check_positive(portions, "portions")
    if batch_size % portions:
        raise ValueError(f"a batch of {batch_size} cannot be dealt out in {portions} equal portions")
    strata = None if strata is None else _checked_strata(strata, len(floats))
    seen = None if seen is None else _checked_seen(seen, len(floats))
    rng = np.random.default_rng(seed)
    start = first_order(shards, batch_size, strata, portions, rng)
    steps = Steps(floats, start, shards, batch_size, strata, seen)
    before = steps.total
    bound_random = steps.bound(np.arange(steps.count))
    if strata is None:
        steps.rearrange(_swept(floats, start, shards, batch_size, seen, rng))
    else:
        steps.rearrange(steps.expand(steps.herded(rng)))
    steps.level(rng)
    done = steps.balance(rounds, rng, prefixes=strata is None)
    order = np.arange(steps.count) if strata is None else steps.quieted(rng)
    bound = steps.bound(order)
    seconds = time.perf_counter() - begun
    left = steps.total / before if before > 0 else 1.0
    return Solution(steps.expand(order), bound_random, bound, bound_random, done, seconds, left)


def _checked_strata(strata: Any, examples: int) -> IntArray:
    codes = check.as_integers(strata, "strata")
    if codes.shape != (examples,) or codes.min() < 0:
        raise ValueError(
            f"strata must hold one code, 0 or more, for each of {examples} examples, got shape {codes.shape} with "
            f"{codes.min()} as the least: number them with numpy.unique(labels, return_inverse=True)"
        )
    return codes


def _checked_seen(seen: Any, examples: int) -> NDArray[np.bool_]:
    out = check.as_numpy(seen, "seen")
    if out.shape != (examples,) or out.dtype != np.bool_:
        raise ValueError(f"seen must be {examples} bools, one per example, got {out.dtype} of shape {out.shape}")
    return out


def first_order(
    shards: IntArray, batch_size: int, strata: IntArray | None, portions: int, rng: np.random.Generator
) -> IntArray:
    """(N,) a random order of each worker's own examples, stratified where strata are given."""
    order = np.empty(shards[-1], np.int64)
    for a, b in pairwise(shards.tolist()):
        if strata is None:
            order[a:b] = a + rng.permutation(b - a)
        else:
            order[a:b] = a + stratified_order(strata[a:b], batch_size, rng, portions)
    return order


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
        alone = sizes.size == 1
        options: dict[str, Any] = {"sweeps": SWEEPS, "batch_size": batch_size, "seed": int(rng.integers(2**32))}
        order[places] = solve(
            floats, known, shard_sizes=None if alone else sizes.tolist(), subset=True, **options
        ).order
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
