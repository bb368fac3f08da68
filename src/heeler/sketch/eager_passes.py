"""Passes of forwards that run eagerly: hooks on autograd's nodes add up their sketches while backward runs."""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from heeler.sketch.examples import Sums, tensors_in
from heeler.sketch.passes import Pass, Slot
from heeler.torch_private import at_end_of_backward, current_stream, mark_static, source_of

if TYPE_CHECKING:
    from heeler.sketch.recorder import Recorder

TWO_THREADS = "two threads ran the model at once, so it is not known which layer's call belongs to which"
SIZES = 8
"""Batch sizes whose leaves are kept for compiled code."""


class EagerPasses:
    """The hooks on a forward's nodes hold its `Pass`, so that a graph that dies without a backward takes it along."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.thread = 0
        """The thread whose forward is under way."""
        self._needs_leaves = False
        """There is compiled code inside the forward: it finds its leaf when it runs."""
        self._spare: dict[int, list[tuple[Tensor, _Collector]]] = {}
        """Leaves that such passes have done with, by their rows: CUDA graphs want to see the same ones again."""

    def begin(self, model: nn.Module, batch: int, inputs: Tensor | None) -> None:
        recorder, thread = self.recorder, get_ident()
        disturbed = recorder.running and self.thread != thread
        if disturbed:  # two threads are in one model: the layers of one would be taken for the other's
            recorder.disturb()
        stamp = recorder.compiled.announced_stamp() if recorder.compiled.announced else None
        if stamp is None:
            stamp = (recorder.listener.forward_begins(batch, inputs),)
        owner = recorder.new_pass(batch, [] if inputs is None else [inputs.shape], stamp[0], not model.training)
        if disturbed:
            owner.spoil(TWO_THREADS)
        elif not recorder.rows.can_split:
            owner.spoil("all examples of its batch are equal, which does not tell whose rows the layers see")
        recorder.checks.look(recorder.device)
        slot, kind = Slot(None, owner), recorder.device.type
        if kind == "cuda" or torch.is_autocast_enabled(kind):
            slot.under(kind if torch.is_autocast_enabled(kind) else None, current_stream(recorder.device))
        if self._needs_leaves:
            self._lend_leaf(slot)
        self.thread = thread
        recorder.enter(slot)

    def ignore(self) -> None:
        """A forward begins that is paused."""
        self.recorder.checks.taint()
        self.recorder.hold(Slot(None, self.recorder.new_pass(0, [], None), ignored=True))

    def end(self, output: Any) -> None:
        recorder, slot = self.recorder, self.recorder.current
        recording = recorder.rows.stop() if recorder.rows.recording is not None else None
        if output is None:  # the forward failed
            recorder.rows.forget()
        if slot is None or not (slot.ignored or (recorder.running and self.thread == get_ident())):
            return
        recorder.leave()
        if slot.replayed:
            recorder.note_replay()
        if not slot.ignored and output is not None:
            recorder.rows.end(recording, slot.owner, tensors_in(output))
        if slot.replayed or slot.ignored:
            for node in {source_of(tensor) for tensor in tensors_in(output)} - {None}:
                node.register_prehook(lambda grads: recorder.announce(slot))

    def leaf(self, slot: Slot) -> Tensor:
        if slot.leaf is not None:
            return slot.leaf
        recorder = self.recorder  # of one number: nobody reads it
        leaf = torch.zeros((), device=recorder.device).expand(slot.examples.batch, recorder.dim).requires_grad_()
        leaf.register_post_accumulate_grad_hook(_Collector(recorder, slot.owner))
        return slot.lend(leaf)

    def reach(self, owner: Pass, task: int, device: torch.device, into_grad: bool) -> None:
        """A pass gets its first gradient in a backward. into_grad: it is added to `.grad`, so that it counts."""
        recorder = self.recorder
        check = recorder.checks.check
        counts = into_grad and not owner.popped and not recorder.closed
        owner.reach(task, counts)
        if owner.popped and into_grad and check is not None:
            check.taint()
        if counts and check is None:
            sums = Sums(owner.examples.batch, recorder.dim, owner.factor, device)
            owner.examples.add_to(sums)  # a new one: a backward that did not come to its end may have left some
            at_end_of_backward(lambda: recorder.file(owner, sums.take()))
        elif counts:
            owner.examples.add_to(None)

    def lend_leaf(self) -> None:
        """Compiled code is being traced inside a forward: give it its leaf now, and from now on as a forward begins."""
        slot = self.recorder.current
        if slot is not None and slot.leaf is None:
            self._needs_leaves = True
            self._lend_leaf(slot)

    def _lend_leaf(self, slot: Slot) -> None:
        """One that the compiled code has seen before, if there is one."""
        batch = slot.examples.batch
        if self._spare.get(batch):
            leaf, collector = self._spare[batch].pop(0)
            collector.serve(slot.owner)
            slot.lend(leaf)
            return
        if len(self._spare) >= SIZES:
            self._spare.clear()
        leaf = static_leaf(batch, self.recorder.dim, self.recorder.device)
        leaf.register_post_accumulate_grad_hook(_Collector(self.recorder, slot.owner, batch))
        slot.lend(leaf)

    def take_back(self, leaf: Tensor, collector: _Collector) -> None:
        """A leaf has its gradient: the next pass may have it."""
        spare = self._spare.setdefault(collector.rows, [])
        if all(leaf is not other for other, _ in spare):
            spare.append((leaf, collector))

    def close(self) -> None:
        self._spare.clear()


def static_leaf(rows: int, dim: int, device: torch.device) -> Tensor:
    """A leaf that compiled code may hold: always in the same place."""
    leaf = torch.empty(rows, dim, device=device)  # nobody reads the values
    mark_static(leaf)  # nor need CUDA graphs copy them
    return leaf.requires_grad_()


class _Collector:
    """The leaf's hook. It must not keep the recorder alive: the recorder's newest leaf keeps the hook.

    rows: of a leaf that is lent again once it has its gradient; 0 for others.
    """

    def __init__(self, recorder: Recorder, owner: Pass, rows: int = 0) -> None:
        self.recorder, self.owner, self.rows = weakref.ref(recorder), owner, rows

    def serve(self, owner: Pass) -> None:
        self.owner = owner

    def __call__(self, leaf: Tensor) -> None:
        recorder = self.recorder()
        if recorder is None:
            leaf.grad = None
            return
        recorder.collect(self.owner, leaf, compiled=bool(self.rows))
        if self.rows and not recorder.closed:
            recorder.eager.take_back(leaf, self)
