"""Chance: the baseline, plain and by class. Hard to beat."""

from __future__ import annotations

import numpy as np

from heeler.herding.validate import IntArray
from heeler.selection.problem import Problem
from heeler.selection.result import Chosen


def random(problem: Problem) -> Chosen:
    """k of the examples, all equally likely; with labels, of each class its part. Weights: N_c / k_c within class c."""
    return problem.each(lambda ids, k: (drawn(ids, k, problem.rng), ids.size / k))


def stratified(problem: Problem) -> Chosen:
    """`random` by class."""
    problem.needs_labels("stratified")
    return random(problem)


def drawn(ids: IntArray, k: int, rng: np.random.Generator) -> IntArray:
    return rng.choice(ids, k, replace=False)
