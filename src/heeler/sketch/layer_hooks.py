"""The hooks of one sketched layer: forward keeps what its rule needs, backward makes this call's part of the sketch.

In eager mode the backward hook sits on the autograd node that computed the module's output: the graph, and so every
gradient, is exactly what it is without Heeler, and a call costs the host a few microseconds besides the rule's own
arithmetic. Where no hook can sit there (compiled code, checkpoints, several outputs), a `Tap` in the graph does the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_compiling

from heeler.sketch import compiled
from heeler.sketch.checksum import HALF
from heeler.sketch.examples import (
    BATCH_FIRST,
    Examples,
    NoBatchDimension,
    RowLayout,
    row_layouts,
    tensors_in,
)
from heeler.sketch.layer_rules.base import Call
from heeler.sketch.matrices import AnyMatrix
from heeler.sketch.passes import Pass, Passes, Slot
from heeler.sketch.recorder import Recorder
from heeler.sketch.root_hooks import ModelHook
from heeler.sketch.sketched_layer import SketchedLayer
from heeler.sketch.tap import Tap
from heeler.torch_private import (
    current_stream,
    goes_into_grad,
    graph_task,
    keeps_graph,
    node_of,
    run_as_it_is,
    saving_hooks,
    source_of,
    transform,
    version,
)


class LayerHook(ModelHook):
    """The forward hook of one layer. In eager mode it runs for every layer of every step, so it is kept short."""

    def __init__(self, recorder: Recorder, layer: SketchedLayer) -> None:
        self.recorder, self.layer = recorder, layer
        self.matrix = layer.matrices[0] if layer.rule.is_linear else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        recorder, layer = self.recorder, self.layer
        compiling = is_compiling()
        if compiling and not (is_grad_enabled() and recorder.running):
            return None  # before anything else is read: the compiler guards what is, and this is the unsketched variant
        rows = recorder.rows
        if rows.rerun_test is not None:
            if transform() is None:
                rows.rerun_test.see(layer, args, kwargs)
            return None
        slot = recorder.current
        if slot is None or (layer.broken and id(layer) not in slot.recomputed):
            return None
        if isinstance(output, Tensor) and output.ndim > 2:
            slot.examples.note(output.shape)
        if compiling:
            if isinstance(output, Tensor) and output.dtype in HALF:
                compiled.call(recorder.key, "note_half")
            compiled.call(recorder.key, "lend_leaf")
            return self._tap(slot, Call(args, kwargs, output, slot.examples.under(layer.layout)))
        if slot.ignored or transform() is not None:
            return None
        in_forward = on_node = recorder.running and recorder.eager.thread == get_ident()
        if rows.recording is not None and in_forward:
            rows.see(layer, args, kwargs, output)
        if not is_grad_enabled():
            if in_forward:
                slot.replay()  # a reentrant checkpoint runs its forward without gradients first
            return None
        if not in_forward and graph_task() == -1:  # neither in the model's forward nor run again by a checkpoint
            return None
        if saving_hooks(True) is not None:  # a checkpoint of the other kind, which must see the same saved both times
            slot.replay()
            on_node = False
            if not in_forward:
                layouts, shape = slot.recomputed.get(id(layer), {}), _shape(args, kwargs)
                if shape not in layouts:
                    return None
                return self._tap(slot, Call(args, kwargs, output, slot.examples.under(layouts[shape])))
        if layer.broken:
            return None
        if layer.layout is None and rows.tests and rows.recording is None:
            return rows.meet_untested(layer, slot.owner)
        if recorder.checks.check is not None and isinstance(output, Tensor) and output.dtype in HALF:
            recorder.checks.note_half()
        if not on_node or not isinstance(output, Tensor):
            return self._tap_now(slot, args, kwargs, output)
        if not output.requires_grad:
            return None
        source = node_of(output)
        on_gpu = output.is_cuda or slot.stream is not None
        if source is None or (on_gpu and slot.stream != current_stream(output.device)):
            return self._tap_now(slot, args, kwargs, output)
        if layer.layout is None and rows.recording is not None:
            rows.defer(self._later(slot, args, kwargs, output, source))
            return None
        return self._register(slot, args, kwargs, output, source)

    def _tap_now(self, slot: Slot, args: Any, kwargs: Any, output: Any) -> Any:
        """A call that cannot wait for the test at the forward's end is taken for what it most likely is."""
        layer, rows = self.layer, self.recorder.rows
        if layer.layout is not None or rows.recording is None:
            return self._tap(slot, Call(args, kwargs, output, slot.examples.under(layer.layout)))
        call = Call(args, kwargs, output, slot.examples)
        natural = layer.rule.natural_layout
        try:
            guess = natural or slot.examples.likely_layout(call.input.shape)
        except NoBatchDimension:  # a PackedSequence
            return self._tap(slot, call)
        rows.guess(layer, lambda: layer.layout == guess)
        return self._tap(slot, call if natural else Call(args, kwargs, output, slot.examples.under(guess)))

    def _later(self, slot: Slot, args: Any, kwargs: Any, output: Tensor, source: Any) -> Callable[[], None]:
        """What is to be done once it is known how the input lies, if nobody has written to it by then."""
        given = list(tensors_in((args, kwargs)))
        before = version(given)

        def register() -> None:
            if self.layer.broken:
                return
            if self.layer.layout is None or version(given) != before:
                slot.owner.spoil(f"the input of {self.layer.name or 'the model'} was written to before it was tested")
            else:
                self._register(slot, args, kwargs, output, source)

        return register

    def _register(self, slot: Slot, args: Any, kwargs: Any, output: Tensor, source: Any) -> None:
        """Have a hook on the node that computed the output."""
        recorder, layer = self.recorder, self.layer
        node, number, shape = source
        known = slot.autocast is None and layer.layout in (None, BATCH_FIRST)
        matrix = self.matrix if known and args and _is_flat(args[0], slot.examples.batch) else None
        if matrix is not None:
            kept = self._project(matrix, args[0])
        else:
            kept = self._keep(slot, Call(args, kwargs, output, slot.examples.under(layer.layout)))
        if kept is None:
            self._failed(slot)
            return
        node.register_prehook(_NodeHook(recorder, slot.owner, layer, matrix, kept, number, shape, layer.layout))

    def _failed(self, slot: Slot) -> None:
        """Nothing was kept of a call."""
        if self.layer.broken:
            self.recorder.checks.spoil(slot.owner)

    def _miss(self, owner: Pass, output: Any, reason: str) -> None:
        """Examples cannot be found in a call. That matters if a gradient comes through it.

        reason: to leave the layer out; empty where the examples may lie in another way than they did.
        """

        def reached(grads: tuple[Tensor | None, ...]) -> None:
            if any(g is not None for g in grads):
                if reason:
                    self.layer.leave_out(reason)
                if self.layer.broken:
                    self.recorder.checks.spoil(owner)
                else:
                    self.recorder.rows.meet_untested(self.layer, owner)

        for node in {source_of(tensor) for tensor in _flat(output)} - {None}:
            node.register_prehook(reached)

    def _tap(self, slot: Slot, call: Call) -> Any:
        """The output with a `Tap` on it; None where it cannot be sketched."""
        recorder, compiling = self.recorder, is_compiling()
        output, examples = call.output, call.examples
        single = isinstance(output, Tensor)
        outputs = (output,) if single else _flat(output)
        if not outputs or not outputs[0].requires_grad:
            return None
        if not compiling:  # not the pass's own: a tap's part is returned to autograd, never added in place
            note_tap = recorder.checks.note_tap
            examples = Examples(examples.batch, examples.batch_dim, examples.shapes, examples.layout, note_tap=note_tap)
        kept = self._keep(slot, call)
        if kept is None:
            return None if compiling else self._failed(slot)
        if slot.replayed:
            slot.recomputed.setdefault(id(self.layer), {}).setdefault(_shape(call.args, call.kwargs), examples.layout)
        passes: Passes = recorder.compiled if compiling else recorder.eager
        leaf = passes.leaf(slot)
        if leaf.shape[0] != examples.batch:
            leaf = leaf[: examples.batch]
        tapped = Tap.apply(self.layer, examples, recorder.mean, leaf, len(outputs), *outputs, *kept)
        return tapped if single else _like(output, iter(tapped if len(outputs) > 1 else (tapped,)))

    def _project(self, matrix: AnyMatrix, x: Tensor) -> tuple[Tensor, ...] | None:
        """What `_keep` gives for a linear layer and one token per example, without asking its rule."""
        try:
            return (matrix.input(x.detach()),)
        except Exception as error:
            self.layer.fail(error)
            return None

    def _keep(self, slot: Slot, call: Call) -> tuple[Tensor, ...] | None:
        """The rule's `keep`; None if the call cannot be sketched."""
        layer, compiling = self.layer, is_compiling()
        try:
            if compiling:
                with torch.no_grad():
                    return layer.rule.keep(layer, call)
            if slot.autocast is None:
                return layer.rule.keep(layer, call)
            # The input as it is: autocast would copy all of it once more (compiled, the copy is shared).
            with torch.autocast(slot.autocast, enabled=False):
                return layer.rule.keep(layer, call)
        except NoBatchDimension as problem:
            if compiling:
                layer.miss(str(problem), layer.broken)
            else:
                known = layer.layout is not None and _may_lie(call)
                self._miss(slot.owner, call.output, "" if known else str(problem))
        except Exception as error:
            if compiling:  # not an operator's: the compiler raises those itself, naming the rule's line
                layer.miss(f"its rule failed: {error}", broken=True)
                compiled.call(self.recorder.key, "warn_of_failed_rule", layer.name or "the model")
            else:
                layer.fail(error)
        return None


