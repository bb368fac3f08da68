"""Halving by balance signs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection.problem import Problem
from heeler.selection.result import Chosen
from heeler.selection.source import Rows


def halve(problem: Problem) -> Chosen:
    """Examples in random pairs; of each pair the balance sign keeps one, which takes the other's weight too.

    m halvings leave 2^−m of the examples with weights 2^m; a last partial one, of as many pairs as are too many, leaves
    k. (An odd example out keeps its weight, so weights always sum to N.) The running sum is Σ w g − G itself, carried
    from one halving to the next and from class to class, so later signs make up for earlier ones. Its norm stays near
    √K · 2^m typical rows, while a random subset's grows like 2^m √k: the error falls like 1/k, not 1/√k.
    """
    error = np.zeros(problem.rows.dim)
    return problem.each(lambda ids, k: halved(problem.rows, problem.rng.permutation(ids), k, error))


def halved(rows: Rows, ids: IntArray, k: int, error: NDArray[np.float64]) -> tuple[IntArray, NDArray[np.float64]]:
    """k of `ids`, paired in the given order, and their weights. error (K,) is kept up to date; ids is scratch."""
    from heeler.selection import kernels

    weights, left = np.ones(ids.size), ids.size
    while left > k:
        pairs = min(left // 2, left - k)
        kernels.halve_pairs(rows.bits, ids, weights, pairs, error)
        for array in (ids, weights):
            array[pairs : left - pairs] = array[2 * pairs : left].copy()
        left -= pairs
    order = np.argsort(ids[:k])  # chosen all at once: ascending
    return ids[:k][order], weights[:k][order]
