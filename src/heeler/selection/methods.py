"""The methods by name; here those that are a few lines: chance, and halving by balance signs.

A method is called with the table and a random generator, and returns a function that chooses k of a class's examples.
So what classes share, such as halving's running error, lives between its calls.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from heeler.herding.validate import IntArray
from heeler.selection import loops
from heeler.selection.facility import facility
from heeler.selection.gradmatch import match
from heeler.selection.rows import Choose, Rows
from heeler.selection.thinning import kernel_thin

Method = Callable[[Rows, np.random.Generator], Choose]


def random(rows: Rows, rng: np.random.Generator) -> Choose:
    """k of the examples, all equally likely; with labels, of each class its part. Weights: N_c / k_c within class c."""
    return lambda ids, k: (rng.choice(ids, k, replace=False), ids.size / k)


def halve(rows: Rows, rng: np.random.Generator) -> Choose:
    """Examples in random pairs; of each pair the balance sign keeps one, which takes the other's weight too.

    m halvings leave 2^−m of the examples with weights 2^m; a last partial one, of as many pairs as are too many, leaves
    k. (An odd example out keeps its weight, so weights always sum to N.) The running sum is Σ w g − G itself, carried
    from one halving to the next and from class to class, so later signs make up for earlier ones. Its norm stays near
    √K · 2^m typical rows, while a random subset's grows like 2^m √k: the error falls like 1/k, not 1/√k.
    """
    error = np.zeros(rows.dim)
    return lambda ids, k: halved(rows, rng.permutation(ids), k, error)


def halved(rows: Rows, ids: IntArray, k: int, error: NDArray[np.float64]) -> tuple[IntArray, NDArray[np.float64]]:
    """k of `ids`, paired in the given order, and their weights. error (K,) is kept up to date; ids is scratch."""
    weights, left = np.ones(ids.size), ids.size
    while left > k:
        pairs = min(left // 2, left - k)
        loops.halve_pairs(rows.floats, ids, weights, pairs, error)
        for array in (ids, weights):
            array[pairs : left - pairs] = array[2 * pairs : left].copy()
        left -= pairs
    order = np.argsort(ids[:k])  # chosen all at once: ascending
    return ids[:k][order], weights[:k][order]


METHODS: dict[str, Method] = {
    "random": random,
    "stratified": random,  # `select` sees to it that there are labels
    "halve": halve,
    "kernel-thin": kernel_thin,
    "facility": facility,
    "match": match,
}
"""Name → method."""
