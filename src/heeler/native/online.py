"""What `online.c` does, on NumPy arrays: contiguous, int64 and float64 where nothing else is named. Checks nothing.

Vectors (b, K) are float32 or float64; worker (b,) says whose each one is.
"""

from __future__ import annotations

import numpy as np

from heeler.native.build import ONLINE
from heeler.native.call import Array, caller

_call = caller(ONLINE)


def observe_tree(
    vectors: Array, worker: Array, means: Array, totals: Array, running: Array, depth: int, leaves: Array
) -> None:
    """Send each vector down a tree of running sums; leaves (b,) int32 gets the leaf it falls into.

    means and totals (n, K), running (n, 2^(depth+1) − 1, K).
    """
    sums = (means, totals, running)
    _call("observe_tree", vectors, vectors.dtype == np.float32, worker, *vectors.shape, *sums, depth, leaves)


def observe_pairs(
    vectors: Array,
    rows: Array,
    worker: Array,
    group: Array,
    running: Array,
    waiting: Array,
    waiting_row: Array,
    places: Array,
    left: Array,
    right: Array,
    rule: int,
    uniforms: Array,
    knobs: Array,
) -> None:
    """Balance each worker's vectors in pairs as they come; the arrays behind `group` are the rule's, and are changed.

    rows (b,); group (n,), running (g, K); waiting (n, K), waiting_row (n,); places (N,), left and right (n,); rule: 0
    deterministic, 1 walk, 2 kernel halving; uniforms: one for each pair completed here; knobs (3,).
    """
    given = (vectors, vectors.dtype == np.float32, rows, worker, *vectors.shape)
    lists = (group, running, waiting, waiting_row, places, left, right)
    _call("observe_pairs", *given, *lists, rule, uniforms, knobs)
