"""Published attacks on robust rules, and mixing, which goes before a rule where workers' data differ.

Attacks turn the good workers' (n − f, d) vectors into the one vector (d,) that all f bad workers send. Mixing brings
good vectors closer together. All take NumPy arrays or torch tensors, like the rules of `heeler.robust`.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import torch

from heeler.robust.aggregation_rules import Vectors, as_tensor, like, squared_distances


def alie(good: Vectors, n: int, f: int) -> Vectors:
    """(d,) "a little is enough" (Baruch et al. 2019): μ − zσ of every coordinate, as far as a majority may hide it.

    z = Φ⁻¹((n − f − s) / (n − f)) with s = ⌊n/2 + 1⌋ − f.
    """
    rows = as_tensor(good).double()
    supporters = math.floor(n / 2 + 1) - f
    z = NormalDist().inv_cdf((n - f - supporters) / (n - f))
    return like(rows.mean(dim=0) - z * rows.std(dim=0, correction=0), good)


def ipm(good: Vectors, epsilon: float = 0.1) -> Vectors:
    """(d,) inner-product manipulation (Xie et al. 2020): −ε times the good ones' mean."""
    return like(-epsilon * as_tensor(good).double().mean(dim=0), good)


def mimic(good: Vectors, worker: int) -> Vectors:
    """(d,) the vector of one good worker (Karimireddy et al. 2022), who then counts f times more."""
    return like(as_tensor(good)[worker].clone(), good)


def mimic_direction(good: Vectors, direction: Vectors, steps: int) -> Vectors:
    """(d,) the direction in which the good workers differ most, learnt step by step (Oja), to choose whom to mimic.

    z ← t/(1+t) z + 1/(1+t) Σ (x_i − μ)⟨x_i − μ, z⟩, of length 1, after t = `steps` steps. `mimic_worker` then chooses.
    """
    rows = as_tensor(good).double()
    away = rows - rows.mean(dim=0)
    z = as_tensor(direction[None])[0].to(rows)
    drawn = away.T @ (away @ z)
    z = steps / (1 + steps) * z + drawn / (1 + steps) / drawn.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return like(z / z.norm(), direction)


def mimic_worker(good: Vectors, direction: Vectors) -> int:
    """The good worker that is farthest out in a direction."""
    rows = as_tensor(good).double()
    return int(((rows - rows.mean(dim=0)) @ as_tensor(direction[None])[0].to(rows)).abs().argmax())


def bucketing(v: Vectors, s: int, seed: int) -> Vectors:
    """(⌈n/s⌉, d) means of s vectors each, drawn at random; the last of what is left (Karimireddy et al. 2022).

    f bad vectors spoil up to f buckets: use the rule that follows with the same f.
    """
    rows = as_tensor(v)
    mixed = torch.from_numpy(np.random.default_rng(seed).permutation(len(rows))).to(rows.device)
    return like(torch.stack([rows[group].double().mean(dim=0) for group in mixed.split(s)]), v)


def nearest_neighbor_mixing(v: Vectors, f: int) -> Vectors:
    """(n, d) every vector replaced by the mean of its n − f nearest, itself among them (Allouah et al. 2023).

    Needs n > 2f and at most f vectors with a NaN or an infinity, which stay in their places as NaNs.
    """
    rows = as_tensor(v).double()
    finite = torch.isfinite(rows).all(dim=1)
    distances = squared_distances(rows)
    distances[:, ~finite] = torch.inf
    distances[~finite] = torch.inf
    nearest = distances.argsort(dim=1, stable=True)[:, : len(rows) - f]
    result = torch.stack([rows[group].mean(dim=0) for group in nearest])
    result[~finite] = torch.nan
    return like(result, v)
