"""When to look whether rows are right, and what follows: see `row_ownership` and `checksum`.

A layer of which it is found that they are not is left out, said once, and what it gave to earlier sketches is taken
back. Steps in which nothing is looked at cost nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch import compiled
from heeler.sketch.checksum import Checksum, Outcome
from heeler.sketch.passes import Nobody, Pass, SketchListener
from heeler.sketch.row_ownership import RowOwnershipTest, run_test
from heeler.sketch.sketched_layer import SketchedLayer, leave_out
from heeler.torch_private import run_eagerly

CHECKS = 2
"""Backwards at the start of the first sketched epoch of which it is looked whether their parts add up."""
NOT_ALL = (
    "the examples' parts do not add up to its gradient, so a part of it does not come through the layer's own calls (a "
    "forward of its own, a weight used without its layer, a hook, a second derivative, or a loss outside the model)"
)
LOOKS = 10
"""Backwards at most, where some prove nothing: infinities, or a forward that was not sketched on purpose."""
TESTS = 8
"""Tests of whose rows the layers see, where not all are called in every forward."""
TRIES = 3
"""Such tests in which the model may fail before it is taken for one that cannot be tested."""


class Checks:
    """Of one recorder. file: takes a pass's verified sum, or None and what to fill its rows with."""

    def __init__(
        self,
        model: nn.Module,
        layers: list[SketchedLayer],
        exact: bool,
        batch_dim: int,
        file: Callable[[Pass, Tensor | None, float], None],
        listener: SketchListener,
    ) -> None:
        self._model = weakref.ref(model)
        self.layers, self.exact, self.batch_dim, self._file, self.listener = layers, exact, batch_dim, file, listener
        self.check: Checksum | None = None
        """Whether parts add up, while that is looked at."""
        self.row_test: RowOwnershipTest | None = None
        """The test that is under way of whose rows the layers see."""
        self.untested = True
        """That test is still to be made."""
        self.unknown = True
        """There are layers that no such test has seen, and that are called."""
        self.can_split = True
        """The newest batch had examples that differ, or there is no need of them."""
        self.tests = 0
        """How many were made."""
        self.in_half = False
        """Some layer computes in half precision."""
        self.filed = 0
        """Sketches since a layer was left out."""
        self._checks_left, self._looks_left = CHECKS, LOOKS
        self._failed_tests = 0
        self._tainted = False
        self._strikes = 0

    def test_rows(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor | None, batch: int
    ) -> None:
        """Find out, on the batch that comes, whose rows the layers see. A batch that cannot tell is not sketched."""
        self.can_split = True
        if batch < 2:
            return  # any split is right
        if found is not None and found.shape[self.batch_dim] != batch:
            found = None
        full = self.unknown
        layers = [layer for layer in self.layers if not layer.broken and (layer.layout is None) == full]
        test = RowOwnershipTest(layers, args, kwargs, found, batch, self.batch_dim)
        can_tell = test.can_tell
        if is_sharded(model) or can_tell is None:  # its forward is a collective; or there is nothing to exchange
            self.untested = False
        elif not can_tell:
            self.can_split = not full
        else:
            inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            others = compiled.recorders_on(inner)  # nobody else takes these forwards for his
            for recorder in others:
                recorder.checks.begin_test(test)
            try:
                with run_eagerly():
                    failure = run_test(test, inner)
            finally:
                for recorder in others:
                    recorder.checks.begin_test(None)
            self._end_test(full, layers, failure)

    def begin_test(self, test: RowOwnershipTest | None) -> None:
        """The model's forwards belong to this test from now on; None: no more."""
        self.row_test = test

    def _end_test(self, full: bool, layers: list[SketchedLayer], failure: Exception | None) -> None:
        if failure is not None:
            self._failed_tests += not isinstance(failure, (MemoryError, torch.OutOfMemoryError))
            if self._failed_tests < TRIES:  # it may be this batch alone: it is not sketched, and the next one is tested
                self.can_split = False
                return
            why = f"the model does not run twice on one batch, so it is not known whose rows it sees: {failure!r}"
            leave_out(layers, why)
        self._failed_tests = 0
        # What is new is looked at once more in the next batch: there, what routes by the data routes otherwise.
        self.untested, self.unknown, self.tests = full, False, self.tests + full
        if any(layer.broken for layer in layers):
            self.left_out()

    def meet_untested(self, layer: SketchedLayer, owner: Pass) -> None:
        """A layer is called that was not when the others were tested: this pass cannot have it; test again."""
        if self.tests < TESTS:
            layer.lie(None)
            owner.spoil()
            self.untested = self.unknown = self._tainted = True
        else:
            layer.leave_out("its calls come too seldom for a test of whose rows it sees")
            self.spoil(owner)

    def spoil(self, owner: Pass) -> None:
        """A layer was left out while a pass was under way: its sketch is not filed, unless it is looked at anyway."""
        if self.check is None:
            owner.spoil()
        self.left_out()

    def again(self) -> None:
        """Look once more whether parts add up, in one backward: what held in one epoch need not hold in the next."""
        self._checks_left, self._looks_left = 1 if self.filed else CHECKS, LOOKS
        self.untested = True

    def meet_new(self) -> None:
        """A layer is sketched from now on that was not: look at everything once more."""
        self.again()
        self.unknown = True

    def close(self, for_good: bool = False) -> None:
        """Look no more; for good: and tell nobody any more."""
        if self.check is not None:
            self.check.close()
            self.check = None
        if for_good:
            self._checks_left, self.listener = 0, Nobody()

    def count_filed(self) -> None:
        self.filed += 1

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
        tainted, self._tainted = self._tainted, False
        bad = [] if tainted else outcome.bad
        first = self.filed == 0 and self._strikes == 0
        again = bool(bad) and not first and self._strikes == 0
        if again:
            self._strikes = 1  # a forward of before may be in it: look again before a layer is left out
        elif bad:
            leave_out([layer for layer in self.layers if layer.name in bad], NOT_ALL)
            self.left_out()
        elif outcome.proven and not tainted:
            self._strikes = 0
            self._checks_left -= 1
        self._looks_left -= 1
        nothing = torch.nan if again or all(layer.broken for layer in self.layers) else 0.0
        for owner, total in outcome.totals.items():
            self._file(owner, None if again else total, nothing)
        done = self._checks_left <= 0 or self._looks_left <= 0
        if done or (bad and not again):
            self.close()  # after layers were left out, its groups are others

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
            self.check = Checksum(self.layers, self.exact, self._settled, lambda: self._tainted)
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
