"""Vectors whose arithmetic is exact in any order of summation, so that kernels and references must decide alike."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import strategies as st

DTYPES = (np.float16, np.float32, np.float64)


@st.composite
def vectors(draw: st.DrawFn, rows: int | None = None, dim: int | None = None) -> Any:
    """(N, K) small integers: ties, zeros, duplicates and constant columns are common, and every sum is exact."""
    rows = rows or draw(st.integers(1, 40))
    dim = dim or draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0, 1, 3]))
    out = rng.integers(-spread, spread + 1, (rows, dim)) + draw(st.sampled_from([0, 2]))
    if draw(st.booleans()):
        out = out[rng.integers(0, rows, rows)]
    return out.astype(draw(st.sampled_from(DTYPES)))


@st.composite
def shards(draw: st.DrawFn, most: int = 5) -> Any:
    """Sizes of 1..most workers, some odd, some of one, some empty, never all empty."""
    sizes = draw(st.lists(st.integers(0, 12), min_size=1, max_size=most))
    return sizes if sum(sizes) else [*sizes[1:], 3]


def centred(table: Any) -> Any:
    """With every vector its opposite, so that the mean is zero and centring exact."""
    return np.concatenate([table, -table])


def flat_order(sizes: list[int], seed: int) -> Any:
    """A random order of shards side by side."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    return np.concatenate([a + rng.permutation(b - a) for a, b in pairwise(offsets)]).astype(np.int64)


def split(flat: Any, sizes: list[int]) -> list[Any]:
    """A flat order as one array a shard."""
    return np.split(flat, np.cumsum(sizes)[:-1])
