"""nn.MultiheadAttention: its weights never pass through `nn.Linear.forward`.

The fused function shows neither the attention's output before the last projection nor the gradients of queries, keys
and values. Both are computed again in backward from the inputs, without gradients of weights: exact, but for about the
price of one more forward and backward of the attention itself, so it is not among the default layers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch.examples import BATCH_FIRST, Examples, NoBatchDimension
from heeler.sketch.layer_rules.base import Call, Grads, LayerRule, LeftOut, register
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.sketched_layer import SketchedLayer


@register(nn.MultiheadAttention)
class AttentionRule(LayerRule):
    natural_layout = BATCH_FIRST  # or as its batch_first says

    def declare(self, module: Any) -> None:
        if module.dropout > 0:
            raise LeftOut("attention dropout: the mask that was drawn cannot be drawn again")
        if module.bias_k is not None or module.add_zero_attn:
            raise LeftOut("add_bias_kv and add_zero_attn are not supported")
        if module.in_proj_weight is None:
            raise LeftOut("kdim and vdim other than embed_dim are not supported")
        self.module = module
        d = module.embed_dim
        bias = None if module.in_proj_bias is None else "in_proj_bias"
        out_bias = None if module.out_proj.bias is None else "out_proj.bias"
        self.matrices = [
            MatrixSpec("in_proj_weight", bias, 3 * d, d, groups=3),
            MatrixSpec("out_proj.weight", out_bias, d, d),
        ]

    def _inputs(self, call: Call) -> list[Tensor]:
        """Queries, keys and values, (B, T, d)."""
        inputs = [call.argument(i, name) for i, name in enumerate(("query", "key", "value"))]
        if any(x.ndim != 3 for x in inputs):
            raise NoBatchDimension("attention without a batch dimension")
        batch_dim = 0 if self.module.batch_first else 1
        if any(x.shape[batch_dim] != call.batch for x in inputs):
            raise NoBatchDimension(f"attention over shape {tuple(inputs[0].shape)}: no batch of {call.batch}")
        return [x.detach() if batch_dim == 0 else x.detach().transpose(0, 1) for x in inputs]

    def rows(self, call: Call) -> Tensor:
        return torch.cat([x.flatten(1) for x in self._inputs(call)], 1)

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        q, k, v = self._inputs(call)
        padding = call.argument(3, "key_padding_mask")
        mask = call.argument(5, "attn_mask")
        merged = _merge_masks(mask, padding, call.batch, self.module.num_heads, q)
        return (q, k, v) if merged is None else (q, k, v, merged)

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor:
        g = grads[0]
        if g is None or (len(grads) > 1 and grads[1] is not None):
            raise ValueError("the attention weights were trained through; leave this layer out with layers=...")
        if not self.module.batch_first:
            g = g.transpose(0, 1)
        inputs, mask = kept[:3], kept[3] if len(kept) > 3 else None
        attended, preactivation_grads = attention_internals(self.module, inputs, mask, g)
        into, out = layer.matrices
        result = out.contract(out.grad(g), out.input(attended.to(g.dtype)))
        g3 = torch.stack(preactivation_grads, dim=2)  # (B, T, 3, d)
        if inputs[0].shape[1] == inputs[1].shape[1]:
            a3 = torch.stack(inputs, dim=2)  # (B, T, 3, d)
        else:  # cross attention: queries and keys differ in number; zero gradients pad the shorter side
            longest = max(x.shape[1] for x in inputs)
            a3 = torch.stack([F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in inputs], dim=2)
        return result + into.contract(into.grad(g3), into.input(a3.flatten(1, 2).to(g3.dtype)))


def attention_internals(
    module: Any, inputs: tuple[Tensor, ...], mask: Tensor | None, g: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The attention's output before the last projection (B, T, d), and the gradients of q, k and v, each (B, L, d)."""
    heads, d = module.num_heads, module.embed_dim
    weights = module.in_proj_weight.detach().chunk(3)
    biases = [None] * 3 if module.in_proj_bias is None else module.in_proj_bias.detach().chunk(3)
    with torch.enable_grad():
        qkv = [
            F.linear(x.to(w.dtype), w, b).detach().requires_grad_()
            for x, w, b in zip(inputs, weights, biases, strict=True)
        ]
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in qkv)
        scores = q @ k.transpose(-1, -2) / math.sqrt(d // heads)
        if mask is not None:
            scores = scores + mask.to(scores.dtype)
        attended = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        weight = module.out_proj.weight.detach()
        grads = torch.autograd.grad(attended, qkv, g.to(weight.dtype) @ weight)
    longest = max(x.shape[1] for x in grads)
    return attended.detach(), [F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in grads]


def _merge_masks(mask: Tensor | None, padding: Tensor | None, batch: int, heads: int, q: Tensor) -> Tensor | None:
    """One additive mask that broadcasts against (B, heads, T, S)."""
    merged = None
    if mask is not None:
        merged = _additive(mask.detach(), q)
        merged = merged.unflatten(0, (batch, heads)) if merged.ndim == 3 else merged
    if padding is not None:
        rows = _additive(padding.detach(), q)[:, None, None, :]
        merged = rows if merged is None else merged + rows
    return merged


def _additive(mask: Tensor, like: Tensor) -> Tensor:
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=like.dtype, device=mask.device).masked_fill(mask, float("-inf"))