@dataclass(eq=False, slots=True)
class _NodeHook:
    """The backward hook of one call. It must not refer to the call's output, whose node holds it.

    matrix: of a linear layer that was called with one token per example: then the rule need not be asked.
    """

    recorder: Recorder
    owner: Pass
    layer: SketchedLayer
    matrix: AnyMatrix | None
    kept: tuple[Tensor, ...]
    number: int
    shape: torch.Size | None
    layout: RowLayout | None

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        g, kept, owner = grads[self.number], self.kept, self.owner
        if g is None or not kept:
            return
        task = graph_task()
        if owner.task != task:
            into_grad = goes_into_grad()
            self.recorder.eager.reach(owner, task, g.device, into_grad)
            if not into_grad and is_grad_enabled():
                self.recorder.checks.differentiated_twice(g.device)
        if not owner.counts:
            return
        if not keeps_graph():
            self.kept = ()
        if self.shape is not None:
            g = g.reshape(self.shape)
        if is_grad_enabled():  # backward(create_graph=True)
            with torch.no_grad():
                self._add(g.detach(), kept)
        else:
            self._add(g, kept)

    def _add(self, g: Tensor, kept: tuple[Tensor, ...]) -> None:
        layer, matrix, owner, check = self.layer, self.matrix, self.owner, self.recorder.checks.check
        if layer.broken:
            return
        examples = owner.examples
        try:
            if matrix is None:
                part = layer.rule.sketch(layer, examples.under(self.layout), (g,), *kept)
            else:
                part = matrix.deliver(examples, matrix.grad(g), kept[0])
            if part is not None and examples.sums is not None:
                examples.sums.room().add_(part, alpha=examples.sums.factor)
            elif part is not None and check is not None:
                check.add(owner, layer, part)
        except Exception as error:
            layer.fail(error)
            self.recorder.checks.spoil(owner)


