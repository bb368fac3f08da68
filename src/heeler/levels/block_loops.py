"""What `block_loops.c` does, on contiguous NumPy arrays. Checks nothing.

pairs (2p, K) float32: rows 2i and 2i + 1 are one. running (K,) float64: a sum. firsts (p,) bool: whether the pair's
first goes to the first half.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from heeler.native.call import Array, caller

BLOCK_LOOPS = Path(__file__).with_name("block_loops.c")
_call = caller(BLOCK_LOOPS)


def centre(rows: Array, factors: Array, mean: Array) -> Array:
    """(n, K) float32 rows (n, K) float16 × factors (n,) − mean (K,), float32; zeros for a row that begins with NaN."""
    out = np.empty(rows.shape, np.float32)
    _call("centre", rows, *rows.shape, factors, mean, out)
    return out


def add_up(rows: Array, factors: Array) -> Array:
    """(K,) Σ of rows (n, K) float16 × factors (n,) float32, but for rows that begin with NaN."""
    total = np.zeros(rows.shape[1])
    _call("add_up", rows, *rows.shape, factors, total)
    return total


def walk_pairs(pairs: Array, running: Array, firsts: Array) -> None:
    """Of each pair the one that keeps the running sum short goes to the first half; writes `running` and `firsts`."""
    _call("walk_pairs", pairs, firsts.size, pairs.shape[1], running, firsts)


def signed_sum(pairs: Array, running: Array, firsts: Array) -> None:
    """Add to `running` what the walk added, with the signs that it has found."""
    _call("signed_sum", pairs, firsts.size, pairs.shape[1], running, firsts)


def turn_pairs(pairs: Array, running: Array, firsts: Array) -> int:
    """Turn every pair over, in turn, that makes the running sum shorter; returns how many did."""
    turned = np.zeros(1, np.int64)
    _call("turn_pairs", pairs, firsts.size, pairs.shape[1], running, firsts, turned)
    return int(turned[0])
