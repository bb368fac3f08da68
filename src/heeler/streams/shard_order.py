"""Orders of examples that lie in shards: two levels, so that few shards are open at a time.

A shard is a file of a streaming format. A reader cannot jump from shard to shard, so an order has less freedom than one
of all examples has:

1. *Which shards are open together, and in which order they come.* Shards' sums of centred rows are balanced like
   examples: shards that are open at the same time should add up to about nothing, and so should every prefix
   (`solve_batches` on the sums).
2. *Which examples of open shards come next.* A reader holds as many examples as `open_shards` shards have, its buffer.
   Half of them come next, the other half stay: in random pairs one comes and one stays, chosen so that all that has
   come so far adds up to about nothing (`pair_sweep`). What shards have too much of stays in the buffer
   until others make up for it, but no more than three times.
3. *Their order*: batches that balance, and short prefixes (`solve_batches` on their rows).

Readers are the `workers` loader workers of `ranks` ranks. Batch t of a rank is read by its loader worker t mod W, as
PyTorch's DataLoader has it. So a lane is the list of one reader's examples, with shards of its own; where a lane is
full, a shard is split between two. The lanes of all ranks' loader workers of one number train in the same steps, and
are balanced together.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heeler.herding import validate as check
from heeler.herding.batches import solve_batches
from heeler.herding.solver import Solution
from heeler.herding.sweeps import pair_sweep
from heeler.herding.validate import Array, IntArray

OPEN = 4
"""Shards that a reader's buffer holds the examples of, by default. docs/streams.md has what more of them gain."""
STAYS = 3
"""How often an example may stay in the buffer. So all of a shard's come within the time of two buffers, and no more
than about twice `open_shards` shards are open. On 200 shards of 1,000 vectors of 64 numbers, 4 open, bounds are 1.9,
1.4 and 1.4 times those of one order of all if examples may stay 2, 3 or 9 times (`python -m benchmarks.shards`)."""
_CHUNK = 1 << 14


def sharded_order(
    sizes: Any,
    vectors: Any = None,
    *,
    batch_size: int,
    ranks: int = 1,
    workers: int = 1,
    accumulate: int = 1,
    open_shards: int = OPEN,
    seed: Any = 0,
    seen: NDArray[np.bool_] | None = None,
) -> Solution:
    """An order of the N examples of shards, for readers that open few shards at a time.

    Step t of all ranks is `order[t * ranks * batch_size :][: ranks * batch_size]`, rank by rank; a last, shorter step
    has the rest, which may be of any shard. The same arguments give the same order, another seed another one.

    Args:
        sizes: (S,) examples of each shard, 0 or more. Examples are numbered shard by shard.
        vectors: (N, K) float16, float32 or float64, finite where seen; None for a random order of the same readers.
        batch_size: examples per rank and step.
        ranks: processes that train together, each with a batch per step.
        workers: loader workers of each rank.
        accumulate: loader batches per step, each of batch_size / accumulate examples; loader workers read them in turn.
        open_shards: the shards whose examples a reader can hold.
        seed: of everything random.
        seen: (N,) which examples have a vector; the others count as the mean. All by default.

    Returns:
        The order with its bound at steps; `bound_random` is what a random order of all examples has on average.
        `sweeps` counts halves of buffers. Without vectors bounds are 0.
    """
    begun = time.perf_counter()
    sizes = check_sizes(sizes)
    examples = int(sizes.sum())
    given = {"batch_size": batch_size, "ranks": ranks, "workers": workers, "open_shards": open_shards}
    for name, value in (given | {"accumulate": accumulate}).items():
        check.check_positive(value, name)
    if batch_size % accumulate:
        raise ValueError(f"a step of {batch_size} examples per rank cannot be read in {accumulate} equal batches")
    rng = np.random.default_rng(seed)
    rows = _Centred.of(vectors, sizes, seen)
    steps, batch_size = examples // (ranks * batch_size), batch_size // accumulate
    count = steps * accumulate  # of each rank's loader batches
    shards = order_of_shards(None if rows is None else rows.shard_sums, sizes.size, ranks * workers * open_shards, rng)
    batches = [len(range(worker, count, workers)) for worker in range(workers)]
    lanes, rest = deal_shards(shards, sizes, [n * batch_size for n in batches for _ in range(ranks)], rng)
    full = np.empty((count, ranks, batch_size), np.int64)
    in_buffer = open_shards * examples / np.count_nonzero(sizes)
    half = batch_size * max(1, round(in_buffer / (2 * batch_size)))
    prefix = np.zeros(1 if rows is None else rows.dim)
    readers = [
        (worker, _by_halves(np.stack(lanes[worker * ranks : (worker + 1) * ranks]), half, rows, prefix, rng))
        for worker in range(workers)
    ]
    halves = 0
    while readers:  # in turn, for they read at the same time
        at, reader = readers.pop(0)
        some = next(reader, None)
        if some is not None:
            placed = _in_order(some, batch_size, rows, rng).reshape(ranks, -1, batch_size).swapaxes(0, 1)
            full[at : at + workers * len(placed) : workers] = placed
            halves += 1
            readers.append((at + workers * len(placed), reader))
    together = full.reshape(steps, accumulate, ranks, batch_size).swapaxes(1, 2)  # each rank's batches of a step
    whole = together.reshape(steps, accumulate * ranks * batch_size)
    order = np.concatenate([whole.reshape(-1), rng.permutation(rest)])
    bound, random = (0.0, 0.0) if rows is None else (rows.bound(whole), rows.random_bound(steps))
    return Solution(order, random, bound, random, halves, time.perf_counter() - begun)


