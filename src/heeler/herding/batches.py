"""Which examples share a step, and in which order the steps come: the two freedoms of an order, used one by one.

Within a step gradients are averaged, so what a step does wrong is the sum of its examples' deviations from the mean.

1. *Balance*: from a random partition into steps (a stratified one where strata are given), examples are exchanged
   between pairs of steps as long as Σ_t ‖sum_t‖² falls. Own shards exchange within a worker, strata within a stratum;
   it is the sum over all workers that is balanced.
2. *Order*: the steps' sums are herded like examples, by balance sweeps: every prefix of the epoch stays short.
3. *A quiet end*: a step's error fades with the steps that follow it, at rate η in a direction of curvature h by
   (1 − ηh) per step. Nearby steps are exchanged so that what is left at the epoch's end becomes small on all time
   scales at once, Σ_τ ‖Σ_t (1 − 1/τ)^(T−1−t) sum_t‖² / τ for τ = 1, 2, 4, ..., as long as squared prefixes grow by
   no more than SLACK.

docs/theory.md says why, RESULTS.md what each part is worth.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.solver import Solution, solve
from heeler.herding.strata import stratified_order
from heeler.herding.validate import Array, IntArray

ROUNDS = 16
"""Of exchanges, at most. In each, every step meets one other."""
PROGRESS = 0.98
"""A round that leaves more than this share of Σ ‖sum‖² is the last."""
SLACK = 1.5
"""How much longer the squared prefixes may get for a quiet end."""
JUMP = 64
"""How far apart steps are that change places for it."""
OFFERS = 48
"""How often each step is offered to change places."""


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
    """A new order of all N examples in which every step, every prefix and the epoch's end are balanced.

    The same arguments give the same order; another seed gives another one that is as good.

    Args:
        vectors: (N, K) float16, float32 or float64, NumPy or CPU torch, finite where seen; never copied.
        batch_size: examples per worker and step.
        seed: of the partition it starts from, and of who meets whom.
        shard_sizes: examples of each worker, side by side; None for one worker.
        strata: (N,) codes; every step then holds its share of each, as in `stratified_order`.
        portions: as in `stratified_order`.
        seen: (N,) which examples have a vector; the others count as the mean. All by default.
        rounds: of exchanges, at most.
    """
    begun = time.perf_counter()
    floats = check.as_floats(vectors, "(N, K)")
    batch_size = check.check_positive(batch_size, "batch_size")
    shards = check.as_offsets(shard_sizes, len(floats))
    rng = np.random.default_rng(seed)
    start = first_order(shards, batch_size, strata, portions, rng)
    steps = _Steps(floats, start, shards, batch_size, strata, seen)
    before = steps.total
    bound_random = steps.bound(np.arange(steps.count))
    done = steps.balance(rounds, rng)
    order = steps.sequence(rng)
    bound = steps.bound(order)
    seconds = time.perf_counter() - begun
    left = steps.total / before if before > 0 else 1.0
    return Solution(steps.expand(order), bound_random, bound, bound_random, done, seconds, left)


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


class _Steps:
    """A partition of the examples into steps; places of a step lie worker by worker, as `start` has them."""

    def __init__(
        self,
        floats: Array,
        start: IntArray,
        shards: IntArray,
        batch_size: int,
        strata: IntArray | None,
        seen: NDArray[np.bool_] | None,
    ) -> None:
        from heeler.herding import kernels, kernels_batches

        self._kernels = kernels_batches
        workers, dim = shards.size - 1, floats.shape[1]
        sizes = np.diff(shards)
        worker = np.repeat(np.arange(workers), sizes)
        step = (np.arange(start.size) - np.repeat(shards[:-1], sizes)) // batch_size
        self._places = np.argsort(step, kind="stable")  # where in the workers' lists side by side each place lies
        self._offsets = np.append(0, np.cumsum(np.bincount(step)))
        self._rows = start[self._places]
        self._strata = 1 if strata is None else int(strata.max(initial=0)) + 1
        own = np.zeros(start.size, np.int64) if strata is None else strata
        self._cells = (worker * self._strata + own[start])[self._places]
        # Steps of the same workers with as many examples each may change places.
        shapes = np.zeros((self.count, workers), np.int64)
        np.add.at(shapes, (step, worker), 1)
        self._kinds = np.append(0, np.cumsum((shapes[1:] != shapes[:-1]).any(axis=1)))

        self._table = check.as_bits(floats)
        means = check.aligned(workers, dim)
        known = (
            start
            if seen is None or seen.all()
            else np.concatenate([own[seen[own]] for own in np.split(start, shards[1:-1])])
        )
        if known.size < start.size:
            assert seen is not None
            self._rows = np.where(seen[self._rows], self._rows, -1 - self._rows)
            lengths = [int(seen[a:b].sum()) for a, b in pairwise(shards.tolist())]
            offsets = np.append(0, np.cumsum(lengths))
        else:
            offsets = shards
        kernels.shard_means(self._table, check.frozen(np.sort(known)), offsets, means)
        if not np.isfinite(means).all():
            raise ValueError("vectors hold NaN or infinity: leave such examples out of `seen`")
        self._means = means.astype(np.float32)
        self._sums = check.aligned(self.count, dim, dtype=np.float32)
        self._arguments = (self._cells, self._strata, self._offsets, self._means, self._sums)
        self._kernels.step_sums(self._table, self._rows, *self._arguments)

    @property
    def count(self) -> int:
        """T, how many steps there are."""
        return self._offsets.size - 1

    @property
    def total(self) -> float:
        """Σ_t ‖sum_t‖²."""
        return float(np.einsum("tk,tk->", self._sums, self._sums, dtype=np.float64))

    def balance(self, rounds: int, rng: np.random.Generator) -> int:
        """Exchange examples between steps as long as that helps; returns the rounds done."""
        if self._offsets.size < 3 or np.diff(self._offsets).max() < 2:
            return 0
        total = self.total
        for done in range(1, rounds + 1):
            pairs = rng.permutation(self.count)[: self.count // 2 * 2].reshape(-1, 2)
            fell = self._kernels.exchange(self._table, self._rows, *self._arguments, pairs)
            total, before = total - fell, total
            if total > PROGRESS * before:
                return done
        return rounds

    def sequence(self, rng: np.random.Generator) -> IntArray:
        """(T,) an order of the steps: short prefixes, and a quiet end."""
        order = np.arange(self.count)
        for kind in range(int(self._kinds[-1]) + 1):
            own = np.flatnonzero(self._kinds == kind)
            if own.size > 2:
                order[own] = own[herded(self._sums[own], rng)]
        return order

    def bound(self, order: IntArray) -> float:
        """Root mean square of the prefixes' norms."""
        prefixes = np.cumsum(self._sums[order], axis=0, dtype=np.float64)
        return math.sqrt(np.einsum("tk,tk->", prefixes, prefixes) / self.count)

    def expand(self, order: IntArray) -> IntArray:
        """(N,) the examples, workers' lists side by side, steps in the given order."""
        rows = np.where(self._rows >= 0, self._rows, -1 - self._rows)
        # Steps that change places have the same places for each worker, so that places are filled in order.
        out = np.empty_like(rows)
        taken = np.concatenate([rows[self._offsets[t] : self._offsets[t + 1]] for t in order])
        out[self._places] = taken
        return out


