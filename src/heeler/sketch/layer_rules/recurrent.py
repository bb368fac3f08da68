"""LSTM and GRU: exact, by running the recurrence once more in backward.

The fused kernel shows neither the gates nor their gradients, and the weights' gradients need the latter. So the taps
sit on the module's outputs, the fused kernel stays in place, and in backward the recurrence is unrolled from the same
inputs with a zero added to the gates of every step: autograd's gradient of that zero is the gates' gradient. Exact;
it costs about one unrolled forward and backward of the module, which is several fused ones, so recurrent layers are
not among the default ones: ask for them with layers="all" or a predicate. Dropout between layers, projections
(proj_size) and packed sequences are left out and reported.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch.examples import BATCH_FIRST, Examples, NoBatchDimension
from heeler.sketch.layer_rules.base import Call, Grads, LayerRule, LeftOut, register
from heeler.sketch.matrices import MatrixSpec
from heeler.sketch.sketched_layer import SketchedLayer


@register(nn.LSTM, nn.GRU)
class RecurrentRule(LayerRule):
    """`matrices` alternates input-to-hidden and hidden-to-hidden, in the order of `runs`."""

    def declare(self, module: Any) -> None:
        if module.dropout > 0 and module.num_layers > 1:
            raise LeftOut("dropout between layers: the mask that was drawn cannot be drawn again")
        if getattr(module, "proj_size", 0):
            raise LeftOut("proj_size is not supported")
        self.module = module
        self.is_lstm = isinstance(module, nn.LSTM)
        suffixes = ["", "_reverse"] if module.bidirectional else [""]
        self.runs = [f"l{layer}{suffix}" for layer in range(module.num_layers) for suffix in suffixes]
        gates = (4 if self.is_lstm else 3) * module.hidden_size
        for run in self.runs:
            for kind in ("ih", "hh"):
                cols = getattr(module, f"weight_{kind}_{run}").shape[1]
                bias = f"bias_{kind}_{run}" if module.bias else None
                self.matrices.append(MatrixSpec(f"weight_{kind}_{run}", bias, gates, cols))

    natural_layout = BATCH_FIRST  # or as its batch_first says

    def rows(self, call: Call) -> Tensor:
        x = call.input  # refuses a packed sequence
        if x.ndim != 3:
            raise NoBatchDimension("a recurrent layer without a batch dimension")
        x = x if self.module.batch_first else x.transpose(0, 1)
        if x.shape[0] != call.batch:
            raise NoBatchDimension(f"a recurrent layer over shape {tuple(call.input.shape)}: no batch of {call.batch}")
        return x

    def keep(self, layer: SketchedLayer, call: Call) -> tuple[Tensor, ...]:
        """The input and the initial state, time first: (T, B, n), (runs, B, h), and for an LSTM the cells."""
        x = self.rows(call).transpose(0, 1)
        state = call.argument(1, "hx")
        if state is None:
            zeros = x.new_zeros(len(self.runs), x.shape[1], self.module.hidden_size)
            return (x, zeros, zeros) if self.is_lstm else (x, zeros)
        return (x, *(s.detach() for s in state)) if self.is_lstm else (x, state.detach())

    def sketch(self, layer: SketchedLayer, examples: Examples, grads: Grads, *kept: Tensor) -> Tensor:
        grad_out = grads[0]
        if grad_out is not None and self.module.batch_first:
            grad_out = grad_out.transpose(0, 1)
        total = torch.zeros((), device=kept[0].device)
        for i, (inputs, hidden, g_ih, g_hh) in enumerate(self._gate_gradients(kept, (grad_out, *grads[1:]))):
            for matrix, a, g in ((layer.matrices[2 * i], inputs, g_ih), (layer.matrices[2 * i + 1], hidden, g_hh)):
                a, g = a.transpose(0, 1), g.transpose(0, 1)  # (B, T, n)
                total = total + matrix.contract(matrix.grad(g), matrix.input(a))
        return total

    def _gate_gradients(self, kept: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> Any:
        """For every run its inputs (T, B, n), previous hidden states (T, B, h) and the gradients of both products."""
        weights = {name: p.detach() for name, p in self.module.named_parameters(recurse=False)}
        dtype = next(iter(weights.values())).dtype
        x, states = kept[0].to(dtype), [s.to(dtype) for s in kept[1:]]
        step = lstm_step if self.is_lstm else gru_step
        traces, finals = [], []
        directions = 2 if self.module.bidirectional else 1
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            for layer in range(self.module.num_layers):
                outputs = []
                for direction in range(directions):
                    i = layer * directions + direction
                    sequence = x.flip(0) if direction else x
                    out, final, trace = unroll(step, sequence, [s[i] for s in states], weights, self.runs[i])
                    outputs.append(out.flip(0) if direction else out)
                    finals.append(final)
                    traces.append(trace)
                x = torch.cat(outputs, -1)
            results = [x] + [torch.stack([f[k] for f in finals]) for k in range(len(states))]
            pairs = [(r, g.to(dtype)) for r, g in zip(results, grads, strict=False) if g is not None]
            zeros = [z for _, _, *both in traces for z in both]
            found = torch.autograd.grad([r for r, _ in pairs], zeros, [g for _, g in pairs])
        return [(t[0].detach(), t[1].detach(), found[2 * i], found[2 * i + 1]) for i, t in enumerate(traces)]


def unroll(step: Any, x: Tensor, state: list[Tensor], weights: dict[str, Tensor], run: str) -> Any:
    """One direction of one layer: outputs (T, B, h), the final state, and the trace (inputs, hidden, zeros, zeros)."""
    steps, batch, _ = x.shape
    w_ih, w_hh = weights[f"weight_ih_{run}"], weights[f"weight_hh_{run}"]
    zero_ih = x.new_zeros(steps, batch, w_ih.shape[0]).requires_grad_()
    zero_hh = x.new_zeros(steps, batch, w_hh.shape[0]).requires_grad_()
    from_input = x @ w_ih.t() + weights.get(f"bias_ih_{run}", 0.0) + zero_ih
    hidden, outputs = [], []
    for t in range(steps):
        hidden.append(state[0])
        from_hidden = state[0] @ w_hh.t() + weights.get(f"bias_hh_{run}", 0.0) + zero_hh[t]
        state = step(from_input[t], from_hidden, state)
        outputs.append(state[0])
    return torch.stack(outputs), state, (x, torch.stack(hidden), zero_ih, zero_hh)


def lstm_step(from_input: Tensor, from_hidden: Tensor, state: list[Tensor]) -> list[Tensor]:
    i, f, g, o = (from_input + from_hidden).chunk(4, -1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return [o.sigmoid() * cell.tanh(), cell]


def gru_step(from_input: Tensor, from_hidden: Tensor, state: list[Tensor]) -> list[Tensor]:
    (r_x, z_x, n_x), (r_h, z_h, n_h) = from_input.chunk(3, -1), from_hidden.chunk(3, -1)
    update = (z_x + z_h).sigmoid()
    new = (n_x + (r_x + r_h).sigmoid() * n_h).tanh()
    return [(1 - update) * new + update * state[0]]
