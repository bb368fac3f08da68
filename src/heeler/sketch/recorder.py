"""Passes: one per forward of the model, finished by the backward that puts a gradient into it.

In eager mode the hooks on a forward's autograd nodes (see `layer_hooks`) hold its `Pass`, and add up the sketch in
place while backward runs; as that ends, the pass is finished. The recorder itself holds only the newest pass, so a
forward whose graph dies without a backward takes its pass with it.

Taps need a leaf, a (B, K) tensor that requires gradients and whose values nobody reads: they hang on it, and its
gradient is their sketch. Inside `torch.compile` no leaf can be made and nobody can be told, so leaves lie ready
("armed") in slots, the traced code takes slot 0, 1, ... and writes the batch size into it, and the first gradient that
arrives begins the passes and frees the slots. Slots are as long as the largest batch seen, rounded up. A second
backward through a compiled forward must come before the next forward; else it counts for that one.
"""

from __future__ import annotations

import weakref
from bisect import insort
from typing import Any

import torch
from torch import Tensor, nn

from heeler.notices import warn
from heeler.sketch import compiled
from heeler.sketch.checks import Checks
from heeler.sketch.examples import Examples, Sums, current_stream
from heeler.sketch.listener import SketchListener
from heeler.sketch.passes import Pass, Slot
from heeler.sketch.sketched_layer import SketchedLayer

SIZES = 8
"""Batch sizes whose leaves are kept."""
SLOTS = 4
"""Forwards of a compiled model before one backward that are kept apart; each depth is compiled once."""

_at_end_of_backward = torch.autograd.Variable._execution_engine.queue_callback


