# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The compiled loops of two levels; the tests' `reference_levels` has their plain twins."""

from numba import njit

from heeler.herding.jit import _COMPILE, _narrow


@njit(**_COMPILE)
def centre(bits, factors, mean, out):
    """out (n, K) float32 ← bits (n, K) × factors (n,) − mean (K,); zeros for a row whose first number is NaN."""
    for i in range(bits.shape[0]):
        first = _narrow(bits[i, 0])
        if first != first:
            out[i] = 0
            continue
        for k in range(bits.shape[1]):
            out[i, k] = _narrow(bits[i, k]) * factors[i] - mean[k]


@njit(**_COMPILE)
def add_up(bits, factors, total):
    """Add bits (n, K) × factors (n,) to total (K,) float64, but for rows whose first number is NaN."""
    for i in range(bits.shape[0]):
        first = _narrow(bits[i, 0])
        if first != first:
            continue
        for k in range(bits.shape[1]):
            total[k] += _narrow(bits[i, k]) * factors[i]


@njit(**_COMPILE)
def walk_pairs(pairs, running, firsts):
    """Of each pair, rows 2i and 2i + 1, one goes to the first half: the one that keeps the running sum short.

    pairs (2p, K) float32; running (K,) float64 is where the walk starts, and then where it ended; firsts (p,) bool is
    written: whether the pair's first goes to the first half, and d = first − second is added, or subtracted.
    """
    dim = pairs.shape[1]
    for i in range(firsts.size):
        a, b = pairs[2 * i], pairs[2 * i + 1]
        dot = 0.0
        for k in range(dim):
            dot += running[k] * (a[k] - b[k])
        plus = dot <= 0.0
        firsts[i] = plus
        sign = 1.0 if plus else -1.0
        for k in range(dim):
            running[k] += sign * (a[k] - b[k])


@njit(**_COMPILE)
def signed_sum(pairs, running, firsts):
    """Add to running (K,) what the walk added, with the signs that it has found."""
    for i in range(firsts.size):
        sign = 1.0 if firsts[i] else -1.0
        for k in range(pairs.shape[1]):
            running[k] += sign * (pairs[2 * i, k] - pairs[2 * i + 1, k])


@njit(**_COMPILE)
def turn_pairs(pairs, running, firsts):
    """Turn every pair over, in turn, that makes the running sum shorter; returns how many did. Arguments as above.

    Turning a pair over takes 2·sign·d off the sum: ‖s − 2 sign d‖² = ‖s‖² − 4 (sign ⟨s, d⟩ − ‖d‖²).
    """
    dim, turned = pairs.shape[1], 0
    for i in range(firsts.size):
        a, b = pairs[2 * i], pairs[2 * i + 1]
        dot, square = 0.0, 0.0
        for k in range(dim):
            d = a[k] - b[k]
            dot += running[k] * d
            square += d * d
        sign = 1.0 if firsts[i] else -1.0
        if sign * dot > square:
            for k in range(dim):
                running[k] -= 2.0 * sign * (a[k] - b[k])
            firsts[i] = not firsts[i]
            turned += 1
    return turned
