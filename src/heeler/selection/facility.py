"""Facility location (CRAIG, arXiv 1906.01827)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection import loops
from heeler.selection.quota import proportional_parts
from heeler.selection.rows import Choose, Rows

SMALL_BLOCK, BLOCK = 1024, 4096
"""Examples that are compared with one another: BLOCK at most, fewer where there are many."""
DISTANCES = 10**9
"""About as many are computed in a pass: blocks of 4,096 up to 240,000 examples, of 1,024 from a million on."""
SHARE = 16
"""One pass keeps at least a SHARE-th of the examples; for a smaller k, passes over what is left follow."""
Floats = NDArray[np.float64]


def facility(rows: Rows, rng: np.random.Generator) -> Choose:
    """Greedily maximise Σ_i max_{j∈S} (c − ‖g_i − g_j‖), class by class; a weight is the size of a cluster.

    Up to 4,096 examples of a class this is lazy greedy, which takes what greedy takes. More are first divided into
    blocks of near ones, by medians along differences of random rows, and every block chooses its part of k for itself;
    then no distance between blocks counts. Weights sum to N.
    """

    def choose(ids: IntArray, k: int) -> tuple[IntArray, Floats]:
        counts, keep = np.ones(ids.size), 0
        while keep != k:
            blocks = near_blocks(rows, ids, rng)
            keep = k if len(blocks) == 1 else max(k, ids.size // SHARE, len(blocks))
            parts = zip(blocks, proportional_parts(keep, [len(block) for block in blocks]).tolist(), strict=True)
            found = [_greedy(rows, ids[block], counts[block], part) for block, part in parts]
            ids, counts = (np.concatenate(column) for column in zip(*found, strict=True))
        return ids, counts

    return choose


def _greedy(rows: Rows, ids: IntArray, counts: Floats, k: int) -> tuple[IntArray, Floats]:
    """k of `ids`, and how many examples each stands for; `counts` of them stand for so many themselves."""
    points = rows.take(ids)
    points -= points.mean(axis=0)  # distances lose fewer digits
    squares = np.einsum("ik,ik->i", points, points)
    distance = points @ points.T
    distance *= -2
    distance += squares[:, None]
    distance += squares
    np.sqrt(np.maximum(distance, 0, out=distance), out=distance)
    np.fill_diagonal(distance, 0)
    chosen, owner = np.empty(k, np.int64), np.empty(ids.size, np.int64)
    loops.lazy_greedy(distance, counts, chosen, owner)
    return ids[chosen], np.bincount(owner, counts, minlength=k).astype(np.float64)


def near_blocks(rows: Rows, ids: IntArray, rng: np.random.Generator) -> list[IntArray]:
    """Places in `ids`, in blocks: cut in halves along the difference of two random rows."""
    largest = min(max(DISTANCES // ids.size, SMALL_BLOCK), BLOCK)
    waiting, done = [np.arange(ids.size)], []
    while waiting:
        part = waiting.pop()
        if part.size <= largest:
            done.append(part)
            continue
        a, b = rows.take(ids[rng.choice(part, 2, replace=False)])
        middle = part.size // 2
        part = part[np.argpartition(rows.project(ids[part], a - b), middle)]
        waiting += [part[middle:], part[:middle]]
    return done
