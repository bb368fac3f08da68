"""What `loops.c` does, on NumPy arrays. Nothing is checked here: arrays are contiguous and of the type that is named.

bits: half precision, uint16. Every function lets go of the GIL.
"""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

from heeler.native.build import LOOPS
from heeler.native.call import Array, address, caller

_call = caller(LOOPS)


class _Table(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("dim", ctypes.c_int64),
        ("stored", ctypes.c_int64),
        ("single", ctypes.c_int64),
        ("weights", ctypes.c_void_p),
        ("extra", ctypes.c_int64),
        ("units", ctypes.c_void_p),
        ("strata", ctypes.c_void_p),
    )


class Rows:
    """Rows (N, K), float16 or float32, as the loops read them: without a copy, each times its weight.

    weights: (N,) float32. strata: (N,) int64, units: (S, C) float32; row i is followed by units[strata[i]].
    """

    def __init__(
        self, rows: Array, weights: Array | None = None, strata: Array | None = None, units: Array | None = None
    ) -> None:
        self.rows, self.weights, self.strata, self.units = rows, weights, strata, units
        stored, extra = rows.shape[1], 0 if units is None else units.shape[1]
        single = rows.dtype == np.float32
        self.dim = stored + extra
        numbers = (self.dim, stored, single, address(weights), extra, address(units), address(strata))
        self.table = ctypes.byref(_Table(address(rows), *numbers))

    def __len__(self) -> int:
        return len(self.rows)


def store_halves(rows: Array, where: Array, values: Array, scale: float, largest: float) -> None:
    """rows[where] = values (b, K) float32 × scale, within ±largest, rounded; rows: (N, K) float16."""
    count, dim = values.shape
    _call("store_halves", rows, where, values, count, dim, scale, largest)


def compare_halves(rows: Array, where: Array, values: Array, scale: float, largest: float) -> NDArray[np.float32]:
    """(3, b) ⟨new, old⟩, ‖old‖² and ‖new‖² of what `store_halves` would replace."""
    count, dim = values.shape
    out = np.empty((3, count), np.float32)
    _call("compare_halves", rows, where, values, count, dim, scale, largest, out)
    return out


def compare_rows(new: Array, own: Array, other: Array) -> NDArray[np.float64]:
    """(5, m) ⟨new, own⟩, ⟨new, other⟩, ‖new‖², ‖own‖² and ‖other‖² of rows (m, K): float32, and float16 twice."""
    out = np.empty((5, len(new)))
    _call("compare_rows", new, own, other, *new.shape, out)
    return out


def products(a: Array, b: Array) -> NDArray[np.float32]:
    """(n, m) ⟨a_i, b_j⟩ of rows (n, c) and (m, c), float32. A BLAS would wake its threads, which takes far longer."""
    out = np.empty((len(a), len(b)), np.float32)
    _call("products", a, np.ascontiguousarray(b.T), *out.shape, a.shape[1], out)
    return out


def squared_norms(rows: Rows) -> NDArray[np.float64]:
    """(N,) ‖row‖² of each."""
    out = np.empty(len(rows))
    _call("squared_norms", rows.table, len(rows), out)
    return out


def shard_means(rows: Rows, order: Array, offsets: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(n, K) the mean of each shard's rows, order[offsets[j]:offsets[j + 1]], and (n,) the sum of their squares."""
    shards = offsets.size - 1
    means, squares = np.empty((shards, rows.dim)), np.empty(shards)
    _call("shard_means", rows.table, order, offsets, shards, means, squares)
    return means, squares


def balance_sweep(rows: Rows, order: Array, mean: Array) -> NDArray[np.int64]:
    """(m,) the order that one mean-centred sweep makes of `order`."""
    out = np.empty_like(order)
    _call("balance_sweep", rows.table, order, order.size, mean, out)
    return out


def pair_sweep(rows: Rows, order: Array, offsets: Array, group: Array) -> NDArray[np.int64]:
    """(m,) the order that one coordinated pair sweep makes; group (n,): the running sum that each worker shares."""
    out = np.empty_like(order)
    _call("pair_sweep", rows.table, order, offsets, offsets.size - 1, group, int(group.max()) + 1, out)
    return out


def prefix_norms(rows: Rows, order: Array, offsets: Array, means: Array, batch_size: int) -> tuple[float, ...]:
    """Largest infinity norm, largest squared 2-norm, sum of squared 2-norms and number of prefixes."""
    out = np.empty(4)
    _call("prefix_norms", rows.table, order, offsets, offsets.size - 1, means, batch_size, out)
    return tuple(out.tolist())


def step_squares(rows: Rows, means: Array, order: Array, workers: Array, offsets: Array) -> tuple[float, float]:
    """Σ_t ‖sum_t‖² and Σ_t ‖prefix_t‖² of steps, order[offsets[t]:offsets[t + 1]]; a negative row is the mean."""
    out = np.empty(2)
    _call("step_squares", rows.table, means, len(means), order, workers, offsets, offsets.size - 1, out)
    return float(out[0]), float(out[1])


def group_sums(rows: Rows, order: Array, workers: Array | None, offsets: Array, means: Array) -> NDArray[np.float32]:
    """(G, K) Σ (row − its worker's mean) over order[offsets[g]:offsets[g + 1]]; a negative row counts as the mean."""
    sums = np.empty((offsets.size - 1, rows.dim), np.float32)
    _call("group_sums", rows.table, order, workers, offsets, len(sums), means, len(means), sums)
    return sums


def project_rows(rows: Rows, shards: Array, means: Array, seen: Array | None, basis: Array) -> NDArray[np.float16]:
    """(N, k) each row less its worker's mean times `basis` (K, k) float32, k a multiple of 16; zeros where not seen."""
    out = np.empty((len(rows), basis.shape[1]), np.float16)
    _call("project_rows", rows.table, shards, len(means), means, seen, basis, basis.shape[1], out)
    return out


def principal_axes(sample: Array, count: int) -> NDArray[np.float32]:
    """(k, K) about the first `count` principal axes of a sample (m, K) float32, m ≥ k; zeros where there are fewer."""
    axes = np.empty((count, sample.shape[1]), np.float32)
    _call("principal_axes", sample, *sample.shape, count, axes)
    return axes


def exchange_tree(rows: Rows, means: Array, order: Array, workers: Array, offsets: Array, seed: int) -> None:
    """Exchange examples among steps, order[offsets[t]:offsets[t + 1]], so that all prefixes of steps get shorter."""
    _call("exchange_tree", rows.table, means, len(means), order, workers, offsets, offsets.size - 1, seed)
