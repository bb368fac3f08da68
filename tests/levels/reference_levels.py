"""Plain twins of two levels: slow, obviously right, with every order held as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from heeler.herding import solve_batches
from heeler.levels.block_order import halved
from heeler.levels.halves import Blocks, Walk
from heeler.levels.scatter import Scatter


def walk_pairs(vectors: Any, pairs: Sequence[tuple[int, int]], running: Any) -> tuple[list[bool], Any]:
    """Of each pair (a, b): a to the early half if ⟨s, a − b⟩ ≤ 0, and a − b is added to s; else b, and b − a."""
    s, firsts = np.array(running, np.float64), []
    for a, b in pairs:
        d = vectors[a].astype(np.float64) - vectors[b]
        firsts.append(bool(s @ d <= 0))
        s = s + d if firsts[-1] else s - d
    return firsts, s


def turn_pairs(vectors: Any, pairs: Sequence[tuple[int, int]], running: Any, firsts: list[bool]) -> tuple[int, Any]:
    """Every pair in turn is turned over if that makes s shorter; `firsts` is changed."""
    s, turned = np.array(running, np.float64), 0
    for i, (a, b) in enumerate(pairs):
        d = (vectors[a].astype(np.float64) - vectors[b]) * (1 if firsts[i] else -1)
        if np.sum((s - 2 * d) ** 2) < np.sum(s**2):
            s, firsts[i], turned = s - 2 * d, not firsts[i], turned + 1
    return turned, s


def halve(vectors: Any, early: int, target: Any, rng: Any, root: Any, turns: int) -> tuple[list[int], list[int]]:
    order = rng.permutation(len(vectors)).tolist()
    if early == len(vectors):
        return order, []
    pairs = [(order[2 * i], order[2 * i + 1]) for i in range(early)]
    start = vectors[order[: 2 * early]].astype(np.float64).sum(axis=0) - 2 * target
    white = vectors[order] @ root.astype(np.float32)
    firsts, _ = walk_pairs(white, [(2 * i, 2 * i + 1) for i in range(early)], start @ root)
    signs = [1 if first else -1 for first in firsts]
    s = start + sum(
        (sign * (vectors[a].astype(np.float64) - vectors[b]) for sign, (a, b) in zip(signs, pairs, strict=True)),
        np.zeros(vectors.shape[1]),
    )
    for _ in range(turns):
        turned, s = turn_pairs(vectors, pairs, s, firsts)
        if not turned:
            break
    first_half = [a if first else b for (a, b), first in zip(pairs, firsts, strict=True)]
    second_half = [b if first else a for (a, b), first in zip(pairs, firsts, strict=True)]
    return first_half, second_half + order[2 * early :]


def block_order(
    shape: Blocks, scatter: Scatter, walk: Walk, vectors: Any, seed: list[int], batch_size: int, turns: int
) -> Any:
    """(N,) all stretches, one after the other; vectors (N, K) by place."""
    halves = {}
    for block in range(shape.count):
        start = block * shape.size
        own = vectors[start : start + shape.length(block)]
        rng = np.random.default_rng([*seed, block])
        parts = halve(own, shape.early(block, batch_size), walk.targets[block], rng, walk.root, turns)
        halves[block] = [[start + row for row in part] for part in parts]
    blocks = walk.blocks.tolist()
    epoch: list[int] = []
    for stretch in range(shape.count + 1):
        late = halves[blocks[stretch - 1]][1] if stretch else []
        early = halves[blocks[stretch]][0] if stretch < shape.count else []
        places = np.array(late + early, np.int64)
        rng = np.random.default_rng([*seed, shape.count + stretch])
        if vectors[places].any():
            order = solve_batches(halved(vectors[places]), batch_size=batch_size, seed=rng).order
        else:
            order = rng.permutation(places.size)
        epoch += scatter.examples(places[order]).tolist()
    return np.array(epoch)
