# mypy: allow-untyped-defs, allow-incomplete-defs, no-check-untyped-defs
"""The compiled loops of the online rules: one call per batch of vectors as they come.

Vectors are (b, K) float32 or float64; `worker` (b,) says whose each one is.
"""

import math

from numba import njit

from heeler.herding.jit import _COMPILE

DETERMINISTIC, WALK, KERNEL_HALVING = 0, 1, 2


@njit(**_COMPILE)
def observe_tree(vectors, worker, means, totals, running, depth, leaves):
    """Recursive balance: each vector goes down a tree of running sums; leaves (b,) gets the leaf it falls into.

    c = g − last epoch's mean; ⟨s, c⟩ ≤ 0 to the left, else to the right. running (n, 2^(depth+1) − 1, K), node v's
    children at 2v + 1 and 2v + 2. Leaf numbers count from the left, twice as many as the lowest nodes: every node
    splits, the lowest too. means and totals (n, K): totals gather the uncentred vectors for the next mean, as centred
    ones would make it alternate between the mean and zero.
    """
    for i in range(leaves.size):
        j = worker[i]
        mean, g = means[j], vectors[i]
        node, leaf = 0, 0
        for _ in range(depth + 1):
            s = running[j, node]
            dot = 0.0
            for k in range(g.size):
                dot += s[k] * (g[k] - mean[k])
            sign = 1.0 if dot <= 0.0 else -1.0
            for k in range(g.size):
                s[k] += sign * (g[k] - mean[k])
            side = 0 if dot <= 0.0 else 1
            node = 2 * node + 1 + side
            leaf = 2 * leaf + side
        leaves[i] = leaf
        for k in range(g.size):
            totals[j, k] += g[k]


@njit(**_COMPILE)
def observe_pairs(
    vectors, rows, worker, group, running, waiting, waiting_row, places, left, right, rule, uniforms, knobs
):
    """Balance each worker's vectors in pairs as they come; a worker's unpaired vector waits, copied, for its partner.

    group (n,) names the running sum, a row of running (g, K), that a worker shares; waiting (n, K) and waiting_row
    (n,), -1 for none. uniforms: one number in [0, 1) for each pair completed here (unused by the deterministic rule).
    A worker's places are its own stretch of a flat array: the front list grows from its left end (`left`), the back
    list from its right end (`right`). knobs (3,): walk: c or 0 for the largest ‖D‖² so far, that largest; kernel
    halving: σ², pairs so far, the constant (4/δ)·k(1 + ln T)·(1 + ln pairs).
    """
    pair = 0
    for i in range(rows.size):
        j = worker[i]
        b = vectors[i]
        a = waiting[j]
        if waiting_row[j] < 0:
            a[:] = b
            waiting_row[j] = rows[i]
            continue
        s = running[group[j]]
        dot, square = 0.0, 0.0
        for k in range(b.size):
            d = a[k] - b[k]
            dot += s[k] * d
            square += d * d
        if rule == DETERMINISTIC:
            plus = dot <= 0.0
        elif rule == WALK:
            knobs[1] = max(knobs[1], square)
            c = knobs[0] if knobs[0] > 0.0 else knobs[1]
            plus = uniforms[pair] < (0.5 - dot / (2.0 * c) if c > 0.0 else 0.5)
        else:
            knobs[1] += 1.0
            plus = True
            if square > 0.0:
                length = math.log(knobs[2] * knobs[1])
                q = knobs[0] * length / square
                if q <= 1.0:
                    threshold = square
                    knobs[0] = 2.0 * square
                else:
                    threshold = math.sqrt(q) * square
                    knobs[0] += 2.0 * square * max(0.0, length + 0.5 - math.sqrt(q)) / length
                plus = dot <= (2.0 * uniforms[pair] - 1.0) * threshold
        sign = 1.0 if plus else -1.0
        for k in range(b.size):
            s[k] += sign * (a[k] - b[k])
        places[left[j]] = waiting_row[j] if plus else rows[i]
        places[right[j]] = rows[i] if plus else waiting_row[j]
        left[j] += 1
        right[j] -= 1
        waiting_row[j] = -1
        pair += 1
