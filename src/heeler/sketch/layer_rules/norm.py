"""Normalisation: y = x̂ ∘ γ + β. Example i's gradient is Σ_t g_t ∘ x̂_t and Σ_t g_t.

x̂ is computed again in backward from the input, which the layer itself keeps anyway. In training mode batch norm's
statistics tie the examples together; example i's part of the batch's gradient is still the sum over its own positions,
and the parts add up to the whole.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch.examples import BATCH_FIRST, Examples, NoBatchDimension
from heeler.sketch.layer_rules.base import Call, Cost, Grads, LayerRule, LeftOut, guess_positions, register
from heeler.sketch.sketched_layer import SketchedLayer


class NormRule(LayerRule):
    """`normalise` gives x̂, shaped like x; the parameters lie along the last dimensions or along dimension 1."""

    over_images: ClassVar[bool] = False
    gain, shift = "weight", "bias"

    def declare(self, module: Any) -> None:
        self.vectors = {
            name: getattr(module, name).numel()
            for name in (self.gain, self.shift)
            if getattr(module, name, None) is not None
        }
        if not self.vectors:
            raise LeftOut("no gain and no bias")
        self.module = module

    def normalise(self, x: Tensor, *statistics: Tensor) -> Tensor:
        raise NotImplementedError

    def by_feature(self, examples: Examples, x: Tensor) -> Tensor:
        """→ (B, T, features)."""
        raise NotImplementedError

    def rows(self, call: Call) -> Tensor:
        return self.by_feature(call.examples, call.input)

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        self.rows(call)  # says now, not in backward, if the examples cannot be found
        return (call.input,)

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor:
        if grads[0] is None:
            raise ValueError("a norm's output got no gradient")
        g = grads[0] if grads[0].dtype == torch.float64 else grads[0].float()
        parts = []
        if self.gain in layer.vectors:
            weighted = g * self.normalise(kept[0].to(g.dtype), *kept[1:])
            parts.append(layer.vectors[self.gain].write(self.by_feature(examples, weighted).sum(1)))
        if self.shift in layer.vectors:
            parts.append(layer.vectors[self.shift].write(self.by_feature(examples, g).sum(1)))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def cost(self, module: Any, k: float) -> Cost:
        n = float(next(iter(self.vectors.values())))
        return Cost(0.0, 6 * n, 2 * k * k * n / 64, 10 * n, guess_positions(n) if self.over_images else 1.0)


class LastDimensions(NormRule):
    def by_feature(self, examples: Examples, x: Tensor) -> Tensor:
        x = examples.split(x.flatten(-len(self.module.normalized_shape)))
        return x.unsqueeze(1) if x.ndim == 2 else x


class DimensionOne(NormRule):
    """Channels in dimension 1, examples in dimension 0."""

    over_images = True
    natural_layout = BATCH_FIRST

    def by_feature(self, examples: Examples, x: Tensor) -> Tensor:
        if x.shape[0] != examples.batch:
            raise NoBatchDimension(f"a norm over shape {tuple(x.shape)} without the batch in dimension 0")
        return x.reshape(x.shape[0], x.shape[1], -1).transpose(1, 2)


@register(nn.LayerNorm)
class LayerNormRule(LastDimensions):
    def normalise(self, x: Tensor, *statistics: Tensor) -> Tensor:
        return F.layer_norm(x, self.module.normalized_shape, None, None, self.module.eps)


if hasattr(nn, "RMSNorm"):

    @register(nn.RMSNorm)
    class RMSNormRule(LastDimensions):
        def normalise(self, x: Tensor, *statistics: Tensor) -> Tensor:
            eps = self.module.eps  # by default that of the input's own precision, which may not be the one used here
            return F.rms_norm(x, self.module.normalized_shape, None, torch.finfo(x.dtype).eps if eps is None else eps)


@register(nn.GroupNorm)
class GroupNormRule(DimensionOne):
    def normalise(self, x: Tensor, *statistics: Tensor) -> Tensor:
        return F.group_norm(x, self.module.num_groups, None, None, self.module.eps)


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
class BatchNormRule(DimensionOne):
    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        """The batch's own statistics, or, for a frozen layer, the running ones as they are now."""
        (x,) = super().keep(layer, call)
        if self.module.training or self.module.running_mean is None:
            return (x,)
        return (x, self.module.running_mean.detach().clone(), self.module.running_var.detach().clone())

    def normalise(self, x: Tensor, *statistics: Tensor) -> Tensor:
        if statistics:
            return F.batch_norm(x, statistics[0], statistics[1], training=False, eps=self.module.eps)
        return F.batch_norm(x, None, None, training=True, eps=self.module.eps)
