"""Random projections drawn from names: E RRᵀ = I for a side of a weight, so that inner products are kept on average.

R may be zero on most of a wide side (Li, Hastie & Church 2006, "Very sparse random projections"), in whole blocks of
columns, so that a GPU never reads the others; docs/overhead.md has what that costs.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.sketch.fused import BLOCK_COLUMNS as BLOCK
from heeler.torch_private import mark_static

VERSION = 1
"""Raised whenever the same seed and names come to draw other projections: sketches saved before do not fit those after.
"""
FULL = 1024
"""Sides up to this are read in full."""
LEAST, FRACTION = 768, 4
"""Of wider ones a quarter is read, but no less than 768 columns."""


def random_signs(seed: int, name: str, rows: int, cols: int) -> Tensor:
    """A (rows, cols) matrix of independent ±1/√cols on the CPU, a function of (seed, name) alone.

    The bits are Philox's raw stream, which numpy promises never to change, so every process, device and version that
    knows the seed and the parameter's name has the same projection.
    """
    words = _philox(seed, name).random_raw(-(-rows * cols // 64))
    bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")[: rows * cols]
    signs = bits.astype(np.float32).reshape(rows, cols) * 2.0 - 1.0
    return torch.from_numpy(signs / math.sqrt(cols))


def projection(seed: int, name: str, n: int, k: int, read: int | None = None) -> Tensor:
    """(n, k) with E RRᵀ = I: k random columns of a Hadamard matrix with random row signs, entries ±1/√k.

    Its columns are (nearly) orthogonal, so that it loses less than independent signs where k is not far below n; where
    k ≥ n it loses nothing: then it is the identity with random signs (which keep other parameters' cross terms at
    mean zero).

    read < n: all but this many rows are zero (k < n then); `blocks_read` says which are not.
    """
    if read is not None and read < n:
        full = projection(seed, name, n, k)
        factors = torch.zeros(n // BLOCK, 1, 1)
        picked, lengths = blocks_read(seed, name, n, read)
        factors[picked, 0, 0] = torch.from_numpy(np.sqrt(lengths).astype(np.float32))
        return (full.view(-1, BLOCK, k) * factors).view(n, k)
    signs = random_signs(seed, name, n, 1).numpy()
    if k >= n:
        return torch.from_numpy(signs * np.eye(n, k, dtype=np.float32))
    width = 1 << (n - 1).bit_length()
    picked = np.argsort(_philox(seed, f"{name}/columns").random_raw(width), kind="stable")[:k]
    hadamard = 1.0 - 2.0 * _parity(np.arange(n)[:, None] & picked)  # H[i, j] = (−1)^popcount(i & j)
    return torch.from_numpy((signs * hadamard / math.sqrt(k)).astype(np.float32))


def blocks_read(seed: int, name: str, n: int, read: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(m,) which blocks of 64 columns are read, in order, and (m,) from how many each was drawn.

    The blocks are cut into m runs, as equal as can be, and one of each is drawn, to stand for its run with a factor of
    √length. So every part of a side has its share: queries, keys and values of a layer that makes all three.
    """
    count, kept = n // BLOCK, read // BLOCK
    edges = np.arange(kept + 1) * count // kept
    lengths = np.diff(edges)
    drawn = _philox(seed, f"{name}/blocks").random_raw(kept) % lengths.astype(np.uint64)
    return edges[:-1] + drawn.astype(np.int64), lengths


def columns_read(n: int, other: int) -> int:
    """How many of the n columns of a hidden layer's side are read; `other`: the columns of its other side.

    Up to FULL all of them. More than four times the other side looks like words or classes, whose gradients sit on a
    few columns, which would be lost for good: all of them too.
    """
    if n <= FULL or n > 4 * other or n % BLOCK:
        return n
    return max(LEAST, -(-n // (FRACTION * BLOCK)) * BLOCK)


def _parity(x: NDArray[np.int64]) -> NDArray[np.float32]:
    """Whether the number of set bits is odd, as 0.0 or 1.0."""
    for shift in (32, 16, 8, 4, 2, 1):
        x = x ^ (x >> shift)
    return (x & 1).astype(np.float32)


def _philox(seed: int, name: str) -> np.random.Philox:
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    return np.random.Philox(key=key)


def split_dim(dim: int) -> tuple[int, int]:
    """k_rows · k_cols = dim, as near to a square as dim allows: 256 → 16 × 16, 512 → 16 × 32."""
    k_rows = next(k for k in range(math.isqrt(dim), 0, -1) if dim % k == 0)
    return k_rows, dim // k_rows


def split_for(dim: int, rows: int, cols: int) -> tuple[int, int]:
    """k_rows · k_cols ≤ dim with the least loss for a (rows, cols) weight: 16 × 16 of 256, 10 × 25 if rows = 10.

    A side of n projected to k adds about (1/k)(1 − k/n) to the relative variance of an inner product.
    """

    def loss(k_rows: int) -> tuple[float, int]:
        k_cols = min(cols, dim // k_rows)
        return (1 / k_rows - 1 / rows) + (1 / k_cols - 1 / cols), abs(k_rows - k_cols)

    k_rows = min(range(1, min(rows, dim) + 1), key=loss)
    return k_rows, min(cols, dim // k_rows)


class Constant:
    """A fixed matrix in float32 and in bfloat16, both made once: a cast in every step is a kernel in every step."""

    def __init__(self, value: Tensor) -> None:
        self.single = value
        self.half = value.to(torch.bfloat16)

    def move(self, device: torch.device) -> None:
        self.single, self.half = self.single.to(device), self.half.to(device)
        if device.type == "cuda":  # else CUDA graphs copy them in every step
            mark_static(self.single)
            mark_static(self.half)

    def like(self, other: Tensor) -> Tensor:
        if other.dtype == torch.bfloat16:
            return self.half
        if other.dtype == torch.float32:
            return self.single
        return self.single.to(other.dtype)


class Projection(Constant):
    """(n, k), and for the fused kernels the part that is not zero: `packed` (m · 64, k), the rows of `blocks` (m,)."""

    def __init__(self, value: Tensor, blocks: NDArray[np.int64] | None = None) -> None:
        super().__init__(value)
        self.blocks: Tensor | None = None
        """None: nothing is zero."""
        if blocks is not None:
            self.blocks = torch.from_numpy(blocks).to(torch.int32)
            self._packed = Constant(value.unflatten(0, (-1, BLOCK))[blocks].flatten(0, 1))

    def packed(self, other: Tensor) -> Tensor:
        return self.like(other) if self.blocks is None else self._packed.like(other)

    def move(self, device: torch.device) -> None:
        super().move(device)
        if self.blocks is not None:
            self._packed.move(device)
            self.blocks = self.blocks.to(device)
            if device.type == "cuda":
                mark_static(self.blocks)
