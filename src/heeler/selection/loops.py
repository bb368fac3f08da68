# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The compiled loops of selection. Their plain twins are in the tests' `reference`.

Tables are (N, K) as `heeler.herding.validate.as_bits` gives them: float32, float64, or the bits of float16. Nothing
here checks its input.
"""

import numpy as np
from numba import njit

from heeler.herding.jit import _COMPILE, _ahead, _narrow, _prefetch, _value


@njit(**_COMPILE)
def add_rows(table, rows, total):
    """total (K,) float64 += Σ of the rows (n,)."""
    ahead = _ahead(table)
    for t in range(rows.size):
        if t + ahead < rows.size:
            _prefetch(table, rows[t + ahead])
        for k in range(table.shape[1]):
            total[k] += _value(table[rows[t], k])


@njit(**_COMPILE)
def project(table, rows, vector, products):
    """products (n,) = ⟨row, vector⟩ of the rows (n,); vector (K,) in the type that sums are to have."""
    ahead = _ahead(table)
    for t in range(rows.size):
        if t + ahead < rows.size:
            _prefetch(table, rows[t + ahead])
        dot = vector[0] * 0
        for k in range(table.shape[1]):
            dot += _narrow(table[rows[t], k]) * vector[k]
        products[t] = dot


@njit(**_COMPILE)
def halve_pairs(table, rows, weights, pairs, error):
    """Of rows 2p and 2p + 1, for p < pairs, one stays and takes both weights; the survivors move to the front.

    rows (n,) and weights (n,) are rewritten: the first `pairs` are the winners, in order; what stood beyond the pairs
    is the caller's to move. error (K,) float64 is Σ w g − G and is kept up to date. With D = g_a − g_b, keeping a adds
    w_b D to it, keeping b takes w_a D off: a stays where that leaves the shorter error, 2⟨error, D⟩ ≤ (w_a − w_b)‖D‖²;
    for equal weights this is the balance rule ⟨S, D⟩ ≤ 0.
    """
    ahead = max(_ahead(table) // 2, 1)
    for p in range(pairs):
        if p + ahead < pairs:
            _prefetch(table, rows[2 * (p + ahead)])
            _prefetch(table, rows[2 * (p + ahead) + 1])
        a, b = rows[2 * p], rows[2 * p + 1]
        wa, wb = weights[2 * p], weights[2 * p + 1]
        dot, square = 0.0, 0.0
        for k in range(table.shape[1]):
            d = _value(table[a, k]) - _value(table[b, k])
            dot += error[k] * d
            square += d * d
        first = 2.0 * dot <= (wa - wb) * square
        step = wb if first else -wa
        for k in range(table.shape[1]):
            error[k] += step * (_value(table[a, k]) - _value(table[b, k]))
        rows[p] = a if first else b
        weights[p] = wa + wb


@njit(**_COMPILE)
def kernel_halve(gram, start, left, right, uniforms, base, sigma, length):
    """KT-split's coin for a panel of pairs; gram (2p, 2p) is their kernel matrix, pair i in rows 2i and 2i + 1.

    base (2p,) = Σ over earlier pairs of k(·, right) − k(·, left). left and right (p,) get numbers 0..2p − 1 + start.
    sigma: σ² so far; length: 2 ln(2nm/(δ 2^j)). Returns the new σ².
    """
    for i in range(uniforms.size):
        a, b = 2 * i, 2 * i + 1
        square = gram[a, a] - 2 * gram[a, b] + gram[b, b]
        threshold = max((sigma * square * length) ** 0.5, square) if square > 0 else 0.0
        if sigma == 0:
            sigma = max(square, 0.0)
        elif threshold > 0:
            sigma += 2 * square * max(0.0, 0.5 + (square / (2 * threshold) - 1) * sigma / threshold)
        alpha = base[a] - base[b]
        for j in range(i):
            on_right, on_left = right[j] - start, left[j] - start
            alpha += gram[a, on_right] - gram[a, on_left] - gram[b, on_right] + gram[b, on_left]
        second = uniforms[i] <= 0.5 * (1 - alpha / (threshold if threshold > 0 else 1.0))
        left[i] = start + (b if second else a)
        right[i] = start + (a if second else b)
    return sigma


@njit(**_COMPILE)
def lazy_greedy(distance, counts, chosen, owner):
    """Facility location: chosen (k,) of n points, one by one, so that Σ counts · distance to the nearest falls fastest.

    distance (n, n) symmetric float32, counts (n,) float64; owner (n,) gets the place in `chosen` that each belongs to,
    every chosen point to itself. Gains only fall as points are chosen (submodularity), so one that was the largest
    before, and still is when computed again, is the largest: most are never computed again. Of equals the first counts.
    """
    size, largest = counts.size, distance.max()
    near = np.full(size, largest, distance.dtype)  # the constant c of c − ‖·‖: no choice but the first depends on it
    bounds, fresh = np.empty(size), np.zeros(size, np.int64)
    for j in range(size):
        gain = 0.0
        row = distance[j]
        for i in range(size):
            gain += counts[i] * (largest - row[i])
        bounds[j] = gain
    for step in range(chosen.size):
        while True:
            best = 0
            for j in range(1, size):
                if bounds[j] > bounds[best]:
                    best = j
            if fresh[best] == step:
                break
            row, gain = distance[best], 0.0
            for i in range(size):
                gain += counts[i] * max(near[i] - row[i], row[i] * 0)
            bounds[best] = gain
            fresh[best] = step
        chosen[step] = best
        bounds[best] = -1.0
        row = distance[best]
        for i in range(size):
            if row[i] < near[i] or step == 0:
                near[i] = row[i]
                owner[i] = step
        owner[best] = step