def _may_lie(call: Call) -> bool:
    """Whether the shape of a call's input allows the batch's examples to lie in it in any way."""
    try:
        return bool(row_layouts(call.input.shape, call.batch))
    except NoBatchDimension:  # it is no tensor
        return False


def _shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size | None:
    """Of the first argument."""
    return getattr(args[0] if args else next(iter(kwargs.values()), None), "shape", None)


def _is_flat(x: Any, batch: int) -> bool:
    """Whether this is (B, n) in single precision: small models see nothing else, and to them every call counts."""
    return isinstance(x, Tensor) and x.ndim == 2 and x.shape[0] == batch and x.dtype == torch.float32


def _flat(output: Any) -> tuple[Tensor, ...]:
    """The tensors in nested tuples and lists, in order."""
    if isinstance(output, Tensor):
        return (output,)
    if isinstance(output, (tuple, list)):
        return tuple(t for item in output for t in _flat(item))
    return ()


def _like(output: Any, tensors: Any) -> Any:
    """`output` with its tensors replaced by the next ones of the iterator."""
    if isinstance(output, Tensor):
        return next(tensors)
    if isinstance(output, (tuple, list)):
        items = [_like(item, tensors) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


# Compiled in place, a layer of torch's own has no frame of its own but this hook's.
run_as_it_is(LayerHook.__call__)