class Recorder:
    """Opens passes, collects their gradients, hands them out in forward order.

    layers: the sketched ones, which move to another device with it. mean: the loss is a mean over the batch, so that a
    sketch is multiplied by the batch's size. scaler: the GradScaler whose factor is taken out. listener: this is the
    only reference to it.
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
    ) -> None:
        self.checks = Checks(model, layers, exact, batch_dim, self._settle, listener)
        self.layers, self.dim, self.device, self.batch_dim = layers, dim, device, batch_dim
        self.mean, self.scaler, self.exact, self.listener = mean, scaler, exact, listener
        self.trains_in_eval = False
        """Backwards were seen of forwards in evaluation mode."""
        self.stamps: list[Any] = []
        """Of compiled forwards whose gradients have not come."""
        self.key = compiled.enrol(self)
        self.enabled = True
        self.sketching = True
        """False: forwards are counted, not sketched."""
        self.tapping = True
        """Both. The one flag that compiled code is guarded by: it has a sketched variant and an unsketched one."""
        self.is_compiled = False
        """There is compiled code of the model, or will be."""
        self.hears_forwards = False
        """Somebody outside the compiled code is told as its forwards begin."""
        self.announced = False
        """The forward under way was, and may run the model's own hooks outside the compiled code, too."""
        self._counter: compiled.BackwardCounter | None = None
        self.current: Slot | None = None
        self.lost = False
        """The newest forward's batch could not be told, so it has no pass."""
        self._warned = False
        self.running = False
        """A root forward is under way."""
        self.needs_leaves = False
        """There is compiled code inside the eager forward: it finds its leaf when it runs."""
        self._spare: dict[int, list[tuple[Tensor, _Collector]]] = {}
        """Leaves that such passes have done with, by their rows: CUDA graphs want to see the same ones again."""
        self.slots: list[Slot] = []
        self.capacity = "0"
        """Rows of the slots' leaves; a string, since torch.compile would turn a number that changes into a symbol."""
        self.depth = 0
        """Slots taken by compiled forwards since the last gradient."""
        self._finished: list[Pass] = []
        self._count = 0

    def move(self, device: torch.device) -> None:
        self.device = device
        self._spare.clear()
        for layer in self.layers:
            layer.move(device)

    def warn_of_lost_batch(self) -> None:
        if not self._warned:
            self._warned = True
            warn(
                "a forward has no sketch: its batch size cannot be told from its arguments. "
                "Pass batch_dim=lambda args, kwargs: batch_size"
            )

    def enable(self, value: bool) -> None:
        """False: forwards from now on are neither sketched nor counted."""
        self.enabled, self.tapping = value, value and self.sketching
        if not value and self.slots:  # compiled code cannot say that it runs unsketched
            self.checks.taint()

    def sketch(self, value: bool) -> None:
        """False: forwards from now on are counted and not sketched."""
        was, self.sketching, self.tapping = self.sketching, value, value and self.enabled
        if value != was and self.is_compiled:
            compiled.forget_sizes()
        if not value:  # a look that is not through would miss the parts of forwards that nobody taps
            self.checks.close()
            return
        self.checks.again()  # what held in one epoch need not hold in the next
        if not self.slots:
            return
        if not was:
            self._forget_forwards()
            self.checks.taint()  # the first backward may be of a forward that ran unsketched
        self.checks.look(self.device)  # compiled code cannot say that it begins

    def _forget_forwards(self) -> None:
        """Compiled forwards whose gradients have not come by now have none: later ones take the first slot again."""
        self.stamps.clear()
        self.depth = 0
        for slot in self.slots:
            slot.taken = False

    def _settle(self, owner: Pass, total: Tensor | None, fill: float) -> None:
        """File what was looked at, or rows of `fill` where nothing is left."""
        if total is None:
            total = torch.full((owner.examples.batch, self.dim), fill, device=self.device)
        self._file(owner, total)

    def count(self, model: nn.Module, batch: int) -> None:
        """A forward begins that is not sketched."""
        if self.announced:
            self.announced = False
        elif (model.training or self.trains_in_eval) and not _is_rerun():
            self.listener.forward_counted(batch)

    def count_backwards(self) -> None:
        """The model's own hooks are compiled: forwards that are not sketched are counted as their backwards come."""
        self.is_compiled = True
        if self._counter is None and not self.hears_forwards:
            covered = [p for layer in self.layers for p in layer.now().values() if p.requires_grad]
            if covered:
                self._counter = compiled.BackwardCounter(self, covered[-1])

    def detach(self) -> None:
        """Nothing more is sketched, checked or counted."""
        self.checks.close()
        self.current = None
        if self._counter is not None:
            self._counter.remove()
            self._counter = None

    # Eager passes

    def open(self, model: nn.Module, batch: int, shapes: list[torch.Size], found: Tensor | None) -> None:
        """Start an eager pass of `batch` examples."""
        stamp = self.stamps.pop() if self.announced and self.stamps else self.listener.forward_begins(batch, found)
        self.announced = False
        slot = Slot(None, self._new_pass(batch, shapes))
        slot.owner.stamp, slot.owner.in_eval, slot.owner.spoiled = stamp, not model.training, not self.checks.can_split
        self.checks.look(self.device)
        kind = self.device.type
        if kind == "cuda":
            slot.stream = current_stream(self.device)
        if torch.is_autocast_enabled(kind):
            slot.autocast = kind
        if self.needs_leaves:
            self.lend_leaf(slot)
        self.current = slot
        self.running = True

    def begin(self, owner: Pass, task: int, device: torch.device, into_grad: bool) -> bool:
        """A pass gets its first gradient in a backward: whether it counts. into_grad: it is added to `.grad`."""
        owner.task, owner.counts = task, not owner.popped and into_grad
        if owner.popped and into_grad and self.checks.check is not None:
            self.checks.check.taint()
        if owner.counts and self.checks.check is None:
            sums = Sums(owner.examples.batch, self.dim, owner.factor, device)
            owner.examples.sums = sums  # a new one: a backward that did not come to its end may have left some
            _at_end_of_backward(lambda: self._file(owner, sums.take()))
        elif owner.counts:
            owner.examples.sums = None
        return owner.counts

    def add_leaf(self, slot: Slot) -> Tensor:
        """Give the taps of an eager pass their leaf."""
        leaf = torch.zeros((), device=self.device).expand(slot.examples.batch, self.dim)  # one number: nobody reads it
        leaf.requires_grad_()
        leaf.register_post_accumulate_grad_hook(_Collector(self, slot.owner))
        slot.leaf = leaf
        return leaf

    def announce(self, slot: Slot) -> None:
        """A backward begins in which a checkpoint will run parts of a forward again, or a backward of its own."""
        self.current = slot
        if self.checks.check is not None:
            self.checks.check.task()

    def lend_leaf(self, slot: Slot) -> None:
        """Give the compiled code in an eager pass its leaf, one that it has seen before if there is one."""
        batch = slot.examples.batch
        if self._spare.get(batch):
            slot.leaf, collector = self._spare[batch].pop(0)
            collector.owner = slot.owner
            return
        if len(self._spare) >= SIZES:
            self._spare.clear()
        slot.leaf = self._static_leaf(batch)
        slot.leaf.register_post_accumulate_grad_hook(_Collector(self, slot.owner, batch))

    def take_back(self, leaf: Tensor, collector: _Collector) -> None:
        """A leaf has its gradient: the next pass may have it."""
        spare = self._spare.setdefault(collector.rows, [])
        if all(leaf is not other for other, _ in spare):
            spare.append((leaf, collector))

    def _static_leaf(self, rows: int) -> Tensor:
        leaf = torch.empty(rows, self.dim, device=self.device)  # nobody reads the values
        torch._dynamo.mark_static_address(leaf)  # nor need CUDA graphs copy them
        return leaf.requires_grad_()

    # Compiled passes

    def begin_compiled(self, batch: int, found: Tensor | None) -> None:
        """A compiled forward is about to run: its stamp waits for the first gradient."""
        self.stamps.append(self.listener.forward_begins(batch, found))
        del self.stamps[:-SLOTS]
        self.checks.look(self.device)

    def open_traced(self, batch: int, shapes: list[torch.Size]) -> None:
        """Start a pass inside a compiled forward: only operations that `torch.compile` can trace."""
        depth = self.depth
        slot = self.slots[depth]
        slot.batch, slot.taken = batch, True
        slot.examples = Examples(batch, self.batch_dim, shapes)
        self.depth = min(depth + 1, SLOTS - 1)
        self.current = slot
        self.running = True

    def close_traced(self, slot: Slot) -> None:
        """End it. Whatever is new and still referred to here is built again after every run of the compiled code."""
        slot.examples = slot.owner.examples

    def arm(self, capacity: int) -> None:
        """Put a fresh leaf of `capacity` rows into every slot."""
        self.capacity = str(capacity)
        self.slots = []
        for i in range(SLOTS):
            leaf = self._static_leaf(capacity)
            leaf.register_post_accumulate_grad_hook(_SlotCollector(self, i))
            self.slots.append(Slot(leaf, self._new_pass(0, [])))
        self.depth = 0

    def collect_slot(self, index: int, leaf: Tensor) -> None:
        """`collect` for a compiled forward. The first gradient after forwards begins the passes of all of them."""
        if index >= len(self.slots) or self.slots[index].leaf is not leaf:
            leaf.grad = None  # of before the slots grew
            return
        if self.slots[index].taken:
            self.depth = 0
            for slot in self.slots:
                if slot.taken:
                    slot.taken = False
                    slot.owner = self._new_pass(slot.batch, [])
                    stamped = bool(self.stamps)
                    slot.owner.stamp = self.stamps.pop(0) if stamped else self.listener.forward_begins(slot.batch, None)
        self.collect(self.slots[index].owner, leaf, compiled=True)

    # Both

    def collect(self, owner: Pass, leaf: Tensor, compiled: bool) -> None:
        """Take the gradient that a backward has just left in `leaf`.

        compiled: it may lie in the memory of a CUDA graph, whose next replay writes there again.
        """
        grad, leaf.grad = leaf.grad, None
        if grad is None or owner.popped:
            return
        if grad.shape[0] != owner.examples.batch:
            grad = grad[: owner.examples.batch]
        if compiled:
            grad = grad.clone()
        if self.checks.check is not None:
            self.checks.check.add_leaf(owner, grad)
        else:
            self._file(owner, grad)

    def pop(self) -> list[tuple[Any, Tensor]]:
        """The finished passes' stamps and sketches, (B_i, K) each, oldest forward first."""
        finished, self._finished = self._finished, []
        found = []
        for done in finished:
            if done.sketch is not None:
                found.append((done.stamp, done.sketch))
            done.sketch, done.popped = None, True
        return found

    def _new_pass(self, batch: int, shapes: list[torch.Size]) -> Pass:
        self._count += 1
        return Pass(self._count, Examples(batch, self.batch_dim, shapes), batch if self.mean else 1)

    def _file(self, owner: Pass, sketch: Tensor) -> None:
        self.checks.filed += 1
        self.trains_in_eval = self.trains_in_eval or owner.in_eval
        sketch = _unscaled(sketch, self.scaler)
        if owner.spoiled:
            sketch = torch.full_like(sketch, torch.nan)
        if owner.sketch is None:
            owner.sketch = sketch
            insort(self._finished, owner, key=lambda p: p.order)
        else:
            owner.sketch = owner.sketch + sketch


