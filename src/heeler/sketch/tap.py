"""The tap: an identity in forward and in backward that leaves a sketch behind."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from heeler.sketch.examples import Examples
from heeler.sketch.sketched_layer import SketchedLayer


class Tap(torch.autograd.Function):
    """`Tap.apply(layer, examples, mean, leaf, n, *outputs, *kept)` → the n outputs, unchanged.

    Backward hands the outputs' gradients on unchanged, so parameter gradients stay what they were, bit for bit. The
    gradient of `leaf`, a (B, K) tensor whose values nobody reads, is this call's part of the sketch, times B where the
    loss is a mean: autograd adds up the parts of all layers. Only `kept` is saved, and through `save_for_backward`, so
    that activation checkpointing can drop and recompute it.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: SketchedLayer, examples: Examples, mean: bool, leaf: Tensor, n: int, *tensors: Tensor
    ) -> Any:
        ctx.layer, ctx.examples, ctx.mean, ctx.arity = layer, examples, mean, len(tensors)
        ctx.dim = leaf.shape[1]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[n:])
        # A detached alias, not the tensor itself: autograd refuses in-place operations (ReLU(inplace=True)) on an
        # input that a custom function returned as it was.
        outputs = tuple(out.detach() for out in tensors[:n])
        return outputs[0] if n == 1 else outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        sketch = None
        layer, examples = ctx.layer, ctx.examples
        if any(g is not None for g in grads) and not (layer.broken and not is_compiling()):
            kept = ctx.saved_tensors
            if is_compiling():
                sketch = layer.rule.sketch(layer, examples, grads, *kept)
            else:
                try:
                    sketch = layer.rule.sketch(layer, examples, grads, *kept)
                    if examples.note_tap is not None:
                        examples.note_tap(layer, sketch)
                except Exception as error:  # nobody stores a sketch that is not finite
                    layer.fail(error)
                    some = next(g for g in grads if g is not None)
                    sketch = torch.full((examples.batch, ctx.dim), torch.nan, device=some.device)
                    if examples.note_tap is not None and examples.note_tap(layer, None):
                        sketch = None  # the others' parts are kept apart from it
            if ctx.mean and sketch is not None:
                sketch = sketch * examples.batch
        return (None, None, None, sketch, None, *grads, *(None,) * (ctx.arity - len(grads)))
