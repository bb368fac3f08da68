"""Linear layers: y = a Wᵀ + b, with any leading dimensions. G = Σ_t g_t a_tᵀ."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from heeler.sketch import fused
from heeler.sketch.examples import Examples
from heeler.sketch.layer_rules.base import Call, Cost, Grads, LayerRule, register
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.sketched_layer import SketchedLayer


@register(nn.Linear)
class LinearRule(LayerRule):
    is_linear = True

    def declare(self, module: Any) -> None:
        bias = None if module.bias is None else "bias"
        self.matrices = [MatrixSpec("weight", bias, module.out_features, module.in_features, hidden=True)]

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        return (layer.matrices[0].input(call.split(call.input)),)

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor | None:
        matrix, g = layer.matrices[0], grads[0]
        if g is None:
            raise ValueError("a linear layer's output got no gradient")
        return matrix.sketch(examples, examples.split(g), kept[0])

    def cost(self, module: Any, k: float) -> Cost:
        """Three products of the layer itself (forward and two in backward) against two with k columns."""
        spec = self.matrices[0]
        both = spec.rows + spec.cols
        fits = min(fused.WIDTHS) <= k <= max(fused.WIDTHS)
        unread = both - sum(spec.read().values()) if fits else 0
        return Cost(3 * spec.rows * spec.cols, 3 * both, k * both, both, unread=unread)


@register("transformers.pytorch_utils.Conv1D", "transformers.modeling_utils.Conv1D")
class TransposedLinearRule(LinearRule):
    """transformers' Conv1D is a linear layer whose weight is (n_in, n_out)."""

    def declare(self, module: Any) -> None:
        n_in, n_out = module.weight.shape
        self.matrices = [MatrixSpec("weight", "bias", n_in, n_out, grad_is_rows=False, hidden=True)]
