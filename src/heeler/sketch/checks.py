"""When to look whether the examples' parts add up, and what follows: see `checksum`.

A layer of which it is found that they are not is left out, said once, and what it gave to earlier sketches is taken
back. Steps in which nothing is looked at cost nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from heeler.notices import warn
from heeler.sketch.checksum import Checksum, Outcome
from heeler.sketch.passes import Nobody, Pass, SketchListener
from heeler.sketch.sketched_layer import SketchedLayer, leave_out
from heeler.sketch.survey import tied_groups

CHECKS = 2
"""Backwards at the start of the first sketched epoch of which it is looked whether their parts add up."""
NOT_ALL = (
    "the examples' parts do not add up to its gradient, so a part of it does not come through the layer's own calls (a "
    "forward of its own, a weight used without its layer, a hook, a second derivative, or a loss outside the model)"
)
NOT_CALLED = "its weight is used without calling %s, so no hook sees that part of the gradient"
LAYER_LEFT_OUT = "a layer was left out while it was under way"
LOOKS = 10
"""Backwards at most, where some prove nothing: infinities, or a forward that was not sketched on purpose."""


class Checks:
    """Of one recorder. file: takes a pass's verified sum, or None and what to fill its rows with.

    is_pending: whether layers have no part in a backward that runs now, on purpose.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: list[SketchedLayer],
        exact: bool,
        file: Callable[[Pass, Tensor | None, float], None],
        listener: SketchListener,
        is_pending: Callable[[], bool],
    ) -> None:
        self._model = weakref.ref(model)
        self.layers, self.exact, self._file, self.listener = layers, exact, file, listener
        self._is_pending = is_pending
        self.check: Checksum | None = None
        """Whether parts add up, while that is looked at."""
        self.in_half = False
        """Some layer computes in half precision."""
        self.filed = 0
        """Sketches since a layer was left out."""
        self._checks_left, self._looks_left = CHECKS, LOOKS
        self._tainted = False
        self._strikes = 0
        self._looked = (3, 5)
        """The sketches of this epoch after which was looked, the last two: the next one is their sum."""
        self._in_epoch = 0
        self._late = False
        """What is looked at now is not the epoch's first backward."""
        self._twice = False
        """The backward to come holds second derivatives."""
        self._in_some_steps = False
        """Parts have been seen not to add up in some steps: every step is looked at."""
        self._said = False

    def spoil(self, owner: Pass) -> None:
        """A layer was left out while a pass was under way: its sketch is not filed, unless it is looked at anyway."""
        if self.check is None:
            owner.spoil(LAYER_LEFT_OUT)
        self.left_out()

    def again(self) -> None:
        """Look once more whether parts add up, in one backward: what held in one epoch need not hold in the next."""
        self._checks_left, self._looks_left = 1 if self.filed else CHECKS, LOOKS
        self._looked, self._in_epoch, self._late = (3, 5), 0, False

    def close(self, for_good: bool = False) -> None:
        """Look no more; for good: and tell nobody any more."""
        if self.check is not None:
            self.check.close()
            self.check = None
        if for_good:
            self._checks_left, self.listener = 0, Nobody()

    def count_filed(self) -> None:
        """A sketch was filed. Whether parts add up is looked at again after 8, 13, 21, ... of an epoch.

        A part of the loss may be there in some steps only; a fixed distance could miss all of them.
        """
        self.filed += 1
        self._in_epoch += 1
        if self._in_epoch >= sum(self._looked):
            self._looked = self._looked[1], sum(self._looked)
            self._checks_left, self._looks_left = max(self._checks_left, 1), max(self._looks_left, 2)
            self._late = True

    def differentiated_twice(self, device: torch.device) -> None:
        """A gradient was taken with `create_graph=True`, as a penalty on gradients does: look at what comes of it."""
        if not self._twice:
            self._twice = True
            self._checks_left, self._looks_left = max(self._checks_left, 1), max(self._looks_left, 1)
            self.look(device)

    def taint(self) -> None:
        """A forward runs unsketched on purpose: a backward through it proves nothing."""
        self._tainted = True

    def left_out(self) -> None:
        """A layer was left out: earlier sketches that hold its part cannot be compared with those to come."""
        if self.filed:
            self.filed = 0
            self.listener.coverage_changed()

    def _settled(self, outcome: Outcome) -> None:
        """At the end of a backward that was looked at."""
        tainted, self._tainted = self._tainted or self._is_pending(), False
        bad = [] if tainted else outcome.bad
        twice, self._twice = self._twice, False
        first = self.filed == 0 and self._strikes == 0
        partly = any(layer.problem == NOT_ALL for layer in self.layers)  # what others lack may be too little to see
        once = not first and ((twice and (bool(bad) or partly)) or (bool(bad) and self._in_some_steps))
        again = bool(bad) and not first and not once and self._strikes == 0
        if once:
            self._say_once()
        elif again:
            self._strikes = 1  # a forward of before may be in it: look again before a layer is left out
        elif bad:
            self._leave_out([layer for layer in self.layers if layer.name in bad and not layer.broken])
            self.left_out()
        elif outcome.proven and not tainted:
            if self._strikes and self._late:  # there may be others that nobody looked at
                self._in_some_steps = True
                self._say_once()
                self.left_out()
            self._strikes = 0
            self._checks_left -= 1
        self._looks_left -= 1
        drops = once or again or (twice and bool(bad))
        nothing = torch.nan if drops or all(layer.broken for layer in self.layers) else 0.0
        for owner, total in outcome.totals.items():
            self._file(owner, None if drops else total, nothing)
        if self._in_some_steps:
            self._checks_left, self._looks_left = 1, LOOKS
        done = self._checks_left <= 0 or self._looks_left <= 0
        if done or (bad and not drops) or once:
            self.close()  # after layers were left out, its groups are others

    def _leave_out(self, bad: list[SketchedLayer]) -> None:
        """Quietly if a layer was never called: chunked losses use only a head's weight, and nothing is wrong there."""
        heard = set() if self.check is None else self.check.heard
        called = [layer for layer in self.layers if layer.layout is not None or id(layer) in heard]
        for group in tied_groups(bad):
            idle = [layer.name for layer in group if called and layer not in called]
            if idle and any(not layer.broken and layer not in bad for layer in self.layers):
                for layer in group:
                    layer.miss(NOT_CALLED % idle[0], broken=True)
        leave_out(bad, NOT_ALL)

    def _say_once(self) -> None:
        if not self._said:
            self._said = True
            warn(
                "passes are left out of the sketches: in some steps a part of the gradient does not come through the "
                "layers' own calls (a penalty on gradients, a weight used without its layer), so the examples' parts "
                "do not add up to it. Compute such a part under `with handle.paused():` to keep the rest of the step"
            )

    def look(self, device: torch.device) -> None:
        """Begin to look whether parts add up, if it is time."""
        due = self._checks_left > 0 and self._looks_left > 0
        if self.check is None and not due:
            return
        in_half = self.in_half or torch.is_autocast_enabled(device.type)
        if self.check is not None:
            self.check.allow_half(in_half)
            return
        model = self._model()
        if model is None:
            return
        present = {id(module) for module in model.modules()}
        gone = [layer for layer in self.layers if id(layer.module) not in present and not layer.broken]
        if gone:
            leave_out(gone, "another module stands in its place since the model was attached")
            self.left_out()
        if not is_sharded(model):
            self.check = Checksum(self.layers, self.exact, self._settled, lambda: self._tainted or self._is_pending())
            self.check.allow_half(in_half)

    def note_half(self) -> None:
        self.in_half = True
        if self.check is not None:
            self.check.allow_half(True)

    def note_tap(self, layer: SketchedLayer, part: Tensor | None) -> bool:
        """A tap's part, which is on its way to the leaf, or None where its rule failed. Whether it is looked at."""
        if part is None:
            self.left_out()
        elif self.check is not None:
            self.check.note(layer, part)
        return self.check is not None


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the parameters, as under FSDP."""
    wrapped = any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules())
    return wrapped or any(hasattr(p, "to_local") for p in model.parameters())