def order_of_shards(sums: Array | None, count: int, together: int, rng: np.random.Generator) -> IntArray:
    """(S,) shards in an order in which every `together` in a row, and every prefix, add up to about nothing.

    sums: (S, K) of their centred rows; None: at random.
    """
    if sums is None or count < 2 or not sums.any():
        return rng.permutation(count)
    return solve_batches(sums, batch_size=min(together, count), seed=rng).order


def deal_shards(
    order: IntArray, sizes: IntArray, capacities: list[int], rng: np.random.Generator
) -> tuple[list[IntArray], IntArray]:
    """Each lane's examples, shard by shard, at random within a shard; and those that no lane has room for.

    The next shard goes to the lane that has got least so far. What it has no room for goes on to the next.
    """
    starts = np.cumsum(sizes) - sizes
    lanes: list[list[IntArray]] = [[] for _ in capacities]
    rest: list[IntArray] = []
    filled = [(0, lane) for lane, capacity in enumerate(capacities) if capacity]
    heapq.heapify(filled)
    for shard in order.tolist():
        left = starts[shard] + rng.permutation(sizes[shard])
        while left.size and filled:
            got, lane = heapq.heappop(filled)
            taken, left = np.split(left, [min(capacities[lane] - got, left.size)])
            lanes[lane].append(taken)
            if got + taken.size < capacities[lane]:
                heapq.heappush(filled, (got + taken.size, lane))
        rest.append(left)
    return [np.concatenate([np.empty(0, np.int64), *lane]) for lane in lanes], np.concatenate(rest)


def _by_halves(
    lanes: IntArray, half: int, rows: _Centred | None, prefix: NDArray[np.float64], rng: np.random.Generator
) -> Iterator[IntArray]:
    """What comes next of lanes (R, L) that train together: parts (R, half), and a last one of half or less.

    The buffer has `half` examples of each lane that stayed and as many new ones. prefix: (K,) the sum of all that has
    come so far, of other readers too; kept up to date.
    """
    length = lanes.shape[1]
    stayed, age = lanes[:, :half], np.zeros((len(lanes), min(half, length)), np.int64)
    for begin in range(half, length, half):
        new = rng.permuted(lanes[:, begin : begin + half], axis=1)
        oldest = np.argsort(-age - rng.random(age.shape), axis=1)  # at random among those that stayed equally often
        stayed, age = np.take_along_axis(stayed, oldest, axis=1), np.take_along_axis(age, oldest, axis=1)
        # As many new ones stay for sure as old ones come for sure. Before a shorter last part, more come than stay.
        surplus = stayed.shape[1] - new.shape[1]
        due = int(np.clip((age >= STAYS).sum(axis=1).max(), surplus, stayed.shape[1]))
        kept = due - surplus
        pool = np.concatenate([stayed[:, due:], new[:, kept:]], axis=1)
        ages = np.concatenate([age[:, due:], np.zeros_like(new[:, kept:])], axis=1)
        mixed = rng.permuted(np.tile(np.arange(pool.shape[1]), (len(pool), 1)), axis=1)
        if rows is None:
            come, stay = np.split(mixed, 2, axis=1)
        else:
            prefix += rows.total(stayed[:, :due])
            come, stay = _halved(pool, mixed, prefix, rows)
            prefix += rows.total(np.take_along_axis(pool, come, axis=1))
        yield np.concatenate([stayed[:, :due], np.take_along_axis(pool, come, axis=1)], axis=1)
        stayed = np.concatenate([new[:, :kept], np.take_along_axis(pool, stay, axis=1)], axis=1)
        age = 1 + np.concatenate([np.zeros_like(new[:, :kept]), np.take_along_axis(ages, stay, axis=1)], axis=1)
    if length:
        if rows is not None:
            prefix += rows.total(stayed)
        yield stayed


