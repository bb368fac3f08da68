"""The compiled loops of `batches`: sum up steps, exchange examples between them. `reference` has plain twins.

Nothing here checks its input. See `jit` for how rows are read.
"""

import numpy as np
from numba import njit, types

from heeler.herding.jit import _COMPILE, _prefetch, _value
from heeler.herding.steps import WINDOW

_TURNS = 8
"""Times that all examples of a pair are offered an exchange; nearly always fewer are needed."""


@njit(**_COMPILE)
def _load(table, row, mean, scale, out):
    """(Row less mean) × scale, (K,) float32; zero for a negative row, an example without a vector.

    Taken in float64: a mean rounded to float32 would add the same error to every example, and they would add up.
    """
    if row < 0:
        out[:] = types.float32(0)
        return
    for k in range(out.size):
        out[k] = (_value(table[row, k]) - mean[k]) * scale


@njit(**_COMPILE)
def step_sums(table, rows, workers, offsets, means, scale, sums):
    """Σ (row − its worker's mean) × scale of each step into sums (T, K) float32."""
    row = np.empty(table.shape[1], np.float32)
    for t in range(offsets.size - 1):
        total = sums[t]
        total[:] = types.float32(0)
        for i in range(offsets[t], offsets[t + 1]):
            if i + 4 < rows.size and rows[i + 4] >= 0:
                _prefetch(table, rows[i + 4])
            _load(table, rows[i], means[workers[i]], scale, row)
            for k in range(row.size):
                total[k] += row[k]


@njit(**_COMPILE)
def prefixes(sums, start, out):
    """out[t] = start + Σ_{s ≤ t} sums[s] in float64, (T, K): `numpy.cumsum` down the rows takes many times as long."""
    for t in range(sums.shape[0]):
        for k in range(sums.shape[1]):
            out[t, k] = (start[k] if t == 0 else out[t - 1, k]) + sums[t, k]


@njit(**_COMPILE)
def _gram(x, count, out):
    """out[i, j] = ⟨x_i, x_j⟩ of the first `count` rows, by blocks of two rows and four."""
    dim = x.shape[1]
    for i in range(0, count, 2):
        a, b = x[i], x[min(i + 1, count - 1)]
        for j in range(0, i + 2, 4):
            c, d = x[min(j, count - 1)], x[min(j + 1, count - 1)]
            e, f = x[min(j + 2, count - 1)], x[min(j + 3, count - 1)]
            ac = ad = ae = af = bc = bd = be = bf = types.float32(0)
            for k in range(dim):
                p, q = a[k], b[k]
                ac += p * c[k]
                ad += p * d[k]
                ae += p * e[k]
                af += p * f[k]
                bc += q * c[k]
                bd += q * d[k]
                be += q * e[k]
                bf += q * f[k]
            for place, first, second in ((j, ac, bc), (j + 1, ad, bd), (j + 2, ae, be), (j + 3, af, bf)):
                if place < count:
                    out[i, place] = first
                    out[place, i] = first
                    if i + 1 < count:
                        out[i + 1, place] = second
                        out[place, i + 1] = second


@njit(**_COMPILE)
def exchange(table, rows, workers, offsets, means, scale, sums, pairs):
    """Exchange a worker's examples between the two steps of each pair (P, 2), as long as Σ ‖sum‖² falls.

    rows (N,) and workers (N,) lie step after step; rows is written, sums (T, K) is kept up to date. Exchanging x of
    step u for y of step v makes D = sum_u − sum_v into D − 2 (x − y) and leaves sum_u + sum_v alone, so that

        ‖sum_u‖² + ‖sum_v‖²  changes by  2 (‖x − y‖² − ⟨D, x − y⟩).

    ⟨D, x⟩ of all examples and their inner products are taken once; then an exchange costs a few numbers.
    """
    dim = table.shape[1]
    x, gram = np.empty((2 * WINDOW, dim), np.float32), np.empty((2 * WINDOW, 2 * WINDOW), np.float32)
    dots, norms, place = (
        np.empty(2 * WINDOW, np.float32),
        np.empty(2 * WINDOW, np.float32),
        np.empty(2 * WINDOW, np.int64),
    )
    gap = np.empty(dim, np.float32)
    two = types.float32(2)
    for p in range(pairs.shape[0]):
        u, v = pairs[p, 0], pairs[p, 1]
        sum_u, sum_v = sums[u], sums[v]
        size_u, size_v = offsets[u + 1] - offsets[u], offsets[v + 1] - offsets[v]
        for start in range(0, min(size_u, size_v), WINDOW):
            many_u, many_v = min(size_u - start, WINDOW), min(size_v - start, WINDOW)
            count = many_u + many_v
            for i in range(count):
                place[i] = offsets[u] + start + i if i < many_u else offsets[v] + start + i - many_u
            for i in range(count):
                if i + 4 < count and rows[place[i + 4]] >= 0:
                    _prefetch(table, rows[place[i + 4]])
                _load(table, rows[place[i]], means[workers[place[i]]], scale, x[i])
            for k in range(dim):
                gap[k] = sum_u[k] - sum_v[k]
            for i in range(count):
                dot = types.float32(0)
                for k in range(dim):
                    dot += gap[k] * x[i, k]
                dots[i] = dot
            _gram(x, count, gram)
            for i in range(count):
                norms[i] = gram[i, i]
            for _turn in range(_TURNS):
                moved = False
                for a in range(many_u):
                    # Of all y the best, by 2 (‖x − y‖² − ⟨D, x − y⟩); a rounded gain is none.
                    least, best = types.float32(-1e-5) * norms[a], -1
                    base = norms[a] - dots[a]
                    for b in range(many_u, count):
                        change = base + norms[b] + dots[b] - two * gram[a, b]
                        if change < least and workers[place[b]] == workers[place[a]]:
                            least, best = change, b
                    if best < 0:
                        continue
                    moved = True
                    _swap_rows(x, gram, norms, dots, a, best, count)
                    rows[place[a]], rows[place[best]] = rows[place[best]], rows[place[a]]
                    for k in range(dim):
                        change = x[a, k] - x[best, k]  # what came less what went, after the exchange
                        sum_u[k] += change
                        sum_v[k] -= change
                if not moved:
                    break


@njit(**_COMPILE)
def _swap_rows(x, gram, norms, dots, a, b, count):
    """Examples a and b change places: rows, inner products, and ⟨D, ·⟩, as D becomes D − 2 (x_a − x_b)."""
    two = types.float32(2)
    for i in range(count):
        dots[i] -= two * (gram[i, a] - gram[i, b])
    for k in range(x.shape[1]):
        x[a, k], x[b, k] = x[b, k], x[a, k]
    for i in range(count):
        gram[a, i], gram[b, i] = gram[b, i], gram[a, i]
    for i in range(count):
        gram[i, a], gram[i, b] = gram[i, b], gram[i, a]
    norms[a], norms[b] = norms[b], norms[a]
    dots[a], dots[b] = dots[b], dots[a]
