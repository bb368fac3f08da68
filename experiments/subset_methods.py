"""Subset methods that gain no more than those of `heeler.select`: they are here for the published tables.

Each is made for a table (rows, random generator, k of all classes, validation rows) and returns a function that chooses
k of a class's examples, with weights, as the methods of `heeler.selection.methods` do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import heeler
from heeler.herding.validate import Array, IntArray
from heeler.selection import Rows
from heeler.selection.api import select_by
from heeler.selection.gradmatch import rounds_for
from heeler.selection.quota import count_of
from heeler.selection.rows import Choose
from heeler.selection.thinning import thin

HARDEST, BINS = 0.1, 50
"""Of `coverage`: the share of the examples with the largest norms that it leaves out, and ranges of the norm."""
DIVERSITY, LOCALITY = 0.05, 0.05
SHRINK, STEPS, TOLERANCE, LEAST, LARGEST = 0.5, 50, 1e-3, 1e-9, 4096
"""Of `sparse`."""
Floats = NDArray[np.float64]


def select(
    rows: Array, k: int | float, method: str, *, labels: Any = None, target: Array | None = None, seed: int = 0
) -> heeler.Selection:
    """`heeler.select` from (N, K) rows by one of `METHODS`; target: (V, K) rows of validation examples, for some."""
    if method not in OTHERS:
        return heeler.select(rows, k, method, labels=labels, seed=seed)
    goal = None if target is None else np.asarray(target, np.float64 if rows.dtype == np.float64 else np.float32)
    made = partial(OTHERS[method], size=count_of(k, len(rows)), target=goal)
    return select_by(made, method, rows, k, labels, seed)


def kernel_thin_linear(rows: Rows, rng: np.random.Generator, size: int, target: Array | None) -> Choose:
    """`kernel-thin` under the linear kernel, whose MMD is the distance of the means."""
    return thin(rows, rng, linear)


def linear(a: Floats, b: Floats) -> Floats:
    return a @ b.T


def glister(rows: Rows, rng: np.random.Generator, size: int, target: Array | None) -> Choose:
    """GLISTER (arXiv 2012.10630): the largest gain g_i · ∇L_val(θ − η Σ_S g), the gradient moving as S grows.

    A table has no model to recompute it with, so ∇L_val moves by the target rows' own curvature, the empirical Fisher
    matrix F = (1/V) Σ v vᵀ: ∇L_val(θ − ηs) = v̄ − η F s. η = 1 / (k λ_max(F)): k steps of unit alignment use up the
    steepest direction. Where k rounds would take too long (`rounds_for`), a round takes the best few before ∇L_val
    moves. With labels each class has its part of k, and S is shared. All weights are N/k.
    """
    if target is None:
        raise ValueError("glister selects for a validation set: give target=")
    goals = target.astype(np.float64)
    start = goals.mean(axis=0)
    small = goals.T @ goals if len(goals) > goals.shape[1] else goals @ goals.T  # their largest eigenvalues are equal
    rate = 1.0 / (size * float(np.linalg.eigvalsh(small / len(goals))[-1]))
    moved = np.zeros(rows.dim)

    def choose(ids: IntArray, k: int) -> tuple[IntArray, float]:
        rounds = rounds_for(k, 10.0 * ids.size * rows.dim, ids.size / len(rows))
        parts: list[IntArray] = []
        free = np.ones(ids.size, bool)
        for done in range(rounds):
            gradient = start - rate * (goals.T @ (goals @ moved)) / len(goals)
            gains = np.where(free, rows.project(ids, gradient), -np.inf)
            wanted = k * (done + 1) // rounds - k * done // rounds
            best = np.argsort(-gains, kind="stable")[:wanted] if wanted > 1 else np.array([int(np.argmax(gains))])
            free[best] = False
            moved[:] += rows.total(ids[best])
            parts.append(best)
        return ids[np.concatenate(parts)], ids.size / k

    return choose


def norm(rows: Rows, rng: np.random.Generator, size: int, target: Array | None) -> Choose:
    """GraNd (arXiv 2107.07075): the k largest ‖g_i‖, of the one model at hand; the paper averages several."""
    return _highest(np.sqrt(rows.squares))


def influence(rows: Rows, rng: np.random.Generator, size: int, target: Array | None) -> Choose:
    """LESS-like (arXiv 2402.04333): the k largest cosines to the mean of the target rows; no optimizer's steps."""
    if target is None:
        raise ValueError("influence selects for a validation set: give target=")
    mean = target.mean(axis=0, dtype=np.float64)
    lengths = np.sqrt(rows.squares)
    products = rows.project(np.arange(len(rows)), mean / float(np.linalg.norm(mean))).astype(np.float64)
    return _highest(np.divide(products, lengths, out=np.zeros(len(rows)), where=lengths > 0))


def _highest(scores: Floats) -> Choose:
    """The k highest scores; of equals the first."""
    return lambda ids, k: (ids[np.argsort(-scores[ids], kind="stable")[:k]], ids.size / k)