def _is_rerun() -> bool:
    """Whether a checkpoint runs a forward again, in backward, that has run with gradients before.

    The reentrant kind runs it without gradients first; the other kind has hooks on what is saved.
    """
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _unscaled(sketch: Tensor, scaler: Any) -> Tensor:
    """The sketch without the scaler's factor; this does not wait for the device."""
    if scaler is None or not scaler.is_enabled():
        return sketch
    scale = scaler.scale(torch.ones((), device=sketch.device))
    # A step with infinities is skipped: one non-finite number makes the whole batch non-finite, so that no row of it
    # is stored.
    return sketch / scale + sketch.sum() * 0.0


class _Collector:
    """The leaf's hook. It must not keep the recorder alive: the recorder's newest leaf keeps the hook.

    rows: of a leaf that is lent again once it has its gradient; 0 for others.
    """

    def __init__(self, recorder: Recorder, owner: Pass, rows: int = 0) -> None:
        self.recorder, self.owner, self.rows = weakref.ref(recorder), owner, rows

    def __call__(self, leaf: Tensor) -> None:
        recorder = self.recorder()
        if recorder is None:
            leaf.grad = None
            return
        recorder.collect(self.owner, leaf, compiled=bool(self.rows))
        if self.rows:
            recorder.take_back(leaf, self)


class _SlotCollector:
    """The hook of a slot's leaf, likewise."""

    def __init__(self, recorder: Recorder, index: int) -> None:
        self.recorder, self.index = weakref.ref(recorder), index

    def __call__(self, leaf: Tensor) -> None:
        recorder = self.recorder()
        if recorder is None:
            leaf.grad = None
        else:
            recorder.collect_slot(self.index, leaf)
