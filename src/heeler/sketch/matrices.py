"""Sketches of a layer's weights: projected on both sides, or exact.

A weight gradient is a sum of outer products, G = Σ_t r_t c_tᵀ, of a row side (rows of the weight) and a column side.
With random R (rows × k_rows) and C (cols × k_cols), E RRᵀ = I and E CCᵀ = I, the Kronecker sketch

    RᵀGC = Σ_t (Rᵀr_t)(Cᵀc_t)ᵀ                                              (k_rows × k_cols numbers)

keeps inner products in expectation: E⟨RᵀGC, RᵀHC⟩ = ⟨G, H⟩. Sketches of independent parameters are *added* into one
array: their cross terms have mean zero. In the exact mode R and C are identities, and parameters lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from heeler.sketch import fused
from heeler.sketch.examples import Examples, Sums
from heeler.sketch.projection import (
    Constant,
    Projection,
    blocks_read,
    columns_read,
    projection,
    random_signs,
    split_for,
)


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
    """A linear layer between hidden states, of whose wide sides only a part is read. `survey` clears it for others."""

    def read(self) -> dict[str, int]:
        """How many rows and columns are read, where the fused kernels fit."""
        if not self.hidden:
            return {"rows": self.rows, "cols": self.cols}
        return {"rows": columns_read(self.rows, self.cols), "cols": columns_read(self.cols, self.rows)}


class Matrix:
    """Kronecker sketch of one weight, its bias included as one more input column of ones."""

    def __init__(self, spec: MatrixSpec, dim: int, seed: int, weight_key: str | None, bias_key: str | None) -> None:
        self.spec = spec
        self.dim = dim
        k_rows, k_cols = split_for(dim, spec.rows, spec.cols)
        key = weight_key if weight_key is not None else f"{bias_key}/alone"
        grad_side, input_side = ("rows", "cols") if spec.grad_is_rows else ("cols", "rows")
        sizes = {"rows": (spec.rows, k_rows), "cols": (spec.cols, k_cols)}
        self.k_grad, self.k_input = sizes[grad_side][1], sizes[input_side][1]

        def drawn(side: str) -> tuple[Tensor, NDArray[np.int64] | None]:
            n, k = sizes[side]
            read = spec.read()[side]
            if read == n or k not in fused.WIDTHS:  # what no kernel takes is read in full anyway
                return projection(seed, f"{key}/{side}", n, k), None
            return projection(seed, f"{key}/{side}", n, k, read), blocks_read(seed, f"{key}/{side}", n, read)[0]

        self.of_grad = Projection(*drawn(grad_side))
        columns, blocks = drawn(input_side)
        self.of_input = Projection(columns if weight_key is not None else torch.zeros_like(columns), blocks)
        self.of_ones = None
        if bias_key is not None:
            self.of_ones = Constant(random_signs(seed, f"{bias_key}/ones", 1, self.k_input)[0])

    def move(self, device: torch.device) -> None:
        for constant in (self.of_grad, self.of_input, self.of_ones):
            if constant is not None:
                constant.move(device)

    def input_filter(self, like: Tensor) -> Tensor:
        """(n_input, k): what an input is multiplied by."""
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
                sums.begin_parts(fused.contract(g, signs, xp, first, blocks))
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
        first = sums.total is None and gp.ndim == 2 and self.k_grad * self.k_input == self.dim
        if first:  # and often the only one: what is written is the sum
            gp = gp * sums.factor
        left, right = (gp, xp) if self.spec.grad_is_rows else (xp, gp)
        if first:
            sums.begin((left.unsqueeze(2) * right.unsqueeze(1)).flatten(1))
        else:
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

    def of_weight(self, gradient: Tensor) -> Tensor:
        """The sketch (K,) of a gradient of the weight, of any shape."""
        left, right = (self.of_grad, self.of_input) if self.spec.grad_is_rows else (self.of_input, self.of_grad)
        full = gradient.reshape(self.spec.rows, self.spec.cols).float()
        return place((left.like(full).t() @ full @ right.like(full)).flatten(), 0, self.dim)

    def of_bias(self, gradient: Tensor) -> Tensor:
        """The sketch (K,) of a gradient of the bias."""
        assert self.of_ones is not None
        g = gradient.flatten().float()
        pair = (g @ self.of_grad.like(g), self.of_ones.like(g))
        return place(torch.outer(*(pair if self.spec.grad_is_rows else pair[::-1])).flatten(), 0, self.dim)


class ExactMatrix:
    """The same interface with identity projections: every coordinate of weight and bias at its own place."""

    def __init__(self, spec: MatrixSpec, dim: int, weight_at: int | None, bias_at: int | None) -> None:
        self.spec, self.dim, self.weight_at, self.bias_at = spec, dim, weight_at, bias_at
        n_input = spec.cols if spec.grad_is_rows else spec.rows
        self._eye = Constant(torch.eye(n_input))

    def move(self, device: torch.device) -> None:
        self._eye.move(device)

    def input_filter(self, like: Tensor) -> Tensor:
        return self._eye.like(like)

    def input_offset(self, like: Tensor) -> None: ...

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

    def of_weight(self, gradient: Tensor) -> Tensor:
        assert self.weight_at is not None
        return place(gradient.flatten().float(), self.weight_at, self.dim)

    def of_bias(self, gradient: Tensor) -> Tensor:
        assert self.bias_at is not None
        return place(gradient.flatten().float(), self.bias_at, self.dim)


class Vector:
    """Sketch of a parameter that acts elementwise (a norm's gain): a dense sign projection n → K."""

    def __init__(self, size: int, dim: int, seed: int, key: str) -> None:
        self.projection = Constant(random_signs(seed, f"{key}/vector", size, dim))

    def move(self, device: torch.device) -> None:
        self.projection.move(device)

    def write(self, v: Tensor) -> Tensor:
        """(B, n) per-example gradient → (B, K)."""
        return (v @ self.projection.like(v)).float()


class ExactVector:
    """The same interface: every coordinate at its own place."""

    def __init__(self, dim: int, at: int) -> None:
        self.dim, self.at = dim, at

    def move(self, device: torch.device) -> None: ...

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
    """(..., n) → (..., dim), zero outside [at, at + n)."""
    return F.pad(v, (at, dim - at - v.shape[-1]))


AnyMatrix = Matrix | ExactMatrix
AnyVector = Vector | ExactVector
