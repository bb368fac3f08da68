"""`attach`: joins a model to a sampler, so that ordinary backward passes feed it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from heeler.herding import SketchTable
from heeler.herding.judgement import ENOUGH, Verdict
from heeler.ordering.findings import Spike, Steps
from heeler.ordering.loss_scaler import ScalerWatch, unwrapped_scaler
from heeler.ordering.progress import Ids
from heeler.ordering.record import Record
from heeler.ordering.sampler import Sampler
from heeler.ordering.session import Session
from heeler.ordering.state import StateError, to_numpy, to_torch
from heeler.ordering.verify import Verification, verify
from heeler.sketch import Coverage, Sketcher, projection
from heeler.sketch.coverage import coverable
from heeler.sketch.prices import Layers
from heeler.sketch.rows_per_example import Given, RowsPerExample

ONLY_COUNT = 1e-5
"""Share of a step for a rule without gradients: only passes are counted, for positions, and one cheap layer tells."""


def attach(
    model: nn.Module,
    sampler: Sampler,
    *,
    layers: Layers = None,
    exact: bool = False,
    batch_dim: int | Callable[[tuple[Any, ...], dict[str, Any]], int] = 0,
    scaler: Any = None,
    reduction: Literal["mean", "sum"] = "mean",
    ids: Ids | None = None,
    record: bool | None = None,
    rows_per_example: Given = 1,
) -> Handle:
    """From now on backward passes of `model` tell `sampler` about the examples' gradients.

    Call it before the first step, and before the first call of a compiled model. Nothing about the model changes but
    its hooks: names, `state_dict()`, gradients and outputs stay as they are.

    Args:
        model: the model that is trained; the one that the loop calls (the DDP or compiled wrapper, where there is one).
        sampler: the sampler that its training loader draws from.
        layers: which layers to sketch: None for those that are worth their price (see `Sampler(budget=...)`), "all",
            or a predicate `(name, module) -> bool`.
        exact: keep exact gradients, however long; not together with `Sampler(dim=...)`.
        batch_dim: the batch's dimension in the model's first tensor argument and in its activations; or, where no
            argument tells, a function `(args, kwargs) -> batch size`.
        scaler: the GradScaler in use, whose factor the sketches shall not carry, or what holds it (timm's
            `NativeScaler`).
        reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum.
        ids: tells the numbers of a batch's examples, in the order of its rows, from the batch as the loader hands it
            out: `lambda batch: batch["index"]`. Needed only where the collate function sorts, drops or augments
            examples and they cannot be recognized in the batch, as texts that it tokenizes.
        record: whether to keep `handle.record`. None: in epochs with sketches, and in all others where it costs at most
            0.2% of a step; True: in every epoch; False: never.
        rows_per_example: how many rows of the model's input belong to each example of the dataset. 2: all chosen texts,
            then all rejected ones in the same order, as in DPO; k: so for k views or choices. `(k, "interleaved")`: an
            example's k rows are neighbours, as after `views.flatten(0, 1)`. An example's gradient is the sum over its
            rows. The loss is still taken to be a mean over examples.
    """
    begun = time.perf_counter()
    session = sampler.session
    session.check_attachable()
    scaler = unwrapped_scaler(scaler)
    per = RowsPerExample.of(rows_per_example)
    if exact and session.setup.dim is not None:
        raise ValueError(f"exact=True keeps all numbers, Sampler(dim={session.setup.dim}) so many: say one of the two")
    everything, prices = coverable(model, session.setup.batch_size * per.number)
    sketcher = Sketcher(
        model,
        session,
        dim=partial(session.sketch_length, everything=everything, prices=prices),
        seed=session.setup.seed,
        layers=layers,
        share=session.setup.layer_share if session.rule.needs_vectors else ONLY_COUNT,
        exact=exact,
        batch_dim=batch_dim,
        scaler=scaler,
        reduction=reduction,
    )
    try:
        session.connect(sketcher, ids, record, per)
    except BaseException:
        sketcher.detach()
        raise
    handle = Handle(session, sketcher, ScalerWatch(model.parameters()) if scaler is None else None)
    session.spent.start += time.perf_counter() - begun
    logging.getLogger("heeler").info("attached: %s", str(handle.coverage).splitlines()[0])
    return handle


class Handle:
    """What joins a model to a sampler; made by `attach`."""

    def __init__(self, session: Session, sketcher: Sketcher, watch: ScalerWatch | None = None) -> None:
        self.session, self.sketcher, self._watch = session, sketcher, watch

    @property
    def coverage(self) -> Coverage:
        """Which parameters the sketches cover, and by which rule; `print` it."""
        return self.sketcher.coverage

    @property
    def table(self) -> SketchTable | None:
        """The newest sketch of every example; None where the rule keeps none. Of many workers, rank 0's has all.

        Of a sampler with a subset, row j is of the example `sampler.subset[j]`.
        """
        self.session.drain(wait=True)
        self.session.judge_if_over()
        with self.session.planner.reading():
            return self.session.rule.table

    @property
    def record(self) -> Record:
        """What the run knows about each example: NumPy arrays `times`, `mean`, `last` and `epoch`, one number each.

        How often it was trained on, the mean and the last norm of its loss's gradient at the model's output, and the
        epoch of the last. The epoch under way is included. Of several workers each has its own, and rank 0 that of all
        as of the last `consolidate()`.
        """
        return self.session.record

    @property
    def steps(self) -> Steps:
        """Which examples were in a step: `handle.steps[1234]`. Of several workers, which of this one's."""
        return self.session.steps

    def spikes(self) -> list[Spike]:
        """Steps whose gradient was far above the recent ones, each with the examples that stand out in it."""
        return self.session.spikes()

    @property
    def ignored_passes(self) -> int:
        """Backward passes that were left out: not about a batch of the loader's, or that is not known."""
        return self.session.ignored_passes

    def detach(self) -> None:
        """Take the hooks off the model, and end threads and connections; the sampler keeps what it has seen."""
        try:
            if self.session.is_attached_to(self.sketcher):
                self.session.disconnect()
        finally:
            self.sketcher.detach()
            if self._watch is not None:
                self._watch.close()

    # Saying which examples a pass is about, where counting is not enough

    def examples(self, indices: ArrayLike | Tensor) -> AbstractContextManager[None]:
        """Passes whose forward and backward run inside are about `indices`, (B,) in batch order; several add up.

        with handle.examples(batch_indices):
            loss_fn(model(x), y).backward()
        """
        subset = self.session.setup.subset
        named, count = np.asarray(indices, dtype=np.int64), subset.length
        if named.ndim != 1 or named.size == 0 or named.min() < 0 or named.max() >= count:
            raise ValueError(f"indices must be a list of numbers in 0..{count - 1}, one per example")
        subset.check(named)
        return self.session.naming(named)

    def paused(self) -> AbstractContextManager[None]:
        """Passes inside are about no example: a second pass over a batch, another data set, a penalty's gradient.

        with handle.paused():
            penalty(model, noise).backward()
        """
        return self.session.paused()

    def skip(self, examples: int | None = None) -> None:
        """Say that the batch just drawn (or its first `examples`) is not trained on."""
        self.session.skip(examples)

    def verify(
        self, loss_of: Callable[[int], Tensor], examples: int = 32, *, seed: int = 0, training: bool = False
    ) -> Verification:
        """Is it working? Recompute some examples' gradients one by one and compare them with what is stored.

            print(handle.verify(lambda i: loss_fn(model(x[i : i + 1]), y[i : i + 1])))

        At any time, also after training and after `detach`. Random numbers, buffers and `.grad` stay as they are.

        Args:
            loss_of: the loss of one example alone, by its number in the dataset, from the attached model.
            examples: how many to look at, drawn from those that have a sketch.
            seed: of the draw.
            training: leave modules in the mode they are in; by default they are in evaluation mode meanwhile.
        """
        table = self.table
        if table is None:
            raise ValueError("this order keeps no sketches of examples: there is nothing to compare")
        session = self.session
        then, now = session.sketched_at, self.sketcher.weights()
        with session.paused() if session.is_attached else nullcontext(), session.planner.reading():
            return verify(
                self.sketcher,
                table,
                loss_of,
                examples,
                seed,
                session.subset_of_table.numbers_of,
                same_weights=then is not None and torch.equal(then.to(now.device), now),
                training=training,
            )

    # State and numbers

    def consolidate(self) -> None:
        """Before saving with several workers: bring what all of them have seen to rank 0. Every rank calls it.

            handle.consolidate()
            if rank == 0:
                torch.save({"heeler": handle.state_dict(), ...}, path)

        Without it rank 0's state is valid all the same, but lacks sketches that others have not sent yet, and a run
        that resumes from it goes on in other orders. With one worker there is nothing to do.
        """
        self.session.consolidate()

    def state_dict(self) -> dict[str, Any]:
        """Everything, as a copy: position, order, rule and table. Loaded anywhere in an epoch it goes on exactly.

        Tensors, numbers, strings and dicts of these: fit for `torch.save` in your own checkpoint (and for `torch.load`
        with `weights_only=True`), or written by `heeler.save`.
        """
        state = {"session": self.session.state_dict(), "sketch": self._fingerprint()}
        return dict(to_torch({**state, "left_out": self.sketcher.left_out}))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; raises, and changes nothing, if the state does not fit."""
        try:
            tree = to_numpy(state)
            missing = {"session", "sketch", "left_out"} - tree.keys()
            if missing:
                raise StateError(f"this is no state of a Heeler handle: it lacks {', '.join(sorted(missing))}")
            for key, value in self._fingerprint().items():
                if tree["sketch"].get(key) != value:
                    raise StateError(
                        f"the state was saved with {key}={tree['sketch'].get(key)!r}, this handle has {value!r}: "
                        "sketches of different projections cannot be compared. Make the sampler and attach with the "
                        "options the state was saved with (dim, seed, layers, exact)."
                    )
            if tree.get("scale"):
                raise StateError(
                    "the state was saved with attach(optimizer=...), which is gone: its sketches are of scaled "
                    "gradients and cannot be compared with new ones. Load model and optimizer, but not this state."
                )
            left_out = {str(name): str(why) for name, why in tree["left_out"].items()}
            self.session.load_state_dict(tree["session"])
        except StateError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise StateError(f"the state is damaged, or of another run ({type(error).__name__}: {error})") from error
        self.sketcher.set_left_out(left_out)

    @property
    def verdict(self) -> Verdict:
        """Does ordering help this run? `print` it; `verdict.helps` is True, False, or None while that is not known.

        From the second sketched epoch on. Of many workers, rank 0 knows.
        """
        self.session.drain(wait=True)
        with self.session.planner.reading():
            judgement = self.session.rule.judgement
        planner, table = self.session.planner, self.session.rule.table
        if not planner.sees_all:
            return Verdict(None, "rank 0 of the workers knows.")
        if judgement is None or len(self.session.rule.order) < ENOUGH:
            return Verdict(None, f"only the order 'herd' of {ENOUGH} examples or more is judged.")
        if planner.gave_up and table is not None and table.own.at_chance:
            return Verdict(False, "sketches do not know their own examples, so they were dropped.")
        return judgement.verdict

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any logger; the herding bounds are there from the second epoch on."""
        return {**self.session.metrics(), "covered_parameters": float(self.coverage.share_of_parameters)}

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "dim": self.sketcher.dim,
            "seed": self.sketcher.seed,
            "parameters": ",".join(self.sketcher.chosen),
            "projections": "none" if self.sketcher.exact else f"version {projection.VERSION}",
        }
