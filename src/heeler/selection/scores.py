"""Selection by a score of each example alone: norm, influence, and coverage of the norm's range."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection.problem import Problem
from heeler.selection.result import Chosen

HARDEST = 0.1
"""Share of the examples, those with the largest norms, that `coverage` leaves out."""
BINS = 50
Floats = NDArray[np.float64]


def norm(problem: Problem) -> Chosen:
    """GraNd (arXiv 2107.07075): the k largest ‖g_i‖, of the one model at hand; the paper averages several."""
    return _highest(problem, norms(problem))


def influence(problem: Problem) -> Chosen:
    """LESS-like (arXiv 2402.04333): the k largest cosines to the mean of the target rows; no optimizer's steps."""
    target = problem.needs_target("influence").mean(axis=0, dtype=np.float64)
    length = float(np.linalg.norm(target))
    if length == 0:
        raise ValueError("the target rows cancel: their mean is zero, and nothing points along it")
    every = np.arange(len(problem.rows))
    lengths = np.sqrt(problem.rows.squares)
    products = problem.rows.project(every, target / length).astype(np.float64)
    return _highest(problem, np.divide(products, lengths, out=np.zeros(every.size), where=lengths > 0))


def coverage(problem: Problem) -> Chosen:
    """Coverage-centric pruning (arXiv 2210.15809): drop the hardest few, then spread k evenly over the norm's range.

    The HARDEST share with the largest ‖g_i‖ is left out (fewer, where k needs them). The rest is cut into BINS of equal
    width by norm, and from the smallest bin to the largest each gives min(its size, what is left of k / bins left)
    at random. All weights are N/k, as published.
    """
    scores = norms(problem)
    found = problem.each(lambda ids, k: (covered(scores[ids], ids, k, problem.rng), ids.size / k))
    return found._replace(scores=scores)


def covered(scores: Floats, ids: IntArray, k: int, rng: np.random.Generator) -> IntArray:
    kept = np.argsort(scores, kind="stable")[: max(ids.size - int(HARDEST * ids.size), k)]
    low, high = scores[kept].min(), scores[kept].max()
    places = np.minimum(((scores[kept] - low) / max(high - low, 1e-300) * BINS).astype(np.int64), BINS - 1)
    bins = [kept[places == place] for place in np.unique(places)]
    chosen: list[IntArray] = []
    bins.sort(key=len)
    for number, own in enumerate(bins):
        share = min(own.size, (k - sum(map(len, chosen))) // (len(bins) - number))
        chosen.append(rng.choice(own, share, replace=False))
    return ids[np.concatenate(chosen)]


def norms(problem: Problem) -> Floats:
    """(N,) ‖g_i‖ in the gradients' own units: one number per example, whatever batch it was in."""
    return np.sqrt(problem.rows.squares) / problem.rows.scale


def _highest(problem: Problem, scores: Floats) -> Chosen:
    """The k highest, of each class its part; of equals the first."""
    found = problem.each(lambda ids, k: (ids[np.argsort(-scores[ids], kind="stable")[:k]], ids.size / k))
    return found._replace(scores=scores)
