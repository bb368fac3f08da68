"""`heeler.select`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from heeler.selection.errors import compared
from heeler.selection.facility import facility
from heeler.selection.glister import glister
from heeler.selection.halving import halve
from heeler.selection.matching import match
from heeler.selection.parts import count_of, strata_of
from heeler.selection.problem import Problem
from heeler.selection.result import Chosen, Selection
from heeler.selection.scores import coverage, influence, norm
from heeler.selection.source import checked, opened, rows_of
from heeler.selection.sparse import sparse
from heeler.selection.static import random, stratified
from heeler.selection.thinning import kernel_thin, kernel_thin_linear

METHODS: dict[str, Callable[[Problem], Chosen]] = {
    "random": random,
    "stratified": stratified,
    "halve": halve,
    "kernel-thin": kernel_thin,
    "kernel-thin-linear": kernel_thin_linear,
    "facility": facility,
    "match": match,
    "glister": glister,
    "norm": norm,
    "influence": influence,
    "coverage": coverage,
    "sparse": sparse,
}
"""Name → method."""


def select(
    source: Any, k: int | float, method: str = "halve", *, labels: Any = None, target: Any = None, seed: int = 0
) -> Selection:
    """Choose k examples, with weights, from a table of gradients.

    The result says how far the weighted subset is from the whole, and how far ten random subsets are: look at both.

    Args:
        source: a handle, the path of a file that `heeler.save` wrote, what `handle.state_dict()` returned, a
            `SketchTable`, or the rows themselves: (N, K) float16, float32 or float64, NumPy or CPU torch, memory-mapped
            too. It is not copied. Or what `heeler.selection.rows_of` made of one of these.
        k: how many, or which fraction of all.
        method: `random`, `stratified`, `halve`, `kernel-thin`, `kernel-thin-linear`, `facility`, `match`, `glister`,
            `norm`, `influence`, `coverage` or `sparse`.
        labels: (N,) a class per example; every class then gets its share of k, at least one.
        target: (V, K) gradients of validation examples, sketched as the source's: for `glister` and `influence`.
        seed: of all that is random, the comparison with random subsets too.
    """
    if method not in METHODS:
        raise ValueError(f"there is no method {method!r}: choose among {', '.join(METHODS)}")
    source, hold = opened(source)
    with hold:
        return _select(source, k, method, labels, target, seed)


def _select(source: Any, k: Any, method: str, labels: Any, target: Any, seed: int) -> Selection:
    rows = rows_of(source)
    strata = strata_of(labels, count_of(k, len(rows)), len(rows))
    goal = None
    if target is not None:
        goals = checked(target, what="target ")
        if goals.dim != rows.dim:
            raise ValueError(
                f"target rows have {goals.dim} numbers, the table's {rows.dim}: sketch them with the same projections"
            )
        goal = goals.take(slice(None)) * np.array(rows.scale, goals.precision)
    problem = Problem(rows, strata, labels is not None, goal, np.random.default_rng(seed))
    chosen = METHODS[method](problem)
    error, mmd, random_error, random_mmd = compared(rows, chosen, seed)
    return Selection(method, *chosen, error, mmd, random_error, random_mmd)
