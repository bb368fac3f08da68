"""GradMatch (arXiv 2103.00123): non-negative orthogonal matching pursuit for the sum of all rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import Array, IntArray
from heeler.selection.rows import Choose, Rows

PENALTY = 0.5
"""λ, in mean squared norms of a row."""
LEAST_ROUNDS = 16
OPERATIONS = 1e11
"""Some seconds of one core."""
BLOCK = 1 << 13
STEPS = 50
TOLERANCE = {np.dtype(np.float64): 1e-10, np.dtype(np.float32): 1e-6}
"""Of the slope, in lengths of the goal: what rounding leaves."""
Floats = NDArray[np.float64]


def match(rows: Rows, rng: np.random.Generator) -> Choose:
    """min ‖Σ w_i g_i − G‖² + λ‖w‖² over w ≥ 0 with at most k of them above zero, by orthogonal matching pursuit.

    A round takes the example with the largest ⟨g_i, r⟩, r = G − Σ w g, and fits all weights again; one whose weight
    becomes zero is free again. Where k rounds would take too long (`rounds_for`), a round takes the best few. With
    labels, each class is matched to its own sum. It ends with fewer than k when no ⟨g_i, r⟩ is positive or when rounds
    are used up. Weights do not sum to N, but nearly.
    """

    def choose(ids: IntArray, k: int) -> tuple[IntArray, Floats]:
        goal = rows.total(ids)
        penalty = PENALTY * float(rows.squares[ids].mean())
        if penalty == 0:
            raise ValueError("all rows are zero: there is no gradient to match")
        residual, taken, weights = goal, np.empty(0, np.int64), np.empty(0)
        work = 10.0 * ids.size * rows.dim + 3.0 * k * rows.dim * min(k, rows.dim)
        rounds = rounds_for(k, work, ids.size / len(rows))
        for done in range(2 * rounds):  # weights that became zero make more than `rounds` of them
            products = rows.project(ids, residual)
            products[taken] = -np.inf
            wanted = min(-(-k // rounds) if done < rounds else k, k - taken.size)
            best = np.argpartition(products, -wanted)[-wanted:] if wanted < ids.size else np.arange(ids.size)
            best = best[products[best] > 0]
            if best.size == 0:
                break
            taken = np.concatenate([taken, best[np.argsort(-products[best], kind="stable")]])
            residual, weights = fitted(rows.take(ids[taken]), goal, penalty, residual)
            taken, weights = taken[weights > 0], weights[weights > 0]
            if taken.size == k:
                break
        return ids[taken], weights

    return choose


def rounds_for(k: int, work: float, share: float) -> int:
    """In how many rounds a greedy method takes k examples of a class, each round its part of k.

    work: operations of one round, as matrix products count them; share: the class's of all examples. One example per
    round while OPERATIONS · share are enough for that, and never fewer than LEAST_ROUNDS.
    """
    return int(min(k, max(LEAST_ROUNDS, OPERATIONS * share // work)))


def fitted(points: Array, goal: Floats, penalty: float, start: Floats) -> tuple[Floats, Floats]:
    """(residual (K,), weights (s,)) of min ‖pointsᵀ w − goal‖² + penalty ‖w‖² over w ≥ 0; points (s, K).

    At the optimum w = max(points · r, 0) / penalty with r the residual, so r alone is unknown: the least of the smooth
    convex ½‖r‖² − ⟨goal, r⟩ + ‖max(points · r, 0)‖² / (2 penalty), found by Newton steps from `start`. So there are
    K unknowns, however many points.
    """
    if points.size <= 1 << 22:
        points = points.astype(np.float64)
    residual = start

    def value(r: Floats, products: Floats) -> float:
        positive = np.maximum(products, 0)
        return float(0.5 * (r @ r) - goal @ r + positive @ positive / (2 * penalty))

    products = _products(points, residual)
    now = value(residual, products)
    for _ in range(STEPS):
        slope = residual - goal + _weighted(points, np.maximum(products, 0)) / penalty
        if np.linalg.norm(slope) <= TOLERANCE[points.dtype] * np.linalg.norm(goal):
            break
        step = _newton(points, products > 0, penalty, slope)
        size, fall = 1.0, float(slope @ step)
        while True:
            trial = residual - size * step
            products_there = _products(points, trial)
            there = value(trial, products_there)
            if there <= now - 1e-4 * size * fall or size < 1e-8:
                break
            size /= 2
        if there >= now:  # rounding has the last word
            break
        residual, products, now = trial, products_there, there
    return residual, np.maximum(products, 0) / penalty


def _newton(points: Array, active: NDArray[np.bool_], penalty: float, slope: Floats) -> Floats:
    """(I + AᵀA / penalty)⁻¹ slope for the active points A (a, K), by the smaller of the two Gram matrices."""
    dim, count = points.shape[1], int(active.sum())
    if count < dim:
        own = points[active].astype(np.float64)
        gram = own @ own.T
        gram[np.diag_indices(count)] += penalty
        return slope - own.T @ np.linalg.solve(gram, own @ slope)
    gram = np.zeros((dim, dim))
    for start in range(0, len(points), BLOCK):
        own = points[start : start + BLOCK][active[start : start + BLOCK]]
        gram += own.T @ own
    gram /= penalty
    gram[np.diag_indices(dim)] += 1
    return np.asarray(np.linalg.solve(gram, slope), np.float64)


def _products(points: Array, vector: Floats) -> Floats:
    return (points @ vector.astype(points.dtype)).astype(np.float64)


def _weighted(points: Array, weights: Floats) -> Floats:
    """pointsᵀ weights, blocks added up in float64."""
    total = np.zeros(points.shape[1])
    for start in range(0, len(points), BLOCK):
        total += weights[start : start + BLOCK].astype(points.dtype) @ points[start : start + BLOCK]
    return total
