"""What bad workers may send, for tests and experiments: from the good workers' (n − f, d) vectors to one vector (d,)
that all f send, or from a worker's own vector (d,) to what it sends in its place.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import torch

from heeler.robust.arrays import Vectors, as_tensor, like


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
    """(d,) the vector of one good worker (Karimireddy et al. 2022): nothing to see, but that worker counts f times
    more."""
    return like(as_tensor(good)[worker].clone(), good)


def mimic_direction(good: Vectors, direction: Vectors, steps: int) -> Vectors:
    """(d,) in which direction the good workers differ most, learnt step by step (Oja): whom to mimic.

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


def sign_flip(own: Vectors) -> Vectors:
    """(d,) the worker's own vector, negated."""
    return -own


def noise(own: Vectors, scale: float, seed: int) -> Vectors:
    """(d,) normal noise of so large a standard deviation, in place of the worker's own vector."""
    drawn = torch.randn(own.shape[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return like(scale * drawn, own) if not isinstance(own, torch.Tensor) else (scale * drawn).to(own)


def nan(own: Vectors) -> Vectors:
    """(d,) NaN in every place."""
    return own * math.nan
