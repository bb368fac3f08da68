"""Random projections drawn from names, and the two shapes of sketch that the rules write into.

A weight gradient is a sum of outer products, G = Σ_t r_t c_tᵀ, of a row side (rows of the weight) and a column side.
With random R (rows × k_rows) and C (cols × k_cols), E RRᵀ = I and E CCᵀ = I, the Kronecker sketch

    RᵀGC = Σ_t (Rᵀr_t)(Cᵀc_t)ᵀ                                              (k_rows × k_cols numbers)

keeps inner products in expectation: E⟨RᵀGC, RᵀHC⟩ = ⟨G, H⟩. Sketches of independent parameters are *added* into one
array: their cross terms have mean zero. In the exact mode R and C are identities, and parameters lie side by side.

R may be zero on most of a wide side (Li, Hastie & Church 2006, "Very sparse random projections"), in whole blocks of
columns, so that a GPU never reads the others; docs/overhead.md has what that costs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from heeler.sketch import fused
from heeler.sketch.fused import BLOCK_COLUMNS as BLOCK

if TYPE_CHECKING:
    from heeler.sketch.examples import Examples, Sums


WHOLE = 1024
"""Sides up to this are read whole."""
LEAST, FRACTION = 768, 4
"""Of wider ones a quarter is read, but no less than this."""


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

    read < n: zero but for so many rows (k < n then), those of `blocks_read`.
    """
    if read is not None and read < n:
        whole = projection(seed, name, n, k)
        factors = torch.zeros(n // BLOCK, 1, 1)
        picked, lengths = blocks_read(seed, name, n, read)
        factors[picked, 0, 0] = torch.from_numpy(np.sqrt(lengths).astype(np.float32))
        return (whole.view(-1, BLOCK, k) * factors).view(n, k)
    signs = random_signs(seed, name, n, 1).numpy()
    if k >= n:
        return torch.from_numpy(signs * np.eye(n, k, dtype=np.float32))
    width = 1 << (n - 1).bit_length()
    picked = np.argsort(_philox(seed, f"{name}/columns").random_raw(width), kind="stable")[:k]
    hadamard = 1.0 - 2.0 * _parity(np.arange(n)[:, None] & picked)  # H[i, j] = (−1)^popcount(i & j)
    return torch.from_numpy((signs * hadamard / math.sqrt(k)).astype(np.float32))


def blocks_read(seed: int, name: str, n: int, read: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(m,) which blocks of 64 columns are read, in order, and (m,) out of how many each was drawn.

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

    Up to WHOLE all of them. More than four times the other side looks like words or classes, whose gradients sit on a
    few columns, and those would be lost for good: all of them too.
    """
    if n <= WHOLE or n > 4 * other or n % BLOCK:
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
            torch._dynamo.mark_static_address(self.single)
            torch._dynamo.mark_static_address(self.half)

    def like(self, other: Tensor) -> Tensor:
        if other.dtype == torch.bfloat16:
            return self.half
        if other.dtype == torch.float32:
            return self.single
        return self.single.to(other.dtype)


class Projection(Constant):
    """(n, k), and for the fused kernels what of it is not zero: `packed` (m · 64, k), the rows of `blocks` (m,)."""

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
                torch._dynamo.mark_static_address(self.blocks)


@dataclass(frozen=True)
class MatrixSpec:
    """A weight as a rule sees it. `cols` counts the columns after the weight is flattened to (rows, cols)."""

    weight: str
    bias: str | None
    rows: int
    cols: int
    grad_is_rows: bool = True
    """Linear: the output's gradient meets the rows. Embedding and transformers' Conv1D: it meets the columns."""
    groups: int = 1
    """A grouped convolution: the rows fall into this many groups, each with columns of its own."""
    hidden: bool = False
    """A linear layer between hidden states, of whose wide sides a part is read. `survey` takes it back for others."""

    def read(self) -> dict[str, int]:
        """How many rows and columns are read, where the fused kernels fit."""
        if not self.hidden:
            return {"rows": self.rows, "cols": self.cols}
        return {"rows": columns_read(self.rows, self.cols), "cols": columns_read(self.cols, self.rows)}


class Matrix:
    """Kronecker sketch of one weight, its bias included as one more input column of ones."""

    exact = False

    def __init__(self, spec: MatrixSpec, dim: int, seed: int, weight_key: str | None, bias_key: str | None) -> None:
        self.spec = spec
        self.dim = dim
        k_rows, k_cols = split_for(dim, spec.rows, spec.cols)
        key = weight_key if weight_key is not None else f"{bias_key}/alone"
        grad_side, input_side = ("rows", "cols") if spec.grad_is_rows else ("cols", "rows")
        sizes = {"rows": (spec.rows, k_rows), "cols": (spec.cols, k_cols)}
        self.k_grad, self.k_input = sizes[grad_side][1], sizes[input_side][1]
        self.has_weight = weight_key is not None

        def drawn(side: str) -> tuple[Tensor, NDArray[np.int64] | None]:
            n, k = sizes[side]
            read = spec.read()[side]
            if read == n or k not in fused.WIDTHS:  # what no kernel takes is read whole anyway
                return projection(seed, f"{key}/{side}", n, k), None
            return projection(seed, f"{key}/{side}", n, k, read), blocks_read(seed, f"{key}/{side}", n, read)[0]

        self.of_grad = Projection(*drawn(grad_side))
        columns, blocks = drawn(input_side)
        self.of_input = Projection(columns if self.has_weight else torch.zeros_like(columns), blocks)
        self.of_ones = None
        if bias_key is not None:
            self.of_ones = Constant(random_signs(seed, f"{bias_key}/ones", 1, self.k_input)[0])

    def move(self, device: torch.device) -> None:
        for constant in (self.of_grad, self.of_input, self.of_ones):
            if constant is not None:
                constant.move(device)

    def input_filter(self, like: Tensor) -> Tensor:
        """(n_input, k): what an input is multiplied with."""
        return self.of_input.like(like)

    def input_offset(self, like: Tensor) -> Tensor | None:
        """(k,): the bias's random vector, which a column of ones would meet."""
        return None if self.of_ones is None else self.of_ones.like(like)

    def input(self, a: Tensor) -> Tensor:
        """(B, T, n_input) → (B, T, k), or (B, n_input) → (B, k)."""
        if a.ndim == 3 and a.is_cuda:
            a = _as_autocast(a)
            columns = self.of_input.packed(a)
            if fused.suits(a, columns):
                return fused.project(a, columns, self.input_offset(a), self.of_input.blocks)
        if self.of_ones is None:
            return a @ self.of_input.like(a)
        offset = self.of_ones.like(a)
        if a.ndim == 2:
            return torch.addmm(offset, a, self.of_input.like(a))
        # One fused call on a flat input: with three dimensions and a bias F.linear takes twice as long on a CPU.
        flat = torch.addmm(offset, a.reshape(-1, a.shape[-1]), self.of_input.like(a))
        return flat.view(a.shape[0], a.shape[1], -1)

    def grad(self, g: Tensor) -> Tensor:
        """(B, T, n_grad) → (B, T, k); with groups (B, T, G, n_grad / G) → (B, T·G, k)."""
        signs = self.of_grad.like(g)
        if self.spec.groups > 1:
            mixed = torch.einsum("btgo,gok->btgk", g, signs.view(self.spec.groups, -1, self.k_grad))
            return mixed.flatten(1, 2)
        return g @ signs

    def sketch(self, examples: Examples, g: Tensor, xp: Tensor) -> Tensor | None:
        """`contract(grad(g), xp)`; None where it was added to the pass in place."""
        if g.ndim == 3 and g.is_cuda:
            signs = self.of_grad.packed(g)
            if fused.suits(g, signs) and xp.shape[2] in fused.WIDTHS:
                return self._fused_sketch(examples.sums, g, signs, xp)
        return self.deliver(examples, self.grad(g), xp)

    def _fused_sketch(self, sums: Sums | None, g: Tensor, signs: Tensor, xp: Tensor) -> Tensor | None:
        first, blocks = self.spec.grad_is_rows, self.of_grad.blocks
        size = signs.shape[1] * xp.shape[2]
        if size == self.dim and sums is not None:
            if sums.parts is None:
                sums.parts = fused.contract(g, signs, xp, first, blocks)
                return None
            if sums.parts.shape == fused.parts_shape(g.shape[0], g.shape[1], size):
                fused.contract_into(sums.parts, g, signs, xp, first, blocks)
                return None
        outer = fused.contract(g, signs, xp, first, blocks).sum(1)
        return outer if size == self.dim else place(outer, 0, self.dim)

    def deliver(self, examples: Examples, gp: Tensor, xp: Tensor) -> Tensor | None:
        """`contract(gp, xp)`; None where it was added to the pass in place."""
        sums = examples.sums
        if sums is None or gp.dtype != torch.float32 or xp.dtype != torch.float32:
            return self.contract(gp, xp)
        if sums.total is None and gp.ndim == 2 and self.k_grad * self.k_input == self.dim:
            gp = gp * sums.factor  # the first part, and often the only one: what is written is the sum
            left, right = (gp, xp) if self.spec.grad_is_rows else (xp, gp)
            sums.total = (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)
            return None
        left, right = (gp, xp) if self.spec.grad_is_rows else (xp, gp)
        add_outer(sums.room(), 0, left, right, sums.factor)
        return None

    def contract(self, gp: Tensor, xp: Tensor) -> Tensor:
        """Σ_t over both sides: (B, T, k_grad), (B, T, k_input) → (B, K) float32, laid out rows × columns."""
        if xp.dtype != gp.dtype:
            xp = xp.to(gp.dtype)
        left, right = (gp, xp) if self.spec.grad_is_rows else (xp, gp)
        if gp.ndim == 2:  # one token: an outer product, which needs no GEMM
            outer = (left.unsqueeze(2) * right.unsqueeze(1)).flatten(1)
        else:
            outer = torch.bmm(left.transpose(1, 2), right).flatten(1)
        outer = outer.float()
        return outer if outer.shape[1] == self.dim else place(outer, 0, self.dim)


class ExactMatrix:
    """The same interface with identity projections: every coordinate of weight and bias at its own place."""

    exact = True

    def __init__(self, spec: MatrixSpec, dim: int, weight_at: int | None, bias_at: int | None) -> None:
        self.spec, self.dim, self.weight_at, self.bias_at = spec, dim, weight_at, bias_at
        self.has_weight = weight_at is not None
        n_input = spec.cols if spec.grad_is_rows else spec.rows
        self._eye = Constant(torch.eye(n_input))

    def move(self, device: torch.device) -> None:
        self._eye.move(device)

    def input_filter(self, like: Tensor) -> Tensor:
        return self._eye.like(like)

    def input_offset(self, like: Tensor) -> Tensor | None:
        return None

    def input(self, a: Tensor) -> Tensor:
        return a

    def grad(self, g: Tensor) -> Tensor:
        return g.flatten(1, 2) if self.spec.groups > 1 else g

    def sketch(self, examples: Examples, g: Tensor, xp: Tensor) -> Tensor | None:
        return self.deliver(examples, self.grad(g), xp)

    def deliver(self, examples: Examples, gp: Tensor, xp: Tensor) -> Tensor | None:
        sums = examples.sums
        if sums is None or self.spec.groups > 1 or gp.dtype != torch.float32 or xp.dtype != torch.float32:
            return self.contract(gp, xp)
        left, right = (gp, xp) if self.spec.grad_is_rows else (xp, gp)
        if self.weight_at is not None:
            add_outer(sums.room(), self.weight_at, left, right, sums.factor)
        if self.bias_at is not None:
            bias = gp if gp.ndim == 2 else gp.sum(1)
            sums.room().narrow(1, self.bias_at, bias.shape[1]).add_(bias, alpha=sums.factor)
        return None

    def contract(self, gp: Tensor, xp: Tensor) -> Tensor:
        groups = self.spec.groups
        gp, xp = gp.float(), xp.float()
        left, right = (gp, xp) if self.spec.grad_is_rows else (xp, gp)
        if groups > 1:
            left, right = left.unflatten(1, (-1, groups)), right.unflatten(1, (-1, groups))
            outer = torch.einsum("btgo,btgi->bgoi", left, right)
            bias = gp.unflatten(1, (-1, groups)).sum(1)
        elif gp.ndim == 2:  # one token: an outer product, which needs no GEMM
            outer, bias = left.unsqueeze(2) * right.unsqueeze(1), gp
        else:
            outer, bias = torch.bmm(left.transpose(1, 2), right), gp.sum(1)
        return self._at_their_places(outer.flatten(1), bias.flatten(1))

    def _at_their_places(self, weight: Tensor, bias: Tensor) -> Tensor:
        """(B, K) from a weight's and a bias's part; side by side, as a layer has them, in one piece."""
        parts = [(at, part) for at, part in ((self.weight_at, weight), (self.bias_at, bias)) if at is not None]
        if len(parts) == 2 and self.bias_at == parts[0][0] + weight.shape[1]:
            parts = [(parts[0][0], torch.cat([weight, bias], 1))]
        placed = [part if part.shape[1] == self.dim else place(part, at, self.dim) for at, part in parts]
        if not placed:  # a frozen one among a layer's matrices
            return bias.new_zeros(bias.shape[0], self.dim)
        return placed[0] if len(placed) == 1 else placed[0] + placed[1]


class Vector:
    """Sketch of a parameter that acts elementwise (a norm's gain): a dense sign projection n → K."""

    exact = False

    def __init__(self, size: int, dim: int, seed: int, key: str) -> None:
        self.projection = Constant(random_signs(seed, f"{key}/vector", size, dim))

    def move(self, device: torch.device) -> None:
        self.projection.move(device)

    def write(self, v: Tensor) -> Tensor:
        """(B, n) per-example gradient → (B, K)."""
        return (v @ self.projection.like(v)).float()


class ExactVector:
    exact = True

    def __init__(self, dim: int, at: int) -> None:
        self.dim, self.at = dim, at

    def move(self, device: torch.device) -> None:
        pass

    def write(self, v: Tensor) -> Tensor:
        return place(v.float(), self.at, self.dim)


def _as_autocast(a: Tensor) -> Tensor:
    """Traced under autocast: the input as the layer itself will cast it, so that the compiler makes one copy."""
    if torch.compiler.is_compiling() and a.dtype == torch.float32 and torch.is_autocast_enabled("cuda"):
        return a.to(torch.get_autocast_dtype("cuda"))
    return a


def add_outer(total: Tensor, at: int, left: Tensor, right: Tensor, factor: int) -> None:
    """total (B, K) += factor · Σ_t left_t right_tᵀ, flattened, from column `at` on. left is (B, T, r) or (B, r)."""
    rows, cols = left.shape[-1], right.shape[-1]
    if rows * cols != total.shape[1]:
        total = total.narrow(1, at, rows * cols)
    into = total.view(-1, rows, cols)
    if left.ndim == 2:  # one token: an outer product, for which a GEMM takes ten times as long
        into.addcmul_(left.unsqueeze(2), right.unsqueeze(1), value=factor)
    else:
        into.baddbmm_(left.transpose(1, 2), right, alpha=factor)


def place(v: Tensor, at: int, dim: int) -> Tensor:
    """(B, n) → (B, dim), zero outside [at, at + n)."""
    return F.pad(v, (at, dim - at - v.shape[1]))


AnyMatrix = Matrix | ExactMatrix
AnyVector = Vector | ExactVector
