"""Recurrent cells: one step of the recurrence, whose gates are computed once more in backward, as in `recurrent`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heeler.sketch.examples import Examples, NoBatchDimension
from heeler.sketch.layer_rules.base import Call, Grads, LayerRule, register
from heeler.sketch.layer_rules.recurrent import gru_step, lstm_step
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.sketched_layer import SketchedLayer


@register(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
class CellRule(LayerRule):
    """`matrices`: input to hidden, and hidden to hidden."""

    def declare(self, module: Any) -> None:
        self.module = module
        self.is_lstm = isinstance(module, nn.LSTMCell)
        if self.is_lstm or isinstance(module, nn.GRUCell):
            self.step: Any = lstm_step if self.is_lstm else gru_step
        else:
            self.step = tanh_step if module.nonlinearity == "tanh" else relu_step
        for kind in ("ih", "hh"):
            gates, cols = getattr(module, f"weight_{kind}").shape
            self.matrices.append(MatrixSpec(f"weight_{kind}", f"bias_{kind}" if module.bias else None, gates, cols))

    def rows(self, call: Call) -> Tensor:
        return call.split(torch.cat([t.to(call.input.dtype) for t in self._given(call)], -1))

    def _given(self, call: Call) -> list[Tensor]:
        """The input and the states, each (N, n)."""
        x, state = call.input, call.argument(1, "hx")
        if x.ndim != 2:
            raise NoBatchDimension("a recurrent cell without a batch dimension")
        if state is None:
            return [x, *[x.new_zeros(len(x), self.module.hidden_size)] * (2 if self.is_lstm else 1)]
        return [x, *(s.detach() for s in (state if self.is_lstm else (state,)))]

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        call.split(call.input)  # says now, not in backward, if the examples cannot be found
        return tuple(self._given(call))

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor:
        weights = {name: p.detach() for name, p in self.module.named_parameters(recurse=False)}
        x, *states = (t.to(weights["weight_ih"].dtype) for t in kept)
        sides = (x, states[0])
        with torch.enable_grad():
            gates = [
                F.linear(side, weights[f"weight_{kind}"], weights.get(f"bias_{kind}")).requires_grad_()
                for side, kind in zip(sides, ("ih", "hh"), strict=True)
            ]
            results = self.step(*gates, states)
            pairs = [(r, g.to(r.dtype)) for r, g in zip(results, grads, strict=True) if g is not None]
            found = torch.autograd.grad([r for r, _ in pairs], gates, [g for _, g in pairs])
        into, within = (
            matrix.contract(matrix.grad(examples.split(g)), matrix.input(examples.split(side)))
            for matrix, g, side in zip(layer.matrices, found, sides, strict=True)
        )
        return into + within


def tanh_step(from_input: Tensor, from_hidden: Tensor, state: list[Tensor]) -> list[Tensor]:
    return [(from_input + from_hidden).tanh()]


def relu_step(from_input: Tensor, from_hidden: Tensor, state: list[Tensor]) -> list[Tensor]:
    return [(from_input + from_hidden).relu()]
