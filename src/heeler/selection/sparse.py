"""Representatives with structured sparsity, after Wang, Kawahara, Weng and Yuan (Pattern Recognition, 2016)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection.problem import Problem
from heeler.selection.result import Chosen

LARGEST = 4096
"""Examples of a class: the N × N coefficients are then 128 MiB."""
DIVERSITY, LOCALITY = 0.05, 0.05
SHRINK, STEPS, TOLERANCE = 0.5, 50, 1e-3
LEAST = 1e-9
Floats = NDArray[np.float64]


def sparse(problem: Problem) -> Chosen:
    """Rebuild all rows from few: A ≈ C A with C ≥ 0 and few columns of C above zero, those of the representatives.

    min ½‖A − CA‖² + λ Σ_j ‖C_:j‖ + (γ/2) tr(C S Cᵀ) + μ Σ_ij d_ij C_ij: group sparsity, diversity (S_jl, the cosine of
    rows j and l, makes it costly to rebuild a row from two that are alike) and locality (a row is rebuilt from near
    ones); d are distances over their mean, rows have mean square 1. The paper's diversity term is a graph cut of the
    groups; this quadratic takes its place, so that one accelerated proximal gradient solves it all. λ is halved until
    at least k columns are above zero; the k of largest ‖C_:j‖ are chosen. Weights are Σ_i C_ij, scaled to sum to N.
    """
    return problem.each(lambda ids, k: _represented(problem, ids, k))


def _represented(problem: Problem, ids: IntArray, k: int) -> tuple[IntArray, Floats]:
    if ids.size > LARGEST:
        raise ValueError(
            f"method 'sparse' keeps N × N numbers and there are {ids.size} examples in a class, more than {LARGEST}: "
            f"thin them first: first = heeler.select(source, {LARGEST}, 'halve').indices; "
            "first[heeler.select(rows[first], k, 'sparse').indices]"
        )
    points = problem.rows.take(ids).astype(np.float64)
    size = np.sqrt(np.mean(np.einsum("ik,ik->i", points, points)))
    if size == 0:
        raise ValueError("all rows are zero: none represents the others")
    sizes, sums = representatives(points / size, k)
    best = np.argsort(-sizes, kind="stable")[:k]
    weights = np.maximum(sums[best], LEAST)
    return ids[best], weights * (ids.size / weights.sum())


def representatives(points: Floats, k: int) -> tuple[Floats, Floats]:
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
        following = shrunk(ahead - slope / steepest, distance * (LOCALITY / steepest), penalty / steepest)
        later = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        change = following - now
        ahead = following + (momentum - 1) / later * change
        now, momentum = following, later
        if np.linalg.norm(change) <= TOLERANCE * np.linalg.norm(now) + LEAST:
            break
    return now


def shrunk(values: Floats, locality: Floats, group: float) -> Floats:
    """The proximal point of Σ locality_ij C_ij + group Σ_j ‖C_:j‖ on C ≥ 0: shrink entries, then columns."""
    entries = np.maximum(values - locality, 0)
    lengths = np.linalg.norm(entries, axis=0)
    factors = np.maximum(1 - group / np.maximum(lengths, 1e-300), 0)
    return entries * factors
