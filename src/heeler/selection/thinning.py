"""Kernel thinning: KT-split, then KT-swap (Dwivedi, Mackey, arXiv 2105.05842 and 2110.01593).

O(N²) kernel values, in panels: memory stays linear in N.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection import loops
from heeler.selection.comparison import width
from heeler.selection.rows import Choose, Rows

LARGEST = 1 << 15
"""Examples of a class; O(N²K) operations are then a minute or two."""
DELTA = 0.5
"""The chance with which KT-split's guarantee may fail; goodpoints' default."""
PANEL = 128
Floats = NDArray[np.float64]
Kernel = Callable[[Floats, Floats], Floats]
"""(a, K), (b, K) → (a, b)."""


def kernel_thin(rows: Rows, rng: np.random.Generator) -> Choose:
    """KT-split and KT-swap under a Gaussian kernel, as wide as the median distance. All weights are equal.

    KT-split halves k·2^m rows m times, for the largest m that N has room for; the other rows, drawn at random, are left
    to KT-swap, which lowers the MMD to *all* N rows.
    """
    spread = width(rows, rng)
    return thin(rows, rng, lambda a, b: gaussian(a, b, spread))


def thin(rows: Rows, rng: np.random.Generator, kernel: Kernel) -> Choose:
    """The same under any kernel."""

    def choose(ids: IntArray, k: int) -> tuple[IntArray, float]:
        if ids.size > LARGEST:
            raise ValueError(
                f"kernel thinning takes O(N²K) time and there are {ids.size} examples in a class, more than {LARGEST}: "
                f"use method='halve', or thin its choice: first = heeler.select(source, {LARGEST}, 'halve').indices; "
                "first[heeler.select(rows[first], k, 'kernel-thin').indices]"
            )
        ids = rng.permutation(ids)
        points = rows.take(ids).astype(np.float64)
        halvings = int(math.log2(ids.size / k) + 1e-12)
        uniforms = rng.uniform(size=(halvings, k * 2**halvings // 2))
        sets = split(points[: k * 2**halvings], kernel, uniforms)
        return ids[swap(points, sets, kernel, k * 2**halvings)], ids.size / k

    return choose


def gaussian(a: Floats, b: Floats, spread: float) -> Floats:
    """exp(−‖a − b‖² / (2 · spread²))."""
    squares = np.einsum("ik,ik->i", a, a)[:, None] + np.einsum("ik,ik->i", b, b) - 2 * (a @ b.T)
    return np.exp(np.maximum(squares, 0) / (-2 * spread**2))


def split(points: Floats, kernel: Kernel, uniforms: Floats) -> IntArray:
    """KT-split: (2^m, n / 2^m) sets of row numbers, each set halved m times; uniforms (m, n / 2), one per pair."""
    sets = np.arange(len(points))[None]
    rounds = len(uniforms)
    for j in range(rounds):
        length = 2 * math.log(2 * len(points) * rounds / (DELTA * 2**j))
        halves = zip(sets, np.split(uniforms[j], len(sets)), strict=True)
        sets = np.concatenate([own[_halves(points[own], kernel, coins, length)] for own, coins in halves])
    return sets


def _halves(points: Floats, kernel: Kernel, uniforms: Floats, length: float) -> IntArray:
    """(2, n / 2) the left and the right half of consecutive pairs."""
    halves = np.empty((2, uniforms.size), np.int64)
    signs = np.empty(len(points))  # +1 on the right, −1 on the left
    sigma = 0.0
    for first in range(0, uniforms.size, PANEL):
        pairs = slice(first, min(first + PANEL, uniforms.size))
        start, stop = 2 * pairs.start, 2 * pairs.stop
        values = kernel(points[start:stop], points[:stop])
        base = values[:, :start] @ signs[:start]
        left, right = halves[0, pairs], halves[1, pairs]
        panel = np.ascontiguousarray(values[:, start:])
        sigma = loops.kernel_halve(panel, start, left, right, uniforms[pairs], base, sigma, length)
        signs[left], signs[right] = -1, 1
    return halves


def swap(points: Floats, sets: IntArray, kernel: Kernel, size: int) -> IntArray:
    """KT-swap: the best of `sets` and of every so-many-th of the first `size` points, improved point by point.

    In turn each chosen point gives way to the one, not chosen yet, that leaves the least MMD to all points.
    """
    count = sets.shape[1]
    means = np.concatenate([kernel(part, points).mean(axis=1) for part in _panels(points)])
    every = np.flip(np.arange(size - 1, -1, -(size // count)))
    candidates = [every, *(sets[:1] if len(sets) == 2 else sets)]  # two halves of a whole have the same MMD
    own = min(candidates, key=lambda one: _relative(points[one], kernel, means[one])).copy()
    # What MMD² · count changes by when a point is added: k(x, x) / count + 2 mean_chosen k(x, ·) − 2 mean_all k(x, ·)
    diagonal = np.array([kernel(x[None], x[None])[0, 0] for x in points])
    chosen = np.concatenate([kernel(part, points[own]).sum(axis=1) for part in _panels(points)])
    free = np.ones(len(points), bool)
    free[own] = False
    for place, point in enumerate(own):
        chosen -= kernel(points[point][None], points)[0]
        free[point] = True
        gain = np.where(free, (diagonal + 2 * chosen) / count - 2 * means, np.inf)
        best = int(np.argmin(gain))
        own[place], free[best] = best, False
        chosen += kernel(points[best][None], points)[0]
    return own


def _relative(points: Floats, kernel: Kernel, means: Floats) -> float:
    """MMD² to all points, less what all sets have in common."""
    inner = sum(float(kernel(part, points).sum()) for part in _panels(points))
    return inner / len(points) ** 2 - 2 * float(means.mean())


def _panels(points: Floats) -> list[Floats]:
    return [points[start : start + 2 * PANEL] for start in range(0, len(points), 2 * PANEL)]
