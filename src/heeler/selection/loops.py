"""What `loops.c` does, on contiguous NumPy arrays. Checks nothing.

A table is (N, K) float16, float32 or float64; rows (n,) int64 are some of its rows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np

from heeler.native.call import Array, address, caller

_call = caller(Path(__file__).with_name("loops.c"))


class _Table(ctypes.Structure):
    _fields_ = (("rows", ctypes.c_void_p), ("dim", ctypes.c_int64), ("size", ctypes.c_int64))


def _table(table: Array) -> ctypes.Structure:
    return ctypes.byref(_Table(address(table), table.shape[1], table.itemsize))  # type: ignore[return-value]


def add_rows(table: Array, rows: Array) -> Array:
    """(K,) Σ of the rows, float64."""
    total = np.zeros(table.shape[1])
    _call("add_rows", _table(table), rows, rows.size, total)
    return total


def project(table: Array, rows: Array, vector: Array) -> Array:
    """(n,) ⟨row, vector⟩ of the rows, in float64 for a table of it, else in float32; vector (K,) is of that type."""
    products = np.empty(rows.size, vector.dtype)
    _call("project", _table(table), rows, rows.size, vector, products)
    return products


def halve_pairs(table: Array, rows: Array, weights: Array, pairs: int, error: Array) -> None:
    """Of rows 2p and 2p + 1, for p < pairs, one stays and takes both weights; the survivors move to the front.

    rows (n,) and weights (n,) are rewritten; what stood beyond the pairs is the caller's to move. error (K,) float64 is
    Σ w g − G and is kept up to date.
    """
    _call("halve_pairs", _table(table), rows, weights, pairs, error)


def kernel_halve(
    gram: Array, start: int, left: Array, right: Array, uniforms: Array, base: Array, sigma: float, length: float
) -> float:
    """KT-split's coin for a panel of pairs; gram (2p, 2p) is their kernel matrix, pair i in rows 2i and 2i + 1.

    base (2p,) = Σ over earlier pairs of k(·, right) − k(·, left). left and right (p,) get numbers 0..2p − 1 + start.
    sigma: σ² so far; length: 2 ln(2nm/(δ 2^j)). Returns the new σ².
    """
    held = np.array([sigma])
    _call("kernel_halve", gram, start, left, right, uniforms, uniforms.size, base, held, length)
    return float(held[0])


def lazy_greedy(distance: Array, counts: Array, chosen: Array, owner: Array) -> None:
    """Facility location: chosen (k,) of n points, one by one, so that Σ counts · distance to the nearest falls fastest.

    distance (n, n) symmetric float32 or float64, counts (n,) float64; owner (n,) gets the place in `chosen` that each
    belongs to, every chosen point to itself. Of equals the first counts.
    """
    largest = float(distance.max())
    _call("lazy_greedy", distance, distance.itemsize, counts, counts.size, largest, chosen, chosen.size, owner)
