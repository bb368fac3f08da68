"""A sketch of a gradient: K numbers that keep inner products on average, in one pass over the gradient.

The gradient is cut into rows of C numbers. A row is multiplied by random signs, summed, and added to one of K cells, so
that E⟨sketch x, sketch y⟩ = ⟨x, y⟩: two coordinates in one cell have independent signs. A tile of K rows of signs
serves K tiles of rows, since each tile's cells are shifted by one against those of the tile before: equal signs never
meet in one cell. Where K ≥ d nothing is lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heeler.sketch.projection import random_signs

LONGEST_ROW = 4096
"""Signs then take 1 MiB with K = 256, for up to 2.7 · 10⁸ parameters."""

AT_ONCE = 1 << 18
"""Numbers multiplied by signs before they are summed: 1 MiB; four times as many or a quarter took longer."""


class GradientSketch:
    """The same on every rank that has the same number of parameters, K (`dim`) and seed."""

    def __init__(self, parameters: int, dim: int = 256, seed: int = 0) -> None:
        self.dim, self.seed = dim, seed
        self.row = min(LONGEST_ROW, max(1, -(-parameters // dim)))
        self._scratch: Tensor | None = None
        self._tiles: dict[tuple[int, torch.device], Tensor] = {}

    def add(self, cells: Tensor, part: Tensor, first_row: int) -> int:
        """Add a part (b,) of the gradient to the (K,) cells; returns the row with which the next part begins."""
        full = part.numel() // self.row
        body, rest = part[: full * self.row].view(full, self.row), part[full * self.row :]
        at = first_row
        while at < first_row + full:
            tile, within = divmod(at, self.dim)
            scratch = self._scratch_like(part)
            count = min(len(scratch), self.dim - within, first_row + full - at)
            signs, signed = self._signs(tile, part.device)[within : within + count], scratch[:count]
            torch.mul(body[at - first_row : at - first_row + count], signs, out=signed)
            start = (within + tile) % self.dim
            sums = signed.sum(dim=1, dtype=torch.float32)
            cells[start : start + count] += sums[: self.dim - start]
            cells[: max(0, start + count - self.dim)] += sums[self.dim - start :]
            at += count
        if rest.numel():
            tile, within = divmod(at, self.dim)
            signs = self._signs(tile, part.device)[within, : rest.numel()]
            cells[(within + tile) % self.dim] += (rest * signs).sum(dtype=torch.float32)
        return at + (rest.numel() > 0)

    def _scratch_like(self, part: Tensor) -> Tensor:
        """Rows that are multiplied before they are summed: all K on a GPU, on a CPU as many as its cache holds."""
        if self._scratch is None or self._scratch.dtype != part.dtype or self._scratch.device != part.device:
            rows = min(self.dim, max(1, AT_ONCE // self.row)) if part.device.type == "cpu" else self.dim
            self._scratch = torch.empty(rows, self.row, dtype=part.dtype, device=part.device)
        return self._scratch

    def _signs(self, tile: int, device: torch.device) -> Tensor:
        """(K, C) of ±1, in bytes; new ones after every K tiles, when all shifts have been used."""
        key = tile // self.dim, device
        if key not in self._tiles:
            drawn = random_signs(self.seed, f"robust/{key[0]}", self.dim, self.row) * math.sqrt(self.row)
            self._tiles[key] = drawn.round().to(torch.int8).to(device)
        return self._tiles[key]
