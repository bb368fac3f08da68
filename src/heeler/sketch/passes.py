"""Passes: one for each forward of the model, finished by the backward that puts a gradient into it.

Every pass has a leaf, a (B, K) tensor that requires gradients and whose values nobody reads; the taps of the forward
hang on it, and its gradient is the sketch. The autograd graph keeps the leaf alive and the leaf's hook keeps the
`Pass`; the log itself holds only the newest. So a forward whose graph dies without a backward takes its pass with it.

Eager forwards make their leaf as they start. Inside `torch.compile` no leaf can be made and no callback can run, so
leaves lie ready ("armed") in slots, the traced code takes slot 0, 1, ... and writes the batch size into it, and the
first gradient that arrives begins the passes and frees the slots. Slots are as long as the largest batch seen, rounded
up. A second backward through a compiled forward must come before the next forward; else it counts for that one.
"""

from __future__ import annotations

import weakref
from bisect import insort
from collections.abc import Callable

import torch
from torch import Tensor

from heeler.sketch.rules.base import Examples

SLOTS = 4
"""Forwards of a compiled model before one backward that are kept apart; each depth is compiled once."""


class Pass:
    """What is known of one forward. Must not refer to its leaf: the leaf's hook refers to the pass."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.batch = 0
        self.sketch: Tensor | None = None
        self.popped = False
        self.examples: Examples | None = None


class Slot:
    """A pass together with its leaf."""

    def __init__(self, leaf: Tensor, owner: Pass) -> None:
        self.leaf, self.owner = leaf, owner
        self.batch = 0
        """Examples of the compiled forward that took this slot last."""
        self.taken = False
        """A compiled forward took this slot, and its first gradient has not arrived."""
        self.examples: Examples | None = None
        self.replayed = False
        """A checkpoint will run parts of this forward again in backward."""
        self.autocast: str | None = None
        """The device type for which autocast was on as the forward began."""


class PassLog:
    """Opens passes, collects their gradients, hands them out in forward order."""

    def __init__(
        self, dim: int, device: torch.device, batch_dim: int, rescale: Callable[[Tensor, int], Tensor]
    ) -> None:
        self.dim, self.device, self.batch_dim, self.rescale = dim, device, batch_dim, rescale
        self._blank = torch.zeros((), device=device)
        self.on_forward: Callable[[], None] | None = None
        self.on_backward: Callable[[], None] | None = None
        self.enabled = True
        self.current: Slot | None = None
        self.lost = False
        """The newest forward's batch could not be told, so it has no pass."""
        self.running = False
        """A root forward is under way."""
        self.slots: list[Slot] = []
        self.capacity = "0"
        """Rows of the slots' leaves; a string, since torch.compile would turn a number that changes into a symbol."""
        self.depth = 0
        """Slots taken by compiled forwards since the last gradient."""
        self._finished: list[Pass] = []
        self._count = 0

    def open(self, batch: int, device: torch.device) -> None:
        """Start an eager pass of `batch` examples."""
        if self.on_forward is not None:
            self.on_forward()
        slot = self._slot(batch, device)
        slot.examples = slot.owner.examples = Examples(batch, self.batch_dim)
        if device.type == "cuda":
            slot.examples.stream = torch._C._cuda_getCurrentRawStream(device.index)
        if torch.is_autocast_enabled(device.type):
            slot.autocast = device.type
        self.current = slot
        self.running = True

    def open_traced(self, batch: int) -> None:
        """Start a pass inside a compiled forward: only operations that `torch.compile` can trace."""
        depth = self.depth
        slot = self.slots[depth]
        slot.batch, slot.taken = batch, True
        slot.examples = Examples(batch, self.batch_dim)
        self.depth = min(depth + 1, SLOTS - 1)
        self.current = slot
        self.running = True

    def arm(self, capacity: int, device: torch.device) -> None:
        """Put a fresh leaf of `capacity` rows into every slot."""
        self.capacity, self.device = str(capacity), device
        self.slots = []
        for i in range(SLOTS):
            leaf = torch.empty(capacity, self.dim, device=device)  # nobody reads the values
            torch._dynamo.mark_static_address(leaf)  # nor need CUDA graphs copy them
            leaf.requires_grad_()
            leaf.register_post_accumulate_grad_hook(_SlotCollector(weakref.ref(self), i))
            self.slots.append(Slot(leaf, Pass(-1)))
        self.depth = 0

    def collect_slot(self, index: int, leaf: Tensor) -> None:
        """The same for a compiled forward. The first gradient after forwards begins the passes of all of them."""
        if index >= len(self.slots) or self.slots[index].leaf is not leaf:
            leaf.grad = None  # of before the slots grew
            return
        if self.slots[index].taken:
            taken, self.depth = self.depth, 0
            for slot in self.slots:
                if slot.taken:
                    slot.taken = False
                    slot.owner = self._pass(slot.batch)
            for _ in range(taken):
                if self.on_forward is not None:
                    self.on_forward()
        self.collect(self.slots[index].owner, leaf)

    def _pass(self, batch: int) -> Pass:
        owner = Pass(self._count)
        owner.batch = batch
        self._count += 1
        return owner

    def pop(self) -> list[Tensor]:
        """The finished passes' sketches, (B_i, K) each, oldest forward first."""
        finished, self._finished = self._finished, []
        sketches = []
        for done in finished:
            if done.sketch is not None:
                sketches.append(done.sketch)
            done.sketch, done.popped = None, True
        return sketches

    def _slot(self, rows: int, device: torch.device) -> Slot:
        if self._blank.device != device:
            self._blank = torch.zeros((), device=device)
        leaf = self._blank.expand(rows, self.dim)  # nobody reads the values: one number, expanded
        leaf.requires_grad_()
        owner = self._pass(rows)
        leaf.register_post_accumulate_grad_hook(_Collector(weakref.ref(self), owner))
        return Slot(leaf, owner)

    def collect(self, owner: Pass, leaf: Tensor) -> None:
        """Take the gradient that a backward has just left in `leaf`."""
        grad, leaf.grad = leaf.grad, None
        parts = None
        if owner.examples is not None:
            parts, owner.examples.parts = owner.examples.parts, None
        if grad is None or owner.popped:
            return
        if grad.shape[0] != owner.batch:
            grad = grad[: owner.batch]
        sketch = self.rescale(grad if parts is None else grad + parts.sum(1), owner.batch)
        if owner.sketch is None:
            owner.sketch = sketch
            if self._finished and self._finished[-1].order > owner.order:
                insort(self._finished, owner, key=lambda p: p.order)
            else:
                self._finished.append(owner)
        else:
            owner.sketch = owner.sketch + sketch
        if self.on_backward is not None:
            self.on_backward()


class _SlotCollector:
    """The hook of a slot's leaf, likewise."""

    def __init__(self, log: weakref.ref[PassLog], index: int) -> None:
        self.log, self.index = log, index

    def __call__(self, leaf: Tensor) -> None:
        log = self.log()
        if log is not None:
            log.collect_slot(self.index, leaf)
        else:
            leaf.grad = None


class _Collector:
    """The leaf's hook. It must not keep the log alive: the log's newest leaf keeps the hook."""

    def __init__(self, log: weakref.ref[PassLog], owner: Pass) -> None:
        self.log, self.owner = log, owner

    def __call__(self, leaf: Tensor) -> None:
        log = self.log()
        if log is not None:
            log.collect(self.owner, leaf)
        else:
            leaf.grad = None