def _halved(pool: IntArray, mixed: IntArray, prefix: Any, rows: _Centred) -> tuple[IntArray, IntArray]:
    """Which of examples (R, 2n) come and which stay, as places (R, n), so that prefix + Σ of the first is short.

    With signs, + for one that comes: 2 (prefix + Σ come) = 2 prefix + Σ all + Σ ± D over the pairs' differences D. So a
    pair sweep whose running sum begins with 2 prefix + Σ all makes it short: a first pair has this for its difference.

    mixed: (R, 2n) the places in the order in which they are paired.
    """
    ranks, size = pool.shape
    vectors = np.zeros((ranks, size + 2, rows.dim), np.float32)
    vectors[:, 2:] = rows.of_examples(np.take_along_axis(pool, mixed, axis=1))
    vectors[0, 0] = 2 * prefix + vectors.sum(axis=(0, 1), dtype=np.float64)
    flat = vectors.reshape(-1, rows.dim)
    starts = np.arange(ranks)[:, None] * (size + 2)
    swept = pair_sweep(flat, np.arange(len(flat)), shard_sizes=[size + 2] * ranks).reshape(ranks, -1) - starts
    # Of each pair the one that comes is put to the front, behind the first pair's, and the other to the back.
    come, stay = swept[:, 1 : size // 2 + 1], swept[:, size // 2 + 1 : -1]
    return np.take_along_axis(mixed, come - 2, axis=1), np.take_along_axis(mixed, stay - 2, axis=1)


def _in_order(some: IntArray, batch_size: int, rows: _Centred | None, rng: np.random.Generator) -> IntArray:
    """Whole batches of ranks' examples (R, n), each rank's put into the order in which they come."""
    ranks, size = some.shape
    if rows is None:
        return rng.permuted(some, axis=1)
    vectors = rows.of_examples(some).reshape(-1, rows.dim)
    order = solve_batches(vectors, batch_size=batch_size, shard_sizes=[size] * ranks, seed=rng).order
    return some.reshape(-1)[order].reshape(some.shape)


class _Centred:
    """Rows less the mean of those that are seen, zero for the others. One pass finds mean, spread and shards' sums."""

    def __init__(self, floats: Array, sizes: IntArray, seen: NDArray[np.bool_]) -> None:
        self._floats, self._seen, self.dim = floats, seen, floats.shape[1]
        total, counts, squares = np.zeros((sizes.size, self.dim)), np.zeros(sizes.size), 0.0
        ends = np.cumsum(sizes)
        for shard, (start, end) in enumerate(zip((ends - sizes).tolist(), ends.tolist(), strict=True)):
            for begin in range(start, end, _CHUNK):
                known = seen[begin : min(begin + _CHUNK, end)]
                some = floats[begin : min(begin + _CHUNK, end)][known].astype(np.float64)
                total[shard] += some.sum(axis=0)
                counts[shard] += len(some)
                squares += float(np.einsum("ik,ik->", some, some))
        if not math.isfinite(squares):
            raise ValueError("vectors hold NaN or infinity where they are seen: leave such rows out of `seen`")
        self._known = int(counts.sum())
        self._mean = total.sum(axis=0) / max(1, self._known)
        self._squares = max(squares - self._known * float(self._mean @ self._mean), 0.0)
        self.shard_sums = total - counts[:, None] * self._mean
        """(S, K)"""

    @classmethod
    def of(cls, vectors: Any, sizes: IntArray, seen: NDArray[np.bool_] | None) -> _Centred | None:
        """None where there is nothing to go by."""
        if vectors is None:
            return None
        floats, examples = check.as_floats(vectors), int(sizes.sum())
        if len(floats) != examples:
            raise ValueError(f"vectors has {len(floats)} rows, the shards hold {examples} examples: give one for each")
        known = np.ones(examples, np.bool_) if seen is None else check.as_seen(seen, examples)
        return cls(floats, sizes, known) if known.any() else None

    def of_examples(self, examples: IntArray) -> NDArray[np.float32]:
        """(..., K) float32, of examples (...)."""
        flat = examples.reshape(-1)
        out = self._floats[flat].astype(np.float32) - self._mean.astype(np.float32)
        out[~self._seen[flat]] = 0
        return out.reshape(*examples.shape, self.dim)

    def total(self, examples: IntArray) -> NDArray[np.float64]:
        """(K,) their sum."""
        return self.of_examples(examples).reshape(-1, self.dim).sum(axis=0, dtype=np.float64)

    def bound(self, steps: IntArray) -> float:
        """Root mean square of the prefixes' norms at the ends of steps (T, n)."""
        prefix, squares, chunk = np.zeros(self.dim), 0.0, max(1, _CHUNK // max(1, steps[:1].size))
        for begin in range(0, len(steps), chunk):
            some = self.of_examples(steps[begin : begin + chunk]).sum(axis=1, dtype=np.float64)
            prefixes = prefix + np.cumsum(some, axis=0)
            squares += float(np.einsum("tk,tk->", prefixes, prefixes))
            prefix = prefixes[-1]
        return math.sqrt(squares / max(1, len(steps)))

    def random_bound(self, steps: int) -> float:
        """What `bound` is for a random order, on average: E‖P‖² = p (1 − p) N / (N − 1) Σ‖c‖² after a share p."""
        share = np.arange(1, steps + 1) / max(1, steps)
        spread = float(np.mean(share * (1 - share))) if steps else 0.0
        return math.sqrt(self._squares * spread * self._known / max(1, self._known - 1))


def check_sizes(sizes: Any) -> IntArray:
    """(S,) examples of each shard; raises for what cannot be that."""
    found = check.as_integers(sizes, "sizes")
    if found.ndim != 1 or found.min() < 0 or not found.any():
        raise ValueError(f"sizes must be a list of numbers of examples, 0 or more and not all 0, got {found.tolist()}")
    return found
