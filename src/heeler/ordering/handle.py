"""`attach`: joins a model to a sampler, so that ordinary backward passes feed it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor, nn

from heeler.diversity.epoch import EpochDiversity, advice, as_numbers
from heeler.diversity.estimators import Diversity
from heeler.ordering.sampler import Sampler
from heeler.ordering.tree import to_numpy, to_torch
from heeler.sketch import Courier, Sketcher, projection
from heeler.sketch.coverage import Coverage

logger = logging.getLogger("heeler")


def attach(model: nn.Module, sampler: Sampler, **sketcher_options: Any) -> Handle:
    """From now on backward passes of `model` tell `sampler` about the examples' gradients.

    Call it before the first step, and before the first call of a compiled model. Nothing about the model changes but
    its hooks: names, `state_dict()`, gradients and outputs stay as they are.

    Args:
        model: the model that is trained; the one that the loop calls (the DDP or compiled wrapper, where there is one).
        sampler: the sampler that its training loader draws from.
        sketcher_options: as `heeler.sketch.Sketcher` takes them: `layers`, `exact`, `batch_dim`, `scaler` for a
            gradient scaler, `reduction="sum"` for a loss that is not a mean.
    """
    if sampler.collector is not None:
        raise ValueError("this sampler is attached to a model already: call detach() on that handle first")
    if sampler.is_one_of_strangers:
        raise ValueError(
            f"the sampler is one of {sampler.num_replicas} by num_replicas, but there is no process group of that size "
            "in which they could agree on an order that comes from gradients: initialize torch.distributed first, or "
            "use order='random', or shards='local'"
        )
    return Handle(model, sampler, **sketcher_options)


class Handle:
    """What joins a model and a sampler; made by `attach`."""

    def __init__(self, model: nn.Module, sampler: Sampler, **sketcher_options: Any) -> None:
        self.sampler = sampler
        if not sampler.rule.needs_vectors:
            # Only the count of passes is wanted, for positions: one cheap layer tells it.
            sketcher_options.setdefault("layers", "0.001%")
        self.sketcher = Sketcher(
            model, dim=sampler.dim, whole=sampler.whole_up_to, seed=sampler.seed, **sketcher_options
        )
        sampler.set_dim(self.sketcher.dim)
        self._diversity = EpochDiversity(self.sketcher)
        sampler.collector = self
        self.ignored_passes = 0
        """Backward passes whose number of examples did not fit what the loader had handed out."""
        self._courier = Courier()
        self._handed_out = 0
        self.sketcher.on_forward = self.collect
        self.sketcher.on_backward = self._stamp
        self.sketcher.on_count = self._count
        self._counting = True
        self.begin_epoch()

    @property
    def coverage(self) -> Coverage:
        """Which parameters the sketches cover, and by which rule; `print` it."""
        return self.sketcher.coverage

    def detach(self) -> None:
        """Take the hooks off the model; the sampler keeps what it has seen."""
        self.collect(wait=True)
        self.sketcher.detach()
        self.sampler.collector = None

    # Saying which examples a pass is about, where counting is not enough

    @contextmanager
    def examples(self, indices: ArrayLike | Tensor) -> Iterator[None]:
        """Passes whose forward and backward run inside are about `indices`, (B,) in batch order.

        with handle.examples(batch_indices):
            loss_fn(model(x), y).backward()
        """
        explicit = np.asarray(indices, dtype=np.int64)
        if explicit.ndim != 1 or explicit.size == 0 or explicit.min() < 0 or explicit.max() >= self.sampler.examples:
            raise ValueError(f"indices must be a list of numbers in 0..{self.sampler.examples - 1}, one an example")
        self.collect()
        self._counting = False
        try:
            yield
        finally:
            self._counting = True
        if not self.sketcher.sketching and self.sampler.positions.expects(explicit, self.sampler.indices):
            self.sampler.positions.skip(explicit.size)
        for sketches in self.sketcher.pop_passes():
            if len(sketches) != explicit.size:
                self._ignore(len(sketches), f"{explicit.size} examples were named")
                continue
            if self.sampler.positions.expects(explicit, self.sampler.indices):
                self.sampler.positions.skip(explicit.size)
            self._courier.send(explicit, sketches)
        self._deliver()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside are about no example: a second pass over a batch, another data set, a penalty's gradient.

        with handle.paused():
            penalty(model, noise).backward()
        """
        self.collect()
        self.sketcher.enabled = False
        try:
            yield
        finally:
            self.sketcher.enabled = True

    def skip(self, examples: int | None = None) -> None:
        """Say that the batch just drawn (or its first `examples`) is not trained on."""
        self.collect()
        self.sampler.positions.skip(examples)

    # Feeding the sampler

    def collect(self, *, wait: bool = False) -> None:
        """File what the last backward left; runs by itself before every forward and, waiting, at an epoch's end."""
        for sketches in self.sketcher.pop_passes():
            rows = len(sketches)
            indices = self.sampler.claim(rows, self._handed_out)
            if indices is None:
                self._ignore(rows, "the loader has handed out no such batch that is not yet trained on")
            else:
                self._courier.send(indices, sketches)
        self._deliver(wait=wait)
        self._start_early(sketched=True)

    def begin_epoch(self) -> None:
        """Take sketches or leave it, as the sampler says for the epoch that begins."""
        self.sketcher.sketching = self.sampler.takes_sketches

    def _count(self, rows: int) -> None:
        """A forward that nobody sketches: the sampler still has to know how far the loop has come."""
        if self._counting:
            self.sampler.positions.count(rows)
            self._start_early(sketched=False)

    def _start_early(self, *, sketched: bool) -> None:
        if self.sampler.wants_early_start(sketched=sketched):
            self._deliver(wait=True)
            self.sampler.turnover.start_early()

    def _stamp(self) -> None:
        # Passes are filed at the next forward, in the order of their forwards; the loader will have moved on by then.
        self._handed_out = self.sampler.positions.handed_out

    def _deliver(self, *, wait: bool = False) -> None:
        for indices, vectors in self._courier.receive(wait=wait):
            self.sampler.turnover.observe(indices, vectors)

    def _ignore(self, rows: int, why: str) -> None:
        self.ignored_passes += 1
        if self.ignored_passes == 1:
            logger.warning(
                "a backward pass over %d examples was ignored: %s. If your loop runs several passes over a batch, or "
                "passes that are not about the loader's examples, wrap the others in `with handle.paused():`, or name "
                "the examples with `with handle.examples(indices):`. This is said once; handle.ignored_passes counts.",
                rows,
                why,
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
        self.collect(wait=True)
        self.sampler.turnover.consolidate()

    def state_dict(self) -> dict[str, Any]:
        """Everything, as a copy: position, order, rule and table. Loaded anywhere in an epoch it goes on exactly.

        Tensors, numbers, strings and dicts of these: fit for `torch.save` in your own checkpoint (and for `torch.load`
        with `weights_only=True`), or written by `heeler.save`.
        """
        self.collect(wait=True)
        state = {"sampler": self.sampler.whole_state(), "sketch": self._fingerprint()}
        return to_torch(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken; raises, and changes nothing, if the state does not fit."""
        state = to_numpy(state)
        missing = {"sampler", "sketch"} - state.keys()
        if missing:
            raise ValueError(f"this is no state of a Heeler handle: it lacks {', '.join(sorted(missing))}")
        saved, own = state["sketch"], self._fingerprint()
        for key, value in own.items():
            if saved.get(key) != value:
                raise ValueError(
                    f"the state was saved with {key}={saved.get(key)!r}, this handle has {value!r}: sketches of "
                    "different projections cannot be compared. Attach with the options the state was saved with."
                )
        self.sketcher.pop_passes()  # whatever was under way belongs to another run
        self._deliver(wait=True)
        self.sampler.load_whole_state(state["sampler"])
        self._diversity.forget()

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any logger; the herding bounds are there from the second epoch on.

        `gradient_diversity`, `batch_size_bound` (with the ends of its 95% interval) and `noise_scale` are over a moving
        epoch: of every example's newest sketch, which may be `Sampler(refresh=...)` epochs old. They are taken once an
        epoch, at its end if they are asked for then.
        Rules that keep no table of sketches have none, nor have workers other than rank 0, where all sketches meet.
        """
        rule = self.sampler.rule
        numbers = {
            "epoch": float(self.sampler.epoch),
            "covered_parameters": float(self.coverage.share_of_parameters),
            "ignored_passes": float(self.ignored_passes),
        }
        table = getattr(rule, "table", None)
        if table is not None:
            numbers["examples_with_sketch"] = float(np.mean(table.seen))
        solution = getattr(rule, "last_solution", None)
        if solution is not None:
            numbers["herding_bound"] = float(solution.bound_after)
            numbers["herding_bound_random"] = float(solution.bound_random)
            numbers["solve_seconds"] = float(solution.seconds)
            numbers["solve_passes"] = float(solution.passes)
        found = self._read_diversity()
        if found is not None:
            numbers |= as_numbers(found)
        return {**numbers, **self.sampler.turnover.numbers()}

    def batch_size_advice(self) -> str:
        """ "at this point batches up to about 210 train as well as single examples; you use 64", or why that is not
        known. See `heeler.diversity.sentence`; the batch is that of all workers together. It comes from what `metrics`
        has, over a moving epoch, which is an upper end: `heeler.diversity.measure` tells it at the present weights."""
        sampler = self.sampler
        if getattr(sampler.rule, "table", None) is None:
            return "the batch size that would still train well is not known: this order keeps no sketches of examples"
        if not getattr(sampler.turnover, "is_host", True):
            return "the batch size that would still train well is not known here: ask rank 0, where all sketches meet"
        return advice(self._read_diversity(), sampler.batch_size * sampler.num_replicas)

    def _read_diversity(self) -> Diversity | None:
        sampler, positions = self.sampler, self.sampler.positions
        table = getattr(sampler.rule, "table", None)
        # The last batch's sketches are filed at the next forward, so an epoch is as good as over without them.
        epochs = sampler.epoch + (positions.trained + sampler.batch_size >= len(sampler.indices))
        if table is None or epochs == 0 or self._diversity.is_known(epochs):
            return self._diversity.found
        self._deliver(wait=True)
        return self._diversity.read(table, epochs, getattr(sampler.turnover, "using_rule", None))

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "dim": self.sketcher.dim,
            "seed": self.sketcher.seed,
            "parameters": ",".join(self.coverage.covered),
            "projections": "none" if self.sketcher.exact else f"version {projection.VERSION}",
        }
