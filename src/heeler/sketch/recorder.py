"""Passes: one per forward of the model, finished by the backward that puts a gradient into it.

`EagerPasses` and `CompiledPasses` know how a forward begins, ends and gets its gradients; the recorder owns what both
share: the forward under way, the switches, and the passes that are finished. It holds only the newest pass, so a
forward whose graph dies without a backward takes its pass with it.
"""

from __future__ import annotations

from bisect import insort
from typing import Any

import torch
from torch import Tensor, nn

from heeler.notices import warn
from heeler.sketch import compiled
from heeler.sketch.checks import LAYER_LEFT_OUT, Checks
from heeler.sketch.compiled_passes import CompiledPasses
from heeler.sketch.eager_passes import TWO_THREADS, EagerPasses
from heeler.sketch.examples import Examples
from heeler.sketch.output_norms import note_norms
from heeler.sketch.passes import Nobody, Pass, SketchListener, Slot
from heeler.sketch.row_proof import RowProof
from heeler.sketch.sketched_layer import SketchedLayer
from heeler.torch_private import at_end_of_backward, forget_sizes, graph_task, saving_hooks


class Recorder:
    """Opens passes, collects their gradients, hands them out in forward order.

    layers: the sketched ones, which move to another device with it. mean: the loss is a mean over the batch, so that a
    sketch is multiplied by the batch's size. scaler: the GradScaler whose factor is taken out. listener: held here and
    in `checks` alone, until `close`. is_compiled: there is compiled code of the model, or will be.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[SketchedLayer],
        dim: int,
        device: torch.device,
        *,
        batch_dim: int,
        mean: bool,
        scaler: Any,
        exact: bool,
        listener: SketchListener,
        is_compiled: bool,
    ) -> None:
        self.layers, self.dim, self.device, self.batch_dim = layers, dim, device, batch_dim
        self.mean, self.listener = mean, listener
        self.checks = Checks(model, layers, exact, self._settle, listener, lambda: self.rows.is_pending)
        self.rows = RowProof(layers, batch_dim, self.checks)
        self.eager, self.compiled = EagerPasses(self), CompiledPasses(self)
        self.key = compiled.enrol(self)
        self.enabled = True
        self.sketching = True
        """False: forwards are counted, not sketched."""
        self.tapping = True
        """Both. The one flag that compiled code is guarded by: it has a sketched variant and a plain one."""
        self.notes_norms = False
        """The listener wants the norms of gradients at the model's output: its stamps have a place for them."""
        self._counted: Any = None
        """The stamp of the forward under way that is counted."""
        self.closed = False
        self.current: Slot | None = None
        self.running = False
        """A forward of the model is under way, and sketched."""
        self.lost = False
        """The newest forward's batch could not be told, so it has no pass."""
        self.replays = False
        """A checkpoint runs parts of forwards again."""
        self._scaler, self._is_compiled = scaler, is_compiled
        self._trains_in_eval = False
        """Backwards were seen of forwards in evaluation mode."""
        self._warned = False
        self._said = {LAYER_LEFT_OUT}  # which was said as it happened
        self._finished: list[Pass] = []
        self._count = 0

    # The forward under way

    def enter(self, slot: Slot) -> None:
        """A sketched forward begins."""
        self.current, self.running, self.lost = slot, True, False

    def hold(self, slot: Slot | None) -> None:
        """This is the newest forward, and it is not sketched; None: nor will any part of it run again."""
        self.current, self.running, self.lost = slot, False, False

    def leave(self) -> None:
        self.running = False

    def lose(self, batch: int | None) -> None:
        """A forward has no pass: its batch is empty, or (None) cannot be told."""
        self.current, self.running, self.lost = None, False, batch is None
        if batch is None:
            compiled.call(self.key, "warn_of_lost_batch")

    @property
    def runs_eagerly(self) -> bool:
        """Forwards were sketched, and neither compiled code nor a checkpoint was met in them.

        Compiled code has an unsketched variant of its own, and a checkpoint must find the hooks of its first run.
        """
        return self._count > 0 and not self._is_compiled and not self.replays

    def disturb(self) -> None:
        """Another thread begins a forward of the same model in the middle of one."""
        self.checks.taint()
        if self.current is not None:
            self.current.owner.spoil(TWO_THREADS)

    def note_replay(self) -> None:
        """A checkpoint will run parts of the forward again that has just ended."""
        self.replays = True

    def announce(self, slot: Slot) -> None:
        """A backward reaches a forward of which a checkpoint may run parts again, or a backward of its own."""
        self.current = slot
        at_end_of_backward(lambda: self._end_replay(slot))
        if self.checks.check is not None:
            (self.checks.check.taint if slot.ignored else self.checks.check.task)()

    def _end_replay(self, slot: Slot) -> None:
        """What runs from now on is no part of this forward."""
        if self.current is slot:
            self.current = None

    def count(self, model: nn.Module, batch: int) -> None:
        """A forward begins that is not sketched."""
        if self.compiled.announced:
            self.compiled.hush()
        elif (model.training or self._trains_in_eval) and not _is_rerun():
            self._counted = self.listener.forward_counted(batch)

    def want_norms(self, value: bool) -> None:
        self.notes_norms = value

    def note_norms(self, output: Any, stamp: Any = None) -> None:
        """A forward has ended: its backward is to leave the norms of gradients at its output in its stamp.

        stamp: of a sketched one; without, of the one that was counted last.
        """
        counted, self._counted = self._counted, None
        stamp = counted if stamp is None else stamp
        if self.notes_norms and stamp is not None:
            note_norms(output, stamp.rows * stamp.per.number, self.batch_dim, stamp, self._scaler)

    # Switches

    def enable(self, value: bool) -> None:
        """False: forwards from now on are neither sketched nor counted."""
        self.enabled = value and not self.closed
        self.tapping = self.enabled and self.sketching
        if not value and self.compiled.slots:  # compiled code cannot say that it runs unsketched
            self.checks.taint()

    def sketch(self, value: bool) -> None:
        """False: forwards from now on are counted and not sketched."""
        was, self.sketching, self.tapping = self.sketching, value, value and self.enabled
        if value != was and self._is_compiled:
            forget_sizes()
        if not value or self.closed:  # a look that is not through would miss the parts of forwards without taps
            self.checks.close()
            return
        self.checks.again()
        self.rows.again()  # what held in one epoch need not hold in the next
        if not self.compiled.slots:
            return
        if not was:
            self.compiled.forget_forwards()
            self.checks.taint()  # the first backward may be of a forward that ran unsketched
        self.checks.look(self.device)  # compiled code cannot say that it begins

    def move(self, device: torch.device) -> None:
        self.device = device
        self.eager.close()
        for layer in self.layers:
            layer.move(device)

    # While compiled code is traced: see `compiled.call`

    def prepare(self, capacity: int, kind: str, index: int) -> None:
        """The leaves must exist before the graph that uses them."""
        device = torch.device(kind) if index < 0 else torch.device(kind, index)
        if device != self.device:
            self.move(device)
        self.compiled.arm(capacity)

    def look(self) -> None:
        """Whether parts add up is looked at in the first backwards of what is being compiled."""
        self.checks.look(self.device)

    def note_half(self) -> None:
        """A layer computes in half precision."""
        self.checks.note_half()

    def meet_root(self) -> None:
        """The model's own hooks are being traced: nobody will be told as its forwards begin."""
        self._is_compiled = True
        self.compiled.count_backwards()

    def lend_leaf(self) -> None:
        """An eager pass has a leaf for the compiled code in it, and so does every one from now on."""
        self._is_compiled = True
        self.eager.lend_leaf()

    def warn_of_lost_batch(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "a forward has no sketch: its batch size cannot be told from its arguments. "
                "Pass batch_dim=lambda args, kwargs: batch_size"
            )

    def warn_of_failed_rule(self, layer: str) -> None:
        warn("%s is not sketched: its rule failed while it was compiled; print(sketcher.coverage) says how", layer)

    def close(self) -> None:
        """Nothing more is sketched, checked or counted, and nobody else's objects are held."""
        self.closed, self.enabled, self.tapping = True, False, False
        self.hold(None)
        self._finished.clear()
        self._counted = None
        self.listener, self._scaler = Nobody(), None
        self.checks.close(for_good=True)
        self.rows.close()
        self.eager.close()
        self.compiled.close()

    # Passes

    def new_pass(self, batch: int, shapes: list[torch.Size], stamp: Any, in_eval: bool = False) -> Pass:
        self._count += 1
        return Pass(self._count, Examples(batch, self.batch_dim, shapes), batch if self.mean else 1, stamp, in_eval)

    def collect(self, owner: Pass, leaf: Tensor, compiled: bool) -> None:
        """Take the gradient that a backward has just left in `leaf`.

        compiled: it may lie in the memory of a CUDA graph, whose next replay writes there again.
        """
        grad, leaf.grad = leaf.grad, None
        if grad is None or owner.popped or self.closed:
            return
        if grad.shape[0] != owner.examples.batch:
            grad = grad[: owner.examples.batch]
        if compiled:
            grad = grad.clone()
        if self.checks.check is not None:
            self.checks.check.add_leaf(owner, grad)
        else:
            self.file(owner, grad)

    def file(self, owner: Pass, sketch: Tensor) -> None:
        """A backward through a pass has ended: this is what it brought, (B, K)."""
        if self.closed:
            return
        self.checks.count_filed()
        self._trains_in_eval = self._trains_in_eval or owner.in_eval
        if self._scaler is not None:
            sketch = _unscaled(sketch, self._scaler)
        if owner.spoiled:
            sketch = _spoilt(sketch)
        if owner.finish(sketch):
            insort(self._finished, owner, key=lambda p: p.order)

    def _settle(self, owner: Pass, total: Tensor | None, fill: float) -> None:
        """File what was looked at, or rows of `fill` where nothing is left."""
        if total is None:
            total = torch.full((owner.examples.batch, self.dim), fill, device=self.device)
        self.file(owner, total)

    def pop(self) -> list[tuple[Any, Tensor]]:
        """The finished passes' stamps and sketches, (B_i, K) each, oldest forward first."""
        finished, self._finished = self._finished, []
        for why in {done.spoiled for done in finished} - {""} - self._said:
            self._said.add(why)
            warn("a backward pass was left out of the sketches: %s", why)
        return [(done.stamp, _spoilt(done.pop()) if done.spoiled else done.pop()) for done in finished]


def _is_rerun() -> bool:
    """Whether a checkpoint runs a forward again, in backward, that has run with gradients before.

    The reentrant kind runs it without gradients first; the other kind has hooks on what is saved.
    """
    return graph_task() != -1 and saving_hooks(True) is not None


def _spoilt(sketch: Tensor) -> Tensor:
    """Nobody stores what is not finite."""
    return torch.full_like(sketch, torch.nan)


def _unscaled(sketch: Tensor, scaler: Any) -> Tensor:
    """The sketch without the scaler's factor; this does not wait for the device."""
    if not scaler.is_enabled():
        return sketch
    scale = scaler.scale(torch.ones((), device=sketch.device))
    # A step with infinities is skipped: one non-finite number makes the whole batch non-finite, so that no row of it
    # is stored.
    return sketch / scale + sketch.sum() * 0.0
