"""Convolutions: y_t = W patch_t + b, so the projected patches are a convolution with k random filters.

A transposed convolution is the same with input and output exchanged: G = Σ_t x_t patch_t(g)ᵀ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch.examples import BATCH_FIRST, Examples, NoBatchDimension
from heeler.sketch.layer_rules.base import Call, Cost, Grads, LayerRule, LeftOut, guess_positions, register
from heeler.sketch.matrices import AnyMatrix, ExactMatrix, MatrixSpec
from heeler.sketch.sketched_layer import SketchedLayer
from heeler.torch_private import explicit_padding

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(LayerRule):
    natural_layout = BATCH_FIRST

    def declare(self, module: Any) -> None:
        self.kernel = tuple(module.kernel_size)
        self.geometry = (module.stride, module.padding, module.dilation, module.groups)
        self.pad_mode = module.padding_mode
        self.pads: Any = explicit_padding(module)
        if self.pad_mode != "zeros" and self.pads is None:
            raise LeftOut(f"padding_mode={self.pad_mode!r} of a version of PyTorch that does not tell its padding")
        self.per_group = module.in_channels // module.groups
        cols = math.prod(module.weight.shape[1:])
        bias = None if module.bias is None else "bias"
        self.matrices = [MatrixSpec("weight", bias, module.out_channels, cols, groups=module.groups)]

    def rows(self, call: Call) -> Tensor:
        a = call.input
        if a.ndim != len(self.kernel) + 2 or a.shape[0] != call.batch:
            raise NoBatchDimension(f"a convolution of shape {tuple(a.shape)} without the batch in dimension 0")
        return a

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        return (self.patches(layer.matrices[0], self.rows(call)),)

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor | None:
        if grads[0] is None:
            raise ValueError("a convolution's output got no gradient")
        return layer.matrices[0].deliver(examples, self.pixels(layer.matrices[0], grads[0]), kept[0])

    def patches(self, matrix: AnyMatrix, a: Tensor) -> Tensor:
        """(B, C, ...) → (B, T·G, k): the projected patch around every position."""
        stride, padding, dilation, groups = self.geometry
        filters = matrix.input_filter(a).t().reshape(-1, self.per_group, *self.kernel)
        offset = matrix.input_offset(a)
        if groups > 1:
            filters = filters.repeat(groups, *[1] * (filters.ndim - 1))
            offset = None if offset is None else offset.repeat(groups)
        if self.pad_mode != "zeros":
            a, padding = F.pad(a, self.pads, mode=self.pad_mode), 0
        xp = _CONV[len(self.kernel)](a, filters, offset, stride, padding, dilation, groups)  # (B, G·k, ...)
        if groups > 1:
            return xp.flatten(2).unflatten(1, (groups, -1)).permute(0, 3, 1, 2).flatten(1, 2)
        return xp.flatten(2).transpose(1, 2)

    def pixels(self, matrix: AnyMatrix, g: Tensor) -> Tensor:
        """(B, C, ...) → (B, T·G, k): the projected channels of every position."""
        g = g.flatten(2)  # (B, C, T)
        groups = self.geometry[3]
        if groups > 1:
            return matrix.grad(g.unflatten(1, (groups, -1)).permute(0, 3, 1, 2))  # of (B, T, G, C / G)
        if isinstance(matrix, ExactMatrix):
            return g.transpose(1, 2)
        gp = torch.matmul(matrix.of_grad.like(g).t(), g)  # (B, k, T): the channels stay in front, nothing is copied
        return gp.transpose(1, 2)

    def cost(self, module: Any, k: float) -> Cost:
        n_in, n_out = math.prod(module.weight.shape[1:]), module.out_channels
        c_in, groups = module.in_channels, module.groups
        tap = k * (n_in * groups + n_out)
        return Cost(3 * n_in * n_out, 3 * (c_in + n_out), tap, c_in + n_out + k * groups, guess_positions(n_out))


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(ConvRule):
    """Its weight is (C_in, C_out / G, ...): input channels meet the rows, patches of the gradient the columns."""

    def declare(self, module: Any) -> None:
        super().declare(module)
        self.per_group = module.out_channels // module.groups
        cols = math.prod(module.weight.shape[1:])
        self.matrices = [MatrixSpec("weight", None, module.in_channels, cols, groups=module.groups)]
        self.vectors = {} if module.bias is None else {"bias": module.out_channels}

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        return (self.pixels(layer.matrices[0], self.rows(call)),)

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor | None:
        g = grads[0]
        if g is None:
            raise ValueError("a transposed convolution's output got no gradient")
        patches = self.patches(layer.matrices[0], g)
        if patches.shape[1] != kept[0].shape[1]:
            raise ValueError("its output is padded by a stride or more, which is not supported")
        weight = layer.matrices[0].deliver(examples, kept[0].to(g.dtype), patches)
        if "bias" not in layer.vectors:
            return weight
        bias = layer.vectors["bias"].write(g.flatten(2).sum(2))
        return bias if weight is None else weight + bias

    def cost(self, module: Any, k: float) -> Cost:
        n_out, c_in = math.prod(module.weight.shape[1:]), module.in_channels
        numbers, groups = c_in + module.out_channels, module.groups
        tap = k * (c_in + n_out * groups)
        return Cost(3 * c_in * n_out, 3 * numbers, tap, numbers + k * groups, guess_positions(c_in))
