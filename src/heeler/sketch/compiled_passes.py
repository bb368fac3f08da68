"""Passes of compiled forwards: leaves lie ready in slots, since compiled code can make none and tell nobody.

The traced code takes slot 0, 1, ... and writes the batch size into it. The first gradient that arrives begins the
passes and frees the slots. Slots are as long as the largest batch seen, rounded up. A second backward through a
compiled forward must come before the next forward; else it counts for that one.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from heeler.sketch import compiled
from heeler.sketch.eager_passes import static_leaf
from heeler.sketch.examples import Examples
from heeler.sketch.passes import Slot
from heeler.torch_private import accumulator

if TYPE_CHECKING:
    from heeler.sketch.recorder import Recorder

SLOTS = 4
"""Forwards of a compiled model before one backward that are kept apart; each depth is compiled once."""


class CompiledPasses:
    """`begin`, `end` and `leaf` are traced, so they do only what the compiler can trace."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.slots: list[Slot] = []
        self.capacity = "0"
        """Rows of the slots' leaves; a string, since the compiler would turn a number that changes into a symbol."""
        self.depth = 0
        """Slots taken by compiled forwards since the last gradient."""
        self._stamps: list[Any] = []
        """Of compiled forwards whose gradients have not come."""
        self._hears_forwards = False
        """A hook outside the compiled code is told as its forwards begin."""
        self.announced = False
        """It was told of the forward under way, which may run the model's own hooks outside the compiled code, too."""
        self._counter: _BackwardCounter | None = None

    # Traced

    def begin(self, model: nn.Module, batch: int, inputs: Tensor | None) -> None:
        recorder = self.recorder
        device = recorder.device if inputs is None else inputs.device
        armed = capacity = int(self.capacity)
        while batch > capacity:
            capacity = max(8, 2 * capacity)
        if capacity > armed or device != recorder.device:
            index = -1 if device.index is None else device.index
            compiled.call(recorder.key, "prepare", capacity, device.type, index)
        compiled.call(recorder.key, "look")
        depth = self.depth
        slot = self.slots[depth]
        slot.take(batch, Examples(batch, recorder.batch_dim, [] if inputs is None else [inputs.shape]))
        self.depth = min(depth + 1, SLOTS - 1)
        recorder.enter(slot)

    def end(self, output: Any) -> None:
        slot = self.recorder.current
        if slot is not None:
            self.recorder.leave()
            slot.rest()

    def leaf(self, slot: Slot) -> Tensor:
        assert slot.leaf is not None
        return slot.leaf

    # Outside the compiled code

    def listen(self) -> None:
        """From now on a hook outside says when a forward begins."""
        self._hears_forwards = True

    def announce(self, batch: int, inputs: Tensor | None) -> None:
        """A compiled forward is about to run: its stamp waits for the first gradient."""
        self.announced = True
        if self.recorder.sketching:
            self._stamps.append(self.recorder.listener.forward_begins(batch, inputs))
            del self._stamps[:-SLOTS]
            self.recorder.checks.look(self.recorder.device)

    def announced_stamp(self) -> tuple[Any] | None:
        """The stamp of a forward that was announced and turns out to run eagerly; None where it was not."""
        announced, self.announced = self.announced, False
        return (self._stamps.pop(),) if announced and self._stamps else None

    @property
    def newest_stamp(self) -> Any:
        """Of the forward that was announced, if it is sketched and ran compiled."""
        return self._stamps[-1] if self.announced and self._stamps and self.recorder.sketching else None

    def hush(self) -> None:
        """No announced forward is under way any more."""
        self.announced = False

    def arm(self, capacity: int) -> None:
        """Put a fresh leaf of `capacity` rows into every slot."""
        recorder = self.recorder
        self.capacity, self.slots, self.depth = str(capacity), [], 0
        for i in range(SLOTS):
            leaf = static_leaf(capacity, recorder.dim, recorder.device)
            leaf.register_post_accumulate_grad_hook(_SlotCollector(recorder, i))
            self.slots.append(Slot(leaf, recorder.new_pass(0, [], None)))

    def collect(self, index: int, leaf: Tensor) -> None:
        """A slot's leaf has a gradient. The first one after forwards begins the passes of all of them."""
        recorder = self.recorder
        if index >= len(self.slots) or self.slots[index].leaf is not leaf:
            leaf.grad = None  # of before the slots grew
            return
        if self.slots[index].taken:
            self.depth = 0
            for slot in self.slots:
                if slot.taken:
                    stamp = self._stamps.pop(0) if self._stamps else recorder.listener.forward_begins(slot.batch, None)
                    slot.free(recorder.new_pass(slot.batch, [], stamp))
        recorder.collect(self.slots[index].owner, leaf, compiled=True)

    def forget_forwards(self) -> None:
        """Forwards whose gradients have not come by now have none: later ones take the first slot again."""
        self._stamps.clear()
        self.depth = 0
        for slot in self.slots:
            slot.free()

    def count_backwards(self) -> None:
        """The model's own hooks are compiled: forwards that are not sketched are counted as their backwards come."""
        if self._counter is None and not self._hears_forwards:
            covered = [p for layer in self.recorder.layers for p in layer.now().values() if p.requires_grad]
            if covered:
                self._counter = _BackwardCounter(self.recorder, covered[-1])

    def close(self) -> None:
        self.slots, self.depth = [], 0
        self._stamps.clear()
        if self._counter is not None:
            self._counter.remove()
            self._counter = None


class _SlotCollector:
    """The hook of a slot's leaf. It must not keep the recorder alive."""

    def __init__(self, recorder: Recorder, index: int) -> None:
        self.recorder, self.index = weakref.ref(recorder), index

    def __call__(self, leaf: Tensor) -> None:
        recorder = self.recorder()
        if recorder is None:
            leaf.grad = None
        else:
            recorder.compiled.collect(self.index, leaf)


class _BackwardCounter:
    """Counts backwards where nobody is told of forwards: see `SketchListener.forward_counted`.

    By a hook on the node that adds to one parameter's `.grad`, which no compiled code holds.
    """

    def __init__(self, recorder: Recorder, parameter: nn.Parameter) -> None:
        self._recorder = weakref.ref(recorder)
        self._node = accumulator(parameter)
        self._handle = self._node.register_prehook(self)

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        recorder = self._recorder()
        if recorder is not None and recorder.enabled and not recorder.sketching:
            recorder.listener.forward_counted(None)

    def remove(self) -> None:
        self._handle.remove()
