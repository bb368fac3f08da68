"""When it is tested whose rows the layers see, and what is known of it: see `row_ownership`.

The operations of a forward are recorded and replayed at its end, before its backward. That is done in the first two
sketched forwards, in the first one of every sketched epoch, where a layer is called that no test has seen, and where a
forward computes otherwise than those that were tested (`computation`). A pass of which nothing is proven is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch import compiled
from heeler.sketch.aside import set_aside
from heeler.sketch.checks import Checks, is_sharded
from heeler.sketch.computation import Computation, computation_of
from heeler.sketch.effects import effects_of
from heeler.sketch.examples import tensors_in
from heeler.sketch.passes import Pass
from heeler.sketch.recording import Recording
from heeler.sketch.rerun import rerun
from heeler.sketch.row_ownership import RowOwnershipTest
from heeler.sketch.sketched_layer import SketchedLayer, leave_out
from heeler.torch_private import is_called_by_compiled_code, is_compiled, run_eagerly, source_of, storage_of

TESTS = 8
"""Tests of whose rows the layers see, where not all are called in every forward."""
TRIES = 3
"""Tests of compiled code in which the model may fail before it is taken for one that cannot be tested."""
COMPUTATIONS = 32
"""Ways to compute that are tested, at most."""
AWAITED = 64
"""Forwards that are recorded, at most, until one computes in a way that was met and is not tested."""


class RowProof:
    """Of one recorder."""

    def __init__(self, layers: list[SketchedLayer], batch_dim: int, checks: Checks) -> None:
        self.layers, self.batch_dim, self.checks = layers, batch_dim, checks
        self.rerun_test: RowOwnershipTest | None = None
        """The test of compiled code that is under way: the model's forwards belong to it."""
        self.recording: Recording | None = None
        """The forward under way, as far as it has come."""
        self.can_split = True
        """The newest batch had examples that differ, or there is no need of them."""
        self.tests = 0
        """How many were made that settled layouts."""
        self._unknown = True
        """There are layers that no test has seen, and that are called."""
        self._due = True
        self._failed = 0
        self._test: RowOwnershipTest | None = None
        self._can_tell: bool | None = None
        self._model: nn.Module | None = None
        self._thread = 0
        self._stance: AbstractContextManager[Any] = nullcontext()
        self._deferred: list[Callable[[], None]] = []
        self._guessed: list[tuple[SketchedLayer, Callable[[], bool]]] = []
        self._computations: set[Computation] = set()
        self._given_up: set[Computation] = set()
        self._awaited: dict[Computation, int] = {}
        self._needed: set[int] = set()
        """Ids of layers of which no call is set aside."""

    @property
    def is_pending(self) -> bool:
        """Layers wait for the test at the forward's end: a backward until then is not sketched."""
        return bool(self._deferred)

    @property
    def untested(self) -> bool:
        """The forward to come is to be recorded."""
        return self._due or bool(self._awaited)

    # An eager forward

    def prepare(self, model: nn.Module, args: Any, kwargs: Any, found: Tensor | None, batch: int) -> None:
        """A forward is about to begin. Where a test is due, and its batch can tell, it will be recorded."""
        self.can_split, self._test, self._model = True, None, None
        if batch < 2 or is_sharded(model):  # any split is right; or its forward is a collective
            self._due = self._due and batch < 2
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a replay would become a part of the CUDA graph
        compiles = any(is_compiled(module) for module in model.modules())
        if is_called_by_compiled_code() or (compiles and effects_of(model) is None):
            self.test_compiled(model, args, kwargs, found, batch)
            return
        self._stance = run_eagerly() if compiles else nullcontext()  # its parts run as they are written, this once
        test = RowOwnershipTest(self._tested(), tensors_in((args, kwargs)), found, batch, self.batch_dim)
        self._can_tell = test.can_tell
        if self._can_tell is False:
            self.can_split = not self._unknown
        else:
            self._test, self._model = test, model

    def _tested(self) -> list[SketchedLayer]:
        return [layer for layer in self.layers if not layer.broken]

    def start(self) -> None:
        """Write down what runs from now on."""
        if self._test is not None:
            self.recording, self._thread = Recording(), get_ident()
            self._stance.__enter__()
            self.recording.__enter__()

    def see(self, layer: SketchedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """A layer was called."""
        if self.recording is not None and get_ident() == self._thread:
            source = next((source_of(tensor) for tensor in tensors_in(output) if tensor.requires_grad), None)
            self.recording.note(layer, args, kwargs, source)

    def defer(self, register: Callable[[], None]) -> None:
        """Have this called at the forward's end, when it is known how the layer's input lies."""
        self._deferred.append(register)

    def guess(self, layer: SketchedLayer, is_right: Callable[[], bool]) -> None:
        """A call could not wait. is_right: whether it was taken for what the test then says."""
        self._guessed.append((layer, is_right))

    def stop(self) -> Recording | None:
        """The forward has ended, or failed."""
        recording, self.recording = self.recording, None
        if recording is not None:
            recording.__exit__(None, None, None)
            self._stance.__exit__(None, None, None)
        return recording

    def forget(self) -> None:
        """The forward under way has failed: nothing waits for its end, and none of its tensors is held."""
        self._deferred, self._guessed, self._test, self._model = [], [], None, None

    def end(self, recording: Recording | None, owner: Pass, outputs: Iterable[Tensor]) -> None:
        """The forward is through: test its rows if that is due, or leave the pass out if nothing is known of them."""
        deferred, self._deferred = self._deferred, []
        guessed, self._guessed = self._guessed, []
        test, self._test = self._test, None
        model, self._model = self._model, None
        if not (test is not None and recording is not None) and not self._computations:
            return
        if owner.examples.batch < 2:
            return
        outputs = list(outputs)
        computation = computation_of(outputs)
        is_new = computation not in self._computations
        if test is None or recording is None or model is None:
            if is_new:
                self._meet(computation, owner)
            return
        if self._due or is_new or deferred or guessed:
            set_aside(recording, outputs, self._needed, lambda layer: self._reach(layer, owner))
            self._replay(test, recording, model)
            if is_new and len(self._computations) < COMPUTATIONS:
                self._computations.add(computation)
            self._awaited.pop(computation, None)
        for awaited in list(self._awaited):
            self._awaited[awaited] -= 1
            if not self._awaited[awaited]:
                del self._awaited[awaited]
                self._given_up.add(awaited)
        if any(not layer.broken and not is_right() for layer, is_right in guessed):
            owner.spoil("how its layers hold the examples was not known before its end. It is known from now on")
        for register in deferred:
            register()

    def _reach(self, layer: SketchedLayer, owner: Pass) -> None:
        """A gradient comes through a call that was set aside."""
        self._needed.add(id(layer))
        self.meet_untested(layer, owner)

    def _replay(self, test: RowOwnershipTest, recording: Recording, model: nn.Module) -> None:
        full, can_tell = self._unknown, self._can_tell
        if can_tell is None:  # no argument holds examples: whatever else came in
            own = {storage_of(t) for t in (*model.parameters(), *model.buffers())}
            data = recording.data_of(test.batch, test.batch_dim, {key for key in own if key is not None})
            test = RowOwnershipTest(list(test.layers.values()), data, None, test.batch, test.batch_dim)
            can_tell = test.can_tell
        layers = list(test.layers.values())
        if recording.complete and can_tell:
            test.replay(recording)
        elif recording.complete and can_tell is False:
            self.can_split = False
            return
        else:
            leave_out(
                layers, "nothing that its forward was given holds the examples, so it is not known whose rows it sees"
            )
        self._end_test(full, layers)

    def _end_test(self, full: bool, layers: list[SketchedLayer]) -> None:
        # What is new is looked at once more in the next batch: there, what routes by the data routes otherwise.
        self._due, self._unknown, self.tests = full, False, self.tests + full
        if any(layer.broken for layer in layers):
            self.checks.left_out()

    def _meet(self, computation: Computation, owner: Pass) -> None:
        """A forward has computed in a way that no test has seen."""
        owner.spoil(
            "the model computed otherwise than in the batches in which it was tested whose rows its layers see. The "
            "next such batch is tested, too"
        )
        if computation not in self._given_up and len(self._computations) < COMPUTATIONS:
            self._awaited.setdefault(computation, AWAITED)

    # Compiled code

    def test_compiled(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor | None, batch: int
    ) -> None:
        """Find out, on the batch that comes, whose rows the layers see. A batch that cannot tell is not sketched."""
        self.can_split = True
        if batch < 2:
            return
        full, layers = self._unknown, self._tested()
        test = RowOwnershipTest(layers, tensors_in((args, kwargs)), found, batch, self.batch_dim)
        can_tell = test.can_tell
        effect = None if is_sharded(model) or can_tell is None else effects_of(model)
        if is_sharded(model) or can_tell is None:  # its forward is a collective; or there is nothing to exchange
            self._due = False
        elif effect is not None:
            leave_out(
                layers,
                f"its model is compiled and {effect}, so Heeler does not run it again to see whose rows its layers "
                "see: attach the model uncompiled, or take that out of its forward",
            )
            self._end_test(full, layers)
        elif not can_tell:
            self.can_split = not full
        else:
            inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
            others = compiled.recorders_on(inner)  # nobody else takes these forwards for his
            for recorder in others:
                recorder.rows.begin_rerun(test)
            try:
                with run_eagerly():
                    failure = rerun(test, inner, args, kwargs)
            finally:
                for recorder in others:
                    recorder.rows.begin_rerun(None)
            if failure is not None:
                self._failed += not isinstance(failure, (MemoryError, torch.OutOfMemoryError))
                if self._failed < TRIES:  # it may be this batch alone: it is not sketched, and the next one is tested
                    self.can_split = False
                    return
                why = f"the model does not run twice on one batch, so it is not known whose rows it sees: {failure!r}"
                leave_out(layers, why)
            self._failed = 0
            self._end_test(full, layers)

    def begin_rerun(self, test: RowOwnershipTest | None) -> None:
        """The model's forwards belong to this test from now on; None: no more."""
        self.rerun_test = test

    # What changes

    def meet_untested(self, layer: SketchedLayer, owner: Pass) -> None:
        """A layer is called that was not when the others were tested: this pass cannot have it; test again."""
        if self.tests < TESTS:
            layer.lie(None)
            owner.spoil(
                "a layer was called that was not when it was tested whose rows the layers see. It is tested next"
            )
            self.checks.taint()
            self._due = self._unknown = True
        else:
            layer.leave_out("its calls come too seldom for a test of whose rows it sees")
            self.checks.spoil(owner)

    def again(self) -> None:
        """What held in one sketched epoch need not hold in the next."""
        self._due = True

    def meet_new(self) -> None:
        """A layer is sketched from now on that was not."""
        self._due = self._unknown = True

    def close(self) -> None:
        """Record no more."""
        self.stop()
        self.forget()
