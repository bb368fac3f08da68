"""Passes: one for each forward of the model, finished by the backward that puts a gradient into it.

Every pass has a leaf, a (B, K) tensor that requires gradients and whose values nobody reads; the taps of the forward
hang on it, and its gradient is the sketch. The autograd graph keeps the leaf alive and the leaf's hook keeps the
`Pass`; the log itself holds only the newest. So a forward whose graph dies without a backward takes its pass with it.

Eager forwards make their leaf as they start. Inside `torch.compile` no leaf can be made and no callback can run, so
leaves lie ready ("armed") in slots, the traced code takes slot 0, 1, ... and writes the batch size into it, and the
first gradient that arrives puts fresh leaves into all slots. Slots are as long as the largest batch seen, rounded up.
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


class Slot:
    """A pass together with its leaf."""

    def __init__(self, leaf: Tensor, owner: Pass) -> None:
        self.leaf, self.owner = leaf, owner
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
        slot.owner.batch = batch
        slot.examples = Examples(batch, self.batch_dim)
        if torch.is_autocast_enabled(device.type):
            slot.autocast = device.type
        self.current = slot
        self.running = True

    def open_traced(self, batch: int) -> None:
        """Start a pass inside a compiled forward: only operations that `torch.compile` can trace."""
        depth = self.depth
        slot = self.slots[depth]
        slot.owner.batch = batch
        slot.examples = Examples(batch, self.batch_dim)
        self.depth = min(depth + 1, SLOTS - 1)
        self.current = slot
        self.running = True

    def arm(self, capacity: int, device: torch.device) -> None:
        """Put a fresh leaf of `capacity` rows into every slot."""
        self.capacity, self.device = str(capacity), device
        self.slots = [self._slot(capacity, device, dense=True) for _ in range(SLOTS)]
        self.depth = 0

    def pop(self) -> list[Tensor]:
        """The finished passes' sketches, (B_i, K) each, oldest forward first."""
        finished, self._finished = self._finished, []
        sketches = []
        for done in finished:
            if done.sketch is not None:
                sketches.append(done.sketch)
            done.sketch, done.popped = None, True
        return sketches

    def _slot(self, rows: int, device: torch.device, dense: bool = False) -> Slot:
        if dense:
            leaf = torch.zeros(rows, self.dim, device=device)
        else:  # nobody reads the values: one number, expanded
            if self._blank.device != device:
                self._blank = torch.zeros((), device=device)
            leaf = self._blank.expand(rows, self.dim)
        leaf.requires_grad_()
        owner = Pass(self._count)
        self._count += 1
        leaf.register_post_accumulate_grad_hook(_Collector(weakref.ref(self), owner))
        return Slot(leaf, owner)

    def collect(self, owner: Pass, leaf: Tensor) -> None:
        """Take the gradient that a backward has just left in `leaf`."""
        grad, leaf.grad = leaf.grad, None
        if self.depth > 0 and self.slots:  # compiled forwards: tell of them now, before any of their sketches shows
            taken, self.depth = self.depth, 0
            self.arm(int(self.capacity), leaf.device)
            for _ in range(taken):
                if self.on_forward is not None:
                    self.on_forward()
        if grad is None or owner.popped:
            return
        sketch = self.rescale(grad[: owner.batch], owner.batch)
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
