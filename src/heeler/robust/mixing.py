"""What goes before a rule where workers' data differ: (n, d) vectors are mixed so that good ones come closer together.

A vector with a NaN or an infinity stays in its own place as such, or spoils the one bucket it falls into; the rule that
follows leaves it out.
"""

from __future__ import annotations

import numpy as np
import torch

from heeler.robust.arrays import Vectors, as_tensor, check_f, finite_rows, like, squared_distances


def bucketing(v: Vectors, s: int, seed: int) -> Vectors:
    """(⌈n/s⌉, d) means of s vectors each, drawn at random; the last of what is left (Karimireddy et al. 2022).

    f bad vectors spoil up to f buckets: use the rule that follows with the same f.
    """
    rows = as_tensor(v)
    n = len(rows)
    if not 1 <= s <= n:
        raise ValueError(f"s is how many vectors share a bucket, 1 to n = {n}, not {s!r}")
    mixed = torch.from_numpy(np.random.default_rng(seed).permutation(n)).to(rows.device)
    return like(torch.stack([rows[group].double().mean(dim=0) for group in mixed.split(s)]), v)


def nearest_neighbor_mixing(v: Vectors, f: int) -> Vectors:
    """(n, d) every vector replaced by the mean of its n − f nearest, itself among them (Allouah et al. 2023).

    Needs n > 2f.
    """
    rows = as_tensor(v).double()
    n = len(rows)
    check_f("nearest-neighbor-mixing", n, f)
    finite = finite_rows(rows)
    if n - int(finite.sum()) > f:
        raise ValueError(f"{n - int(finite.sum())} of {n} vectors have a NaN or an infinity, and f is {f}")
    distances = squared_distances(rows)
    distances[:, ~finite] = torch.inf
    distances[~finite] = torch.inf
    nearest = distances.argsort(dim=1, stable=True)[:, : n - f]
    result = torch.stack([rows[group].mean(dim=0) for group in nearest])
    result[~finite] = torch.nan
    return like(result, v)
