"""Blocks: how examples are cut into them, in which order they are opened, and how each is cut in two.

An order that runs through blocks of S examples one after the other cannot have short prefixes: a block's sum of
deviations from the mean is about √S vectors long, and the prefix has to go there. So blocks overlap. Blocks are opened
in an order in which prefixes of their sums are short (their *walk*), each is cut into an early and a late half, and a
*stretch* of the epoch holds the late half of one block and the early half of the next:

    stretch 0: early(1)    stretch 1: late(1), early(2)    ...    stretch B: late(B)

When stretch q ends, blocks 1..q have been given in full, and the early half of block q + 1. So if each early half sums
up to minus the sum A_q of all blocks before it, every stretch ends where the epoch began: at zero. A half can be given
any sum that is not too long, by a walk over random pairs, one of each to either half, with a running sum that does not
start at zero (`halve`). Errors do not add up, for stretch q's end depends on block q + 1's walk alone; nor does one
stretch have to wait for another. Within a stretch the examples are ordered as in one level (`solve_batches`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding.solver import MOST_SWEEPS, solve
from heeler.herding.validate import IntArray, check_positive
from heeler.levels import block_loops

TURNS = 8
"""Times that all pairs are looked at again, at most, after the walk. Of 64 numbers, all alike, what is left after the
walk is 29 long, and 12.5 after that (vectors 8 long, blocks of 16,384)."""


MOMENTS = 1 << 14
"""Vectors, at most, that second moments are taken from."""
FLOOR = 1e-5
"""Of the largest second moment in any direction: smaller ones count as this."""


@dataclass(frozen=True)
class Blocks:
    """N places in blocks of `size`, the last one shorter where they do not divide."""

    examples: int
    size: int

    @classmethod
    def near(cls, examples: int, block_size: int, batch_size: int) -> Blocks:
        """About equal blocks of at most about `block_size`, whose halves hold full batches."""
        count = -(-check_positive(examples, "examples") // check_positive(block_size, "block_size"))
        unit = 2 * check_positive(batch_size, "batch_size")
        return cls(examples, -(-examples // (count * unit)) * unit)

    @property
    def count(self) -> int:
        """B, how many there are."""
        return -(-self.examples // self.size)

    def length(self, block: int) -> int:
        """Places of a block."""
        return min(self.size, self.examples - block * self.size)

    def early(self, block: int, batch_size: int) -> int:
        """How many go to the first half: a half in full batches, so that stretches are cut where batches are."""
        length = self.length(block)
        if self.count == 1:
            return length
        return length // 2 if length == self.size else length // 2 // batch_size * batch_size

    def dealt(self, places: IntArray) -> IntArray:
        """Where places (b,) go when rows are dealt out like cards: the first row of every block, then the second, ...

        Each new block holds as many rows, neighbours, of every old one. `block_table` says what that is good for.
        """
        block, row = np.divmod(places, self.size)
        last = self.length(self.count - 1)  # rows that all blocks have
        return np.where(row < last, row * self.count + block, last + row * (self.count - 1) + block)

    def rows_dealt(self, block: int, start: int, stop: int) -> tuple[int, int]:
        """The rows a to below b of a block that go to the places from `start` to below `stop`."""
        return self._first_row(block, start), self._first_row(block, stop)

    def _first_row(self, block: int, place: int) -> int:
        """The first row of a block that goes to this place or behind it; its length if none does."""
        last, length = self.length(self.count - 1), self.length(block)
        row = max(-(-(place - block) // self.count), 0)
        if row > last or (row == last and length > last):
            row = max(-(-(place - last - block) // max(self.count - 1, 1)), last)
        return min(row, length)

    def undealt(self, places: IntArray) -> IntArray:
        """The inverse of `dealt`."""
        last, others = self.length(self.count - 1), max(self.count - 1, 1)
        row, block = np.divmod(places, self.count)
        row_late, block_late = np.divmod(places - last, others)
        late = places >= last * self.count
        return np.where(late, block_late * self.size + row_late, block * self.size + row)


class Walk(NamedTuple):
    """The order in which blocks are opened, and what their early halves shall sum up to."""

    blocks: IntArray
    """(B,) all blocks; a short one comes last."""
    targets: NDArray[np.float64]
    """(B, K) by block: minus the sum of all blocks before it in the walk."""
    root: NDArray[np.float64] | None = None
    """(K, K) the `whitening` of vectors like those of the blocks; None: they are taken as they are."""


def walk_blocks(
    sums: NDArray[np.float64], shape: Blocks, rng: np.random.Generator, root: NDArray[np.float64] | None = None
) -> Walk:
    """A walk over blocks whose vectors' deviations from the mean of all sum up to sums (B, K).

    root: of some of the vectors: prefixes are short in the measure in which halves reach their targets.
    """
    count = shape.count
    full = count - (shape.length(count - 1) < shape.size)
    blocks = np.arange(count)
    blocks[:full] = rng.permutation(full)
    if full > 2:
        rows = (sums[:full] if root is None else sums[:full] @ root).astype(np.float32)
        rows -= rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        if rows.any():
            blocks[:full] = solve(rows, blocks[:full], sweeps=MOST_SWEEPS, seed=int(rng.integers(2**32))).order
    targets = np.zeros_like(sums)
    targets[blocks[1:]] = -np.cumsum(sums[blocks[:-1]], axis=0)
    return Walk(blocks, targets, root)


def whitening(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    """(K, K) C^(−1/2), C the second moments of vectors (n, K): times it, they vary as much in every direction.

    A walk brings its sum to zero in a direction as fast as vectors vary in it. In gradients' small directions that
    takes more pairs than there are, unless all are made alike. The smallest are taken to be no less than `FLOOR`.
    """
    some = vectors[:: -(-len(vectors) // MOMENTS)].astype(np.float64)
    values, axes = np.linalg.eigh(some.T @ some / max(len(some), 1))
    values = np.maximum(values, FLOOR * max(values[-1], np.finfo(np.float32).tiny))
    root: NDArray[np.float64] = (axes / np.sqrt(values)) @ axes.T
    return root * np.sqrt(values[-1])


def halve(
    vectors: NDArray[np.float32],
    early: int,
    target: NDArray[np.float64],
    rng: np.random.Generator,
    root: NDArray[np.float64] | None = None,
) -> tuple[IntArray, IntArray]:
    """(early,) and (n − early,) rows of vectors (n, K), in random order, such that the former sum up to about `target`.

    early: at most n / 2; or n, for all. Of random pairs one row each goes to the early half, the one for which a
    running sum gets shorter. It begins at Σ v − 2·target over all pairs, and what is early is added to it and what is
    late taken off: once it is zero, the early half is on target. The walk is over vectors times `root`, which whitens
    them. Then pairs are turned over as long as that makes the true sum shorter.
    """
    order = rng.permutation(len(vectors))
    if early == len(vectors):
        return order, order[:0]
    pairs = vectors[order[: 2 * early]]
    running = pairs.sum(axis=0, dtype=np.float64) - 2 * target
    firsts = np.empty(early, np.bool_)
    if root is None:
        block_loops.walk_pairs(pairs, running, firsts)
    else:
        block_loops.walk_pairs(pairs @ root.astype(np.float32), running @ root, firsts)
        block_loops.signed_sum(pairs, running, firsts)
    turns = 0
    while turns < TURNS and block_loops.turn_pairs(pairs, running, firsts):
        turns += 1
    one, other = order[0 : 2 * early : 2], order[1 : 2 * early : 2]
    return np.where(firsts, one, other), np.concatenate([np.where(firsts, other, one), order[2 * early :]])
