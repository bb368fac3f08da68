"""Slow twins of the selection methods: plain loops that read like the definitions. Rows are float64."""

import math

import numpy as np


def halve(rows, order, k):
    """Pairs in the given order, a running error; the winner of a pair takes both weights."""
    total = rows.sum(axis=0)
    members = [(int(i), 1.0) for i in order]
    while len(members) > k:
        pairs = min(len(members) // 2, len(members) - k)
        winners = []
        rest = members[2 * pairs :]
        for p in range(pairs):
            (a, wa), (b, wb) = members[2 * p], members[2 * p + 1]
            others = winners + members[2 * p + 2 : 2 * pairs] + rest
            held = sum((w * rows[i] for i, w in others), np.zeros_like(total))
            with_a, with_b = (held + (wa + wb) * rows[i] - total for i in (a, b))
            first = with_a @ with_a <= with_b @ with_b + 1e-9
            winners.append((a if first else b, wa + wb))
        members = winners + rest
    return dict(members)


def greedy_facility(rows, k):
    """CRAIG: maximise Σ_i max_{j∈S} (c − ‖g_i − g_j‖), one by one; weights are cluster sizes."""
    distance = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    c = distance.max()

    def value(subset):
        return sum(max(c - distance[i, j] for j in subset) for i in range(len(rows)))

    chosen = []
    for _ in range(k):
        free = [j for j in range(len(rows)) if j not in chosen]
        chosen.append(max(free, key=lambda j: value([*chosen, j])))
    nearest = [i if i in chosen else min(chosen, key=lambda j: distance[i, j]) for i in range(len(rows))]
    return chosen, [nearest.count(j) for j in chosen]


def nonnegative_ridge(points, goal, penalty, steps=200_000):
    """min ‖pointsᵀ w − goal‖² + penalty ‖w‖² over w ≥ 0, by coordinate descent to the end."""
    w = np.zeros(len(points))
    residual = goal.copy()
    for _ in range(steps):
        change = 0.0
        for i, x in enumerate(points):
            new = max(0.0, (x @ residual + w[i] * (x @ x)) / (x @ x + penalty))
            residual -= (new - w[i]) * x
            change = max(change, abs(new - w[i]))
            w[i] = new
        if change < 1e-12:
            break
    return w


def matching_pursuit(rows, k, penalty):
    """One example per round: the largest ⟨g_i, r⟩, then all weights again; zero weights leave."""
    goal = rows.sum(axis=0)
    taken, w = [], np.empty(0)
    for _ in range(2 * k):
        residual = goal - w @ rows[taken] if taken else goal
        products = [(-np.inf if i in taken else rows[i] @ residual) for i in range(len(rows))]
        best = int(np.argmax(products))
        if len(taken) == k or products[best] <= 0:
            break
        taken.append(best)
        w = nonnegative_ridge(rows[taken], goal, penalty)
        taken, w = [i for i, own in zip(taken, w, strict=True) if own > 0], w[w > 0]
    return taken, w


def kt_split(gram, uniforms, delta=0.5):
    """KT-split: every level halves every set by adaptive coins. gram (n, n) kernel values."""
    n, m = len(gram), len(uniforms)
    sets = [list(range(n))]
    for j in range(m):
        coins = iter(uniforms[j])
        following = []
        for own in sets:
            left, right, sigma2 = [], [], 0.0
            for a, b in zip(own[::2], own[1::2], strict=True):
                b2 = gram[a, a] + gram[b, b] - 2 * gram[a, b]
                threshold = max(math.sqrt(b2 * sigma2 * 2 * math.log(2 * n * m / (delta * 2**j))), b2)
                if sigma2 == 0:
                    sigma2 = b2
                elif threshold > 0:
                    sigma2 += 2 * b2 * max(0, 0.5 + (b2 / (2 * threshold) - 1) * sigma2 / threshold)
                parent = left + right  # the parent's points so far
                alpha = sum(gram[c, a] - gram[c, b] for c in parent) - 2 * sum(gram[c, a] - gram[c, b] for c in left)
                if next(coins) <= 0.5 * (1 - alpha / (threshold or 1)):
                    a, b = b, a
                left.append(a)
                right.append(b)
            following += [left, right]
        sets = following
    return sets


def mmd2(gram, chosen):
    """Squared MMD of equal weights on `chosen` to equal weights on all."""
    return gram[np.ix_(chosen, chosen)].mean() - 2 * gram[chosen].mean() + gram.mean()


def kt_swap(gram, sets):
    """The best of the sets and of every so-many-th point, then each point exchanged for the best not chosen."""
    n, size = len(gram), len(sets[0])
    every = list(range(n - 1, -1, -(n // size)))[::-1]
    candidates = [every, sets[0]] if len(sets) == 2 else [every, *sets]
    own = list(min(candidates, key=lambda one: mmd2(gram, one)))
    for place in range(size):
        others = own[:place] + own[place + 1 :]
        free = [i for i in range(n) if i not in others]
        own[place] = min(free, key=lambda i: mmd2(gram, [*others, i]))
    return own


def error(rows, indices, weights):
    total = rows.sum(axis=0)
    return np.linalg.norm(weights @ rows[indices] - total) / np.linalg.norm(total)