def coverage(rows: Rows, rng: np.random.Generator, size: int, target: Array | None) -> Choose:
    """Coverage-centric pruning (arXiv 2210.15809): drop the hardest few, then spread k evenly over the norm's range.

    The HARDEST share with the largest ‖g_i‖ is left out (fewer, where k needs them). The rest is cut into BINS of equal
    width by norm, and from the smallest bin to the largest each gives min(its size, what is left of k / bins left)
    at random. All weights are N/k, as published.
    """
    norms = np.sqrt(rows.squares)

    def choose(ids: IntArray, k: int) -> tuple[IntArray, float]:
        scores = norms[ids]
        kept = np.argsort(scores, kind="stable")[: max(ids.size - int(HARDEST * ids.size), k)]
        low, high = scores[kept].min(), scores[kept].max()
        places = np.minimum(((scores[kept] - low) / max(high - low, 1e-300) * BINS).astype(np.int64), BINS - 1)
        bins = sorted((kept[places == place] for place in np.unique(places)), key=len)
        chosen: list[IntArray] = []
        for number, own in enumerate(bins):
            share = min(own.size, (k - sum(map(len, chosen))) // (len(bins) - number))
            chosen.append(rng.choice(own, share, replace=False))
        return ids[np.concatenate(chosen)], ids.size / k

    return choose


def sparse(rows: Rows, rng: np.random.Generator, size: int, target: Array | None) -> Choose:
    """Representatives with structured sparsity, after Wang, Kawahara, Weng and Yuan (Pattern Recognition, 2016).

    Rebuild all rows from few: A ≈ C A with C ≥ 0 and few columns of C above zero, those of the representatives.
    min ½‖A − CA‖² + λ Σ_j ‖C_:j‖ + (γ/2) tr(C S Cᵀ) + μ Σ_ij d_ij C_ij: group sparsity, diversity (S_jl, the cosine of
    rows j and l, makes it costly to rebuild a row from two that are alike) and locality (a row is rebuilt from near
    ones); d are distances over their mean, rows have mean square 1. The paper's diversity term is a graph cut of the
    groups; this quadratic takes its place, so that one accelerated proximal gradient solves it all. λ is halved until
    at least k columns are above zero; the k of largest ‖C_:j‖ are chosen. Weights are Σ_i C_ij, scaled to sum to N.
    """

    def choose(ids: IntArray, k: int) -> tuple[IntArray, Floats]:
        if ids.size > LARGEST:
            raise ValueError(f"sparse keeps N × N numbers, and {ids.size} examples of a class are more than {LARGEST}")
        points = rows.take(ids).astype(np.float64)
        points /= np.sqrt(np.mean(np.einsum("ik,ik->i", points, points)))
        sizes, sums = _representatives(points, k)
        best = np.argsort(-sizes, kind="stable")[:k]
        weights = np.maximum(sums[best], LEAST)
        return ids[best], weights * (ids.size / weights.sum())

    return choose


def _representatives(points: Floats, k: int) -> tuple[Floats, Floats]:
    """(‖C_:j‖ (N,), Σ_i C_ij (N,)) at the largest λ of the path with at least k columns above zero."""
    count = len(points)
    squares = np.einsum("ik,ik->i", points, points)
    distance = np.sqrt(np.maximum(squares[:, None] + squares - 2 * points @ points.T, 0))
    np.fill_diagonal(distance, 0)
    distance /= max(distance.mean(), 1e-300)
    units = points / np.sqrt(np.maximum(squares, 1e-300))[:, None]  # S = units · unitsᵀ
    steepest = float(np.linalg.norm(points, 2) ** 2 + DIVERSITY * np.linalg.norm(units, 2) ** 2)
    start = np.maximum(points @ points.T - LOCALITY * distance, 0)
    penalty = float(np.linalg.norm(start, axis=0).max())  # from here on C = 0
    coefficients = np.zeros((count, count))
    for _ in range(60):
        penalty *= SHRINK
        coefficients = solved(points, distance, units, penalty, steepest, coefficients)
        sizes = np.linalg.norm(coefficients, axis=0)
        if np.count_nonzero(sizes > LEAST) >= k:
            break
    return sizes, coefficients.sum(axis=0)


def solved(points: Floats, distance: Floats, units: Floats, penalty: float, steepest: float, start: Floats) -> Floats:
    """Accelerated proximal gradient (FISTA) from `start`; its step is 1 / steepest."""
    now, ahead, momentum = start, start, 1.0
    for _ in range(STEPS):
        slope = (ahead @ points - points) @ points.T + DIVERSITY * (ahead @ units) @ units.T
        following = _shrunk(ahead - slope / steepest, distance * (LOCALITY / steepest), penalty / steepest)
        later = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        change = following - now
        ahead = following + (momentum - 1) / later * change
        now, momentum = following, later
        if np.linalg.norm(change) <= TOLERANCE * np.linalg.norm(now) + LEAST:
            break
    return now


def _shrunk(values: Floats, locality: Floats, group: float) -> Floats:
    """The proximal point of Σ locality_ij C_ij + group Σ_j ‖C_:j‖ on C ≥ 0: shrink entries, then columns."""
    entries = np.maximum(values - locality, 0)
    lengths = np.linalg.norm(entries, axis=0)
    factors = np.maximum(1 - group / np.maximum(lengths, 1e-300), 0)
    return entries * factors


OTHERS: dict[str, Callable[..., Choose]] = {
    "kernel-thin-linear": kernel_thin_linear,
    "glister": glister,
    "norm": norm,
    "influence": influence,
    "coverage": coverage,
    "sparse": sparse,
}
METHODS = ("random", "stratified", "halve", "kernel-thin", "kernel-thin-linear", "facility", "match", *list(OTHERS)[1:])
"""All names, in the order of the tables."""
