"""The rules as the papers write them, in plain loops over lists of NumPy vectors."""

from __future__ import annotations

import itertools
import math

import numpy as np


def krum_order(v, f):
    """Workers by their Krum score, best first."""
    n = len(v)
    scores = []
    for i in range(n):
        others = sorted(float(np.sum((v[i] - v[j]) ** 2)) for j in range(n) if j != i)
        scores.append(math.fsum(others[: n - f - 2]))
    return sorted(range(n), key=lambda i: scores[i])


def krum(v, f):
    return v[krum_order(v, f)[0]]


def multi_krum(v, f, m=None):
    best = krum_order(v, f)[: len(v) - f if m is None else m]
    return sum(v[i] for i in best) / len(best)


def median(v):
    result = []
    for column in np.transpose(v):
        ordered, n = sorted(column), len(column)
        result.append((ordered[(n - 1) // 2] + ordered[n // 2]) / 2)
    return np.array(result)


def trimmed_mean(v, f):
    return np.array([np.mean(sorted(column)[f : len(column) - f]) for column in np.transpose(v)])


def geometric_median(v, nu=1e-6, iterations=32):
    z = sum(v) / len(v)
    for _ in range(iterations):
        w = [1 / max(nu, math.sqrt(np.sum((z - x) ** 2))) for x in v]
        z = sum(a * x for a, x in zip(w, v, strict=True)) / sum(w)
    return z


def centered_clipping(v, center, tau, iterations=1):
    c = center
    for _ in range(iterations):
        steps = []
        for x in v:
            length = math.sqrt(np.sum((x - c) ** 2))
            steps.append((x - c) * (min(1, tau / length) if length else 1))
        c = c + sum(steps) / len(v)
    return c


def nearest_neighbor_mixing(v, f):
    result = []
    for x in v:
        nearest = sorted(range(len(v)), key=lambda j: float(np.sum((x - v[j]) ** 2)))[: len(v) - f]
        result.append(sum(v[j] for j in nearest) / len(nearest))
    return np.array(result)


def diameter(v):
    """The largest distance between two vectors."""
    return max((float(np.linalg.norm(a - b)) for a, b in itertools.combinations(v, 2)), default=0.0)
