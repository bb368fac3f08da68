"""Embeddings: y_t = W[id_t], so G = Σ_t e(id_t) g_tᵀ: the one-hot side is a look-up in a table of random rows.

A bag's y = Σ_t w_t W[id_t] has one g, so its one-hot side is the same bag of random rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch.examples import Examples, NoBatchDimension
from heeler.sketch.layer_rules.base import Call, Cost, Grads, LayerRule, LeftOut, register
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.sketched_layer import SketchedLayer


@register(nn.Embedding)
class EmbeddingRule(LayerRule):
    may_miss = True

    def declare(self, module: Any) -> None:
        if module.scale_grad_by_freq:
            raise LeftOut("scale_grad_by_freq divides by counts over the whole batch")
        self.padding_idx = module.padding_idx
        rows, cols = module.num_embeddings, module.embedding_dim
        self.matrices = [MatrixSpec("weight", None, rows, cols, grad_is_rows=False)]

    def rows(self, call: Call) -> Tensor:
        """(B, T) or (B, 1)."""
        ids = call.input
        if call.examples.layout is None and (ids.ndim <= call.batch_dim or ids.shape[call.batch_dim] != call.batch):
            # Positions looked up once for the whole batch: the examples' gradients are summed before they get here.
            raise NoBatchDimension(f"ids of shape {tuple(ids.shape)} do not belong to single examples")
        return call.split(ids.unsqueeze(-1)).flatten(1)

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        ids = self.rows(call)
        rows = F.embedding(ids, layer.matrices[0].input_filter(layer.like))
        if self.padding_idx is not None:  # its gradient is zero by definition
            rows = torch.where((ids == self.padding_idx).unsqueeze(-1), 0.0, rows)
        return (rows,)

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor | None:
        matrix, g = layer.matrices[0], grads[0]
        if g is None:
            raise ValueError("an embedding's output got no gradient")
        g = examples.split(g)
        return matrix.sketch(examples, g.unsqueeze(1) if g.ndim < kept[0].ndim else g, kept[0])

    def cost(self, module: Any, k: float) -> Cost:
        n = module.embedding_dim
        return Cost(n, 3 * n, k * n, n + k)


@register(nn.EmbeddingBag)
class EmbeddingBagRule(EmbeddingRule):
    def declare(self, module: Any) -> None:
        if module.mode == "max":
            raise LeftOut('mode="max" takes each entry from another id')
        super().declare(module)
        self.mode = module.mode

    def rows(self, call: Call) -> Tensor:
        if call.input.ndim != 2:
            raise NoBatchDimension("bags that are told by offsets, not by the rows of a matrix")
        return super().rows(call)

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        self.rows(call)  # says now, not in backward, if the examples cannot be found
        table, weights = layer.matrices[0].input_filter(layer.like), call.argument(2, "per_sample_weights")
        weights = None if weights is None else weights.detach().to(table.dtype)
        bags = F.embedding_bag(
            call.input, table, mode=self.mode, per_sample_weights=weights, padding_idx=self.padding_idx
        )
        return (call.split(bags),)
