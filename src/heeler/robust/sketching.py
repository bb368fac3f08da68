"""A sketch of a gradient: K numbers that keep inner products on average, in one pass over the gradient.

The gradient is cut into rows of C numbers. A row is multiplied by random signs, summed, and added to one of K cells, so
that E⟨sketch x, sketch y⟩ = ⟨x, y⟩: of two coordinates in one cell the signs are independent. A tile of K rows of signs
is enough for K tiles of rows, since a tile's cells are shifted by one against those of the tile before: equal signs
never meet in one cell. Where K ≥ d nothing is lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heeler.sketch.projection import random_signs

LONGEST_ROW = 4096
"""Signs then take 1 MiB with K = 256, for up to 2.7 · 10⁸ parameters."""


class GradientSketch:
    """The same on every rank that has the same seed, number of parameters and K.

    Args:
        parameters: how many numbers a gradient has.
        dim: K.
        seed: of the signs.
    """

    def __init__(self, parameters: int, dim: int = 256, seed: int = 0) -> None:
        self.dim, self.seed = dim, seed
        self.row = min(LONGEST_ROW, max(1, -(-parameters // dim)))
        self._tiles: dict[tuple[int, torch.device], Tensor] = {}

    def add(self, cells: Tensor, part: Tensor, first_row: int) -> int:
        """Add a part of the gradient, (b,) numbers, to the (K,) cells; the row after it, with which the next begins."""
        full = part.numel() // self.row
        body, rest = part[: full * self.row].view(full, self.row), part[full * self.row :]
        taken = 0
        while taken < full:
            at = first_row + taken
            tile, within = divmod(at, self.dim)
            count = min(self.dim - within, full - taken)
            signs = self._signs(tile, part.device)[within : within + count]
            sums = (body[taken : taken + count] * signs).sum(dim=1, dtype=torch.float32)
            places = (torch.arange(within, within + count, device=part.device) + tile) % self.dim
            cells.index_add_(0, places, sums)
            taken += count
        if rest.numel():
            tile, within = divmod(first_row + full, self.dim)
            signs = self._signs(tile, part.device)[within, : rest.numel()]
            cells[(within + tile) % self.dim] += (rest * signs).sum(dtype=torch.float32)
        return first_row + full + (rest.numel() > 0)

    def _signs(self, tile: int, device: torch.device) -> Tensor:
        """(K, C) of ±1, in bytes; a new one after every K tiles, when cells come round again."""
        key = tile // self.dim, device
        if key not in self._tiles:
            drawn = random_signs(self.seed, f"robust/{key[0]}", self.dim, self.row) * math.sqrt(self.row)
            self._tiles[key] = drawn.round().to(torch.int8).to(device)
        return self._tiles[key]