def herded(sums: NDArray[np.float32], rng: np.random.Generator) -> IntArray:
    """(T,) an order of the rows of sums (T, K): short prefixes, and a quiet end."""
    count = len(sums)
    centred = sums - sums.mean(axis=0, dtype=np.float64).astype(np.float32)
    if not centred.any():
        return rng.permutation(count)
    order = solve(centred, rng.permutation(count), sweeps=16, seed=int(rng.integers(2**32))).order
    return quieted(centred, order, rng)


def quieted(sums: NDArray[np.float32], order: IntArray, rng: np.random.Generator) -> IntArray:
    """The order with nearby steps exchanged, so that little is left over at the epoch's end at any time scale."""
    from heeler.herding import kernels_batches

    count, dim = sums.shape
    scales = 2.0 ** np.arange(int(math.log2(count)) + 1)
    fading = ((1 - 1 / scales[:, None]) ** np.arange(count - 1, -1, -1)).astype(np.float32)
    prefixes = np.cumsum(sums[order], axis=0, dtype=np.float64)
    limit = SLACK * float(np.einsum("tk,tk->", prefixes, prefixes))
    jumps = rng.integers(1, min(JUMP, count - 1) + 1, size=(OFFERS, count))
    order = order.copy()
    scratch = np.empty((count, dim), np.float32), np.empty((scales.size, dim), np.float32)
    kernels_batches.settle(sums, order, fading, (1 / scales).astype(np.float32), *scratch, jumps, limit)
    return order
