"""Who trains on what: one order, dealt out to the workers, or each worker's own part of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heeler.herding.validate import IntArray


def deal(order: IntArray, workers: int, rank: int, batch_size: int, *, drop_last: bool = False) -> IntArray:
    """The indices of worker `rank`: its `batch_size` of every global batch of `workers * batch_size` examples.

    Step t of all workers together trains on `order[t * n * B : (t + 1) * n * B]`, so n workers follow the order (N,)
    that one worker would follow with n times the batch. Every worker gets equally many, ⌈N / n⌉: what is left after the
    last full global batch is dealt evenly, filled up from the order's beginning as `DistributedSampler` does, or cut to
    ⌊N / n⌋ with `drop_last`.
    """
    if workers == 1 or len(order) == 0:
        return order
    per_step = workers * batch_size
    full = len(order) // per_step * per_step
    rest = order[full:]
    if drop_last:
        share = len(rest) // workers
    else:
        share = -(-len(rest) // workers)
        rest = np.concatenate([rest, np.resize(order, share * workers - len(rest))])
    own = order[:full].reshape(-1, workers, batch_size)[:, rank].reshape(-1)
    return np.concatenate([own, rest[rank * share : (rank + 1) * share]])


@dataclass(frozen=True)
class Partition:
    """How an order of all examples becomes every worker's indices.

    shard_sizes: None where one order is dealt out; else the numbers of examples that the workers hold, whose orders
        lie side by side in the order of all.
    """

    workers: int = 1
    rank: int = 0
    batch_size: int = 1
    drop_last: bool = False
    shard_sizes: tuple[int, ...] | None = None

    def part(self, order: IntArray, rank: int | None = None) -> IntArray:
        """A worker's indices (this one's by default), in its own numbering."""
        rank = self.rank if rank is None else rank
        if self.shard_sizes is None:
            return deal(order, self.workers, rank, self.batch_size, drop_last=self.drop_last)
        start = self.offset(rank)
        return order[start : start + self.shard_sizes[rank]] - start

    def offset(self, rank: int | None = None) -> int:
        """What to add to a worker's own number of an example to get its number among all."""
        return 0 if self.shard_sizes is None else sum(self.shard_sizes[: self.rank if rank is None else rank])

    def without(self, part: IntArray, excluded: IntArray, examples: int, rank: int | None = None) -> IntArray:
        """A worker's indices but for those of `excluded` (numbers among all) that are in it.

        Of one order of `examples` in all, every worker keeps equally many, or some would wait for others in a step that
        never comes: one that has lost more repeats its first ones, one that has lost fewer goes without its last.
        """
        kept = part[~np.isin(part + self.offset(rank), excluded)]
        if self.shard_sizes is not None or self.workers == 1:
            return kept
        return np.resize(kept if kept.size else part, self.length_without(len(part), excluded, examples))

    def length_without(self, length: int, excluded: IntArray, examples: int) -> int:
        """What is left of so many indices of this worker."""
        if self.shard_sizes is None and self.workers > 1:
            left = examples - len(excluded)
            return min(length, left // self.workers if self.drop_last else -(-left // self.workers))
        start = self.offset()
        return length - int(((excluded >= start) & (excluded < start + length)).sum())

    def remaining(self, order: IntArray, trained: int, excluded: IntArray, examples: int) -> IntArray:
        """What is left of a dealt order when every worker has trained on `trained` examples, in the same order."""
        parts = (self.without(self.part(order, rank), excluded, examples, rank) for rank in range(self.workers))
        return order[~np.isin(order, np.concatenate([excluded, *(part[:trained] for part in parts)]))]

    def at_random(self, examples: int, seed: int, turn: int) -> IntArray:
        """(N,) a random order that needs no word from anybody and is the same on all workers."""
        order = np.empty(examples, np.int64)
        start = 0
        for number, size in enumerate(self.shard_sizes or (examples,)):
            order[start : start + size] = start + np.random.default_rng([seed, turn, number]).permutation(size)
            start += size
        return order
