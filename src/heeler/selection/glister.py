"""GLISTER (arXiv 2012.10630): choose what lowers the validation loss."""

from __future__ import annotations

import numpy as np

from heeler.herding.validate import IntArray
from heeler.selection.problem import Problem, rounds_for
from heeler.selection.result import Chosen


def glister(problem: Problem) -> Chosen:
    """Greedily the largest gain g_i · ∇L_val(θ − η Σ_S g), the validation gradient moving as S grows.

    A table has no model to recompute it with, so ∇L_val moves by the target rows' own curvature, the empirical Fisher
    matrix F = (1/V) Σ v vᵀ: ∇L_val(θ − ηs) = v̄ − η F s. η = 1 / (k λ_max(F)): k steps of unit alignment use up the
    steepest direction. Where k rounds would take too long (`rounds_for`), a round takes the best few before ∇L_val
    moves. With labels each class has its part of k, and S is shared. All weights are N/k.
    """
    target = problem.needs_target("glister").astype(np.float64)
    rows, size = problem.rows, sum(k for _, k in problem.strata)
    start = target.mean(axis=0)
    steepest = float(np.linalg.eigvalsh(_small(target) / len(target))[-1])
    if steepest <= 0:
        raise ValueError("all target rows are zero: there is no validation gradient to follow")
    rate, moved = 1.0 / (size * steepest), np.zeros(rows.dim)

    def choose(ids: IntArray, k: int) -> tuple[IntArray, float]:
        rounds = rounds_for(k, 10.0 * ids.size * rows.dim, ids.size / len(rows))
        parts: list[IntArray] = []
        free = np.ones(ids.size, bool)
        for done in range(rounds):
            gradient = start - rate * (target.T @ (target @ moved)) / len(target)
            gains = np.where(free, rows.project(ids, gradient), -np.inf)
            wanted = k * (done + 1) // rounds - k * done // rounds
            best = np.argsort(-gains, kind="stable")[:wanted] if wanted > 1 else np.array([int(np.argmax(gains))])
            free[best] = False
            moved[:] += rows.total(ids[best])
            parts.append(best)
        return ids[np.concatenate(parts)], ids.size / k

    return problem.each(choose)


def _small(points: np.ndarray) -> np.ndarray:
    """The smaller of the two Gram matrices: both have the same largest eigenvalue."""
    return points.T @ points if len(points) > points.shape[1] else points @ points.T
