"""The one owner of an epoch: it makes the next one, and brings the sketches of this one to the planner.

`Sampler` and `Handle` are two views of it: one yields the order, the other joins a model. The model's `Sketcher` tells
the session when a forward begins (it is the sketcher's listener) and gets a stamp for it; the session pulls what waits,
sketches with their stamps: `drain`. Who reads the epoch, and what counts as training: `iterations`, `training`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from heeler.gpu.exchange import load_kernel
from heeler.gpu.solver import GpuSolver
from heeler.herding import OrderingRule
from heeler.herding.lazy import LazyOrder
from heeler.herding.subset import ALL, Subset
from heeler.herding.validate import IntArray
from heeler.native.build import NoCompilerError, are_ready, load
from heeler.notices import warn
from heeler.ordering.attribution import Attribution
from heeler.ordering.background import BackgroundThread
from heeler.ordering.distributed.ranks import agree
from heeler.ordering.distributed.transport import RankFault
from heeler.ordering.distributed.wire import gathered, united
from heeler.ordering.epoch import Epoch, Plan
from heeler.ordering.findings import Spike, Steps
from heeler.ordering.iterations import Iterations
from heeler.ordering.loader_probe import is_endless
from heeler.ordering.pace import LARGEST, Costs, Pace
from heeler.ordering.pass_values import Stamp
from heeler.ordering.planner import FORGET, Planner
from heeler.ordering.progress import Ids, Progress
from heeler.ordering.record import Counted, Record
from heeler.ordering.run_record import SHARE, RunRecord
from heeler.ordering.setup import Links, Setup, default_dim, epoch_costs, make_planner, solver_is_on_gpu
from heeler.ordering.source import SketchSource
from heeler.ordering.spent import Spent
from heeler.ordering.state import StateError, check_state, check_subset, subset_state
from heeler.ordering.training import Training
from heeler.sketch.prices import Prices
from heeler.sketch.rows_per_example import ONE_ROW, RowsPerExample

ENOUGH_TRAINED = 0.9
"""The share of an epoch that must have been trained on for its sketches to last."""
GAVE_UP = (
    "new sketches are nearer to the old ones of their own examples than to other examples' in only %.1f%% of %d "
    "comparisons, as by chance (50%%): no order can help. Either sketches are stored under wrong examples (a collate "
    "function or a loop that reorders, drops or mixes rows), or the dataset changes between epochs, random transforms "
    "are so strong that nothing of an example persists, or the weights change too fast. The sketches are dropped, and "
    "training goes on in random order, without taking any. handle.verify tells the causes apart; a new Sampler starts "
    "again"
)
"""Said when sketches do not know their own examples: see `heeler.herding.own_check`."""
STOPPED = (
    "orders made from sketches balance nothing here: two refreshes have found steps and prefixes as unbalanced as in "
    "random order. Gradients change too much from one refresh to the next. Training goes on in random order (with "
    "strata, stratified), without sketches and at no cost. handle.verdict has the figures; docs/will-it-help.md says "
    "what to try"
)
"""Said when a rule finds itself useless: see `heeler.herding.judgement`."""
UNTRAINED = (
    "the loader was read to its end twice, and the attached model has had no gradient: if these loops train, attach "
    "the model that is trained, not a reference model. Until the attached model has a gradient, every epoch has the "
    "same order"
)
FAST_FORWARD = 1000
"""Epochs that `set_epoch` skips one by one; a number further off is taken as a name, not as a distance."""


class Session:
    """One run over one dataset, as one worker sees it."""

    def __init__(self, setup: Setup, links: Links) -> None:
        self.setup, self.links = setup, links
        self.dim = setup.dim or setup.rule.dim or default_dim(sum(links.shard_sizes or (setup.examples,)))
        """Dimensions of a sketch."""
        self.pace, self.spent = Pace(setup.refresh), Spent()
        self.planner: Planner = make_planner(setup, links, self.dim)
        self._excluded = self._to_exclude = np.empty(0, np.int64)
        """Examples that are left out, in this epoch and from the next one on: the planner's numbers, of all workers."""
        self.epoch = self._epoch(0, self.planner.first())
        self.iterations = Iterations()
        self.run_record: RunRecord | None = None
        """None: none is kept."""
        self._notes_norms = False  # in this epoch
        self.attribution = Attribution()
        self.ids: Ids | None = None
        """Tells the indices of a batch's examples, where the user knows better than the loader."""
        self.per = ONE_ROW
        """How many rows of the model's input are of one example."""
        self._source: SketchSource | None = None
        self.sketched_at: Tensor | None = None
        """The weights as the newest sketched epoch began: see `SketchSource.weights`."""
        self._full_length = len(self.epoch.order)
        self._told, self._gave_up, self._misfiled = False, False, 0  # the first two: it was said
        self._untrained = 0
        """How often the loader was read to its end although the attached model has had no gradient yet."""
        self._has_loops = self._cannot_store = False
        self._resumed = False  # and nothing was read since
        self._ended_before = False  # the loaded state's epoch was over
        self._asked_epoch: int | None = None
        self._finalizer = weakref.finalize(self, _close, self.planner, links, self.iterations.training)

    @property
    def rule(self) -> OrderingRule:
        """The ordering rule, with all that it has seen."""
        return self.planner.rule

    @property
    def progress(self) -> Progress:
        """How far the epoch has come: the iteration that training is in."""
        return self.iterations.current(self.epoch) or Progress(self.epoch, self.setup.batch_size)

    @property
    def subset_of_table(self) -> Subset:
        """Which examples the rows of this rank's table are of; raises where they are of several workers' subsets."""
        if self.setup.is_coordinated and self.links.shard_sizes is not None:
            if self.links.subset != ALL:
                raise ValueError(
                    "the table holds subsets of several workers' local examples side by side, whose indices are known "
                    "to those workers alone: heeler.selection.select_together gives every worker its own part"
                )
            return Subset(self.examples)
        return self.setup.subset

    @property
    def length(self) -> int:
        """Examples of an epoch of this worker."""
        return self.planner.partition.length_without(self._full_length, self._excluded, self.setup.examples)

    @property
    def weights(self) -> Tensor:
        """(N,) float32: how much the loss of each example of the dataset counts; see `Sampler.weights`."""
        return torch.from_numpy(self.setup.subset.weights(self.links.mean_weight))

    @property
    def takes_sketches(self) -> bool:
        """Whether sketches are taken in the current epoch."""
        if not self.rule.needs_vectors or self.planner.gave_up:
            return False
        return not self.rule.keeps_table or self.pace.is_due(self.epoch.number)

    @property
    def sees_rows(self) -> bool:
        """Whether passes of the current epoch are looked at: for sketches, or to prove what the record counts on."""
        record = self.run_record
        return self.takes_sketches or (record is not None and record.wants_proof)

    @property
    def examples(self) -> int:
        """Of all workers."""
        return sum(self.links.shard_sizes or (self.setup.examples,))

    def sketch_length(self, covered: int, everything: int, prices: Prices) -> int:
        """Dimensions of a sketch of a model with so many covered parameters, whose steps have these prices."""
        return self.setup.sketch_length(covered, everything, self.examples, prices)

    def _costs(self, source: SketchSource) -> Costs:
        """The same on all ranks: those of the one with the slowest machine."""
        costs = epoch_costs(self.setup, self.examples, source.price(self._rows_of_step), source.dim)
        for group in (self.links.workers, self.links.peers):
            if group is not None:
                told = [tuple(map(float, text.split())) for text in group.all_texts(" ".join(map(repr, costs)))]
                costs = Costs(*max(told))
        return costs

    # A model

    @property
    def _rows_of_step(self) -> int:
        return self.setup.batch_size * self.per.number

    @property
    def is_attached(self) -> bool:
        return self._source is not None

    def is_attached_to(self, source: SketchSource) -> bool:
        """Whether this is where sketches come from."""
        return self._source is source

    def check_attachable(self) -> None:
        """Raise if no model can be attached now."""
        setup = self.setup
        if self.is_attached:
            raise ValueError("this sampler is attached to a model already: call detach() on that handle first")
        apart = self.links.is_standalone and setup.workers > 1 and setup.shards == "global"
        if apart and self.rule.needs_vectors:
            raise ValueError(
                f"the sampler is one of {setup.workers} by num_replicas, but there is no process group of that size "
                "in which they could agree on an order that comes from gradients: initialize torch.distributed first, "
                "or use order='random', or shards='local'"
            )

    def connect(
        self,
        source: SketchSource,
        ids: Ids | None = None,
        record: bool | None = False,
        per: RowsPerExample = ONE_ROW,
    ) -> None:
        """Take sketches from `source` from now on, of as many dimensions as it has. record: see `attach`."""
        if self.planner.sees_all and not self.rule.keeps_table:  # it may need its loops between epochs, too
            load(*self.rule.c_sources())
        self.per = per
        self.links.open()
        self.planner.open(self.epoch)
        if self.links.workers is not None:
            agree(self.links.workers, {"the dimensions of a sketch": source.dim, "attach(record=...)": record})
        self.iterations.note()
        if self.rule.needs_vectors:
            self._adopt_dim(source.dim)
            if source.device.type == "cuda" and solver_is_on_gpu(self.setup, len(self.rule.order), source.dim):
                self._use_gpu(source.device)
        self.iterations.training.attach(source)
        self.iterations.attach_changed()
        self.pace.plan(self.setup.budget, self._costs(source))
        self._source, self.ids = source, ids and self._ids_in_subset(ids)
        self._start_record(source, record)
        self._turn_source(source)
        self._finish_if_over()

    def _start_record(self, source: SketchSource, wanted: bool | None) -> None:
        """Keep a record, or go on with it."""
        length = self.examples if self.links.shard_sizes else self.setup.subset.length
        if wanted is False or (wanted is None and length > LARGEST):
            self.run_record = None
        elif self.run_record is None:
            self.run_record = RunRecord(length, wanted, self._record_rows)
        self._attribute(self.attribution)
        source.counts_steps = self.run_record is not None
        if self.run_record is not None:
            price = source.price(self._rows_of_step)
            self.run_record.wanted, self.run_record.affordable = wanted, price.output <= SHARE * price.step

    def _attribute(self, before: Attribution | None = None) -> None:
        """Anew; the record is told of what is known."""
        self.attribution = Attribution(None if self.run_record is None else self.run_record.add, before, self.per)

    def _record_rows(self, examples: IntArray) -> IntArray:
        """Where they stand in the record: of workers' own datasets, side by side as in a table."""
        if not self.links.shard_sizes:
            return examples
        return self.setup.subset.rows_of(examples) + sum(self.links.shard_sizes[: self.setup.rank])

    def _turn_source(self, source: SketchSource) -> None:
        """To what is to be seen of the current epoch."""
        record = self.run_record
        source.notes_norms = self._notes_norms = record is not None and record.is_on(sketched=self.sees_rows)
        source.sketching = self.sees_rows

    def _use_gpu(self, device: torch.device) -> None:
        """Orders are found there."""
        self.rule.gpu_solver = GpuSolver(device)
        loading = BackgroundThread("heeler-triton")
        loading.submit(load_kernel)  # some tenths of a second, while the first epoch goes on
        loading.close(wait=0.0)  # it ends with its task

    def disconnect(self) -> None:
        """Take what waits, and no more sketches after it; what was seen stays. Holds no tensor or thread any more."""
        try:
            if self.is_attached:
                self.drain(wait=True)
                self.iterations.note()
                self.judge_if_over()
        finally:
            if self.run_record is not None:
                self.run_record.count_on(self._window)
            self._source = None
            self.iterations.training.detach()
            self.iterations.attach_changed()
            self.iterations.release()
            self.attribution = Attribution(before=self.attribution)
            self.planner.close(self.epoch)
            self.links.close()

    def close(self) -> None:
        """End all threads and connections, and take all hooks off; a finalizer does the same."""
        _close(self.planner, self.links, self.iterations.training)

    def _adopt_dim(self, dim: int) -> None:
        own_rule = isinstance(self.setup.order, OrderingRule)
        if own_rule and self.rule.dim not in (None, dim):
            raise ValueError(
                f"the model's sketches have {dim} dimensions, for it has no more covered parameters, but the rule "
                f"takes vectors of {self.rule.dim}: make the rule with dim={dim}, or name it, order='herd'"
            )
        if dim == self.dim:
            return
        if self.epoch.number or self.progress.used:
            raise RuntimeError("attach the model before the first epoch: sketches of another size were taken")
        self.dim = dim
        self._finalizer.detach()
        self.planner.close(self.epoch)
        self.planner = make_planner(self.setup, self.links, dim)
        self.epoch = self._epoch(0, self.planner.first())
        self.iterations.clear()
        self._finalizer = weakref.finalize(self, _close, self.planner, self.links, self.iterations.training)

    # What the sketcher tells: see `heeler.sketch.SketchListener`

    def forward_begins(self, rows: int, inputs: Tensor | None) -> Stamp:
        """Sketches of passes before this one are stored now; this one is about what was handed out by now."""
        self.spent.step()
        self.drain()
        latest, source = self._latest(), self._source
        is_mean = source is None or source.reduction == "mean"
        if source is not None and source.batch_dim and inputs is not None:
            inputs = inputs.transpose(0, source.batch_dim)
        return self.attribution.stamp(latest, self.iterations.others(latest), rows, inputs, is_mean=is_mean)

    def forward_counted(self, rows: int | None) -> Counted | None:
        """A forward that nobody sketches: how far the loop has come still matters."""
        self.spent.step()
        latest, named = self._latest(), self.attribution.named
        if rows is not None and self.per.number > 1:
            rows = self.attribution.examples_in(rows)
        if named is None:
            latest.advance(latest.handed_out if rows is None else rows, latest.handed_out)
            if self.planner.works_beside:
                self._start_early()
        source, record = self._source, self.run_record
        if not self._notes_norms or record is None or source is None or rows is None:
            return None
        record.collect(source.window)
        return record.begin(latest, rows, named, self.per, is_mean=source.reduction == "mean")

    def coverage_changed(self) -> None:
        """Earlier sketches cannot be compared with those to come: forget them, and take new ones."""
        self._deliver(wait=True)
        self._forget_all()
        self.pace.begin_again(self.epoch.number)

    def _latest(self) -> Progress:
        return self.iterations.latest or self.progress

    # From passes to examples: see `heeler.ordering.attribution`

    def drain(self, *, wait: bool = False) -> None:
        """Store what the last backwards left; with `wait`, also what is still on its way from a device."""
        self._send()
        self._deliver(wait=wait)
        self._start_early()

    @contextmanager
    def naming(self, examples: IntArray) -> Iterator[None]:
        """Passes whose forward and backward run inside are about `examples`, (B,) in batch order; they add up."""
        self.drain()
        before = self.attribution.named_passes
        with self.attribution.naming(examples):
            yield
        self._send()
        sent = self.attribution.named_passes > before
        latest = self._latest()
        if latest.expects(examples) and (sent or (self._source is not None and not self._source.sketching)):
            latest.skip(examples.size)
        elif sent:
            latest.reach(examples)
        self._deliver()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Passes inside are about no example."""
        if self._source is None:
            raise RuntimeError("no model is attached any more (detach() was called): there is nothing to pause")
        self.drain()
        source = self._source
        source.enabled = False
        try:
            yield
        finally:
            source.enabled = True

    def skip(self, examples: int | None = None) -> None:
        """The batch just drawn, or its first `examples`, is not trained on."""
        self.drain()
        self._latest().skip(examples)

    @property
    def ignored_passes(self) -> int:
        """Backward passes that were about no batch of the loader's, or of which that is not known."""
        return self.attribution.ignored

    def _pop(self) -> list[tuple[Stamp, Tensor]]:
        return self._source.pop_passes() if self._source is not None else []

    def _send(self) -> None:
        """Start what the last backwards left on its way to the host."""
        source = self._source
        if self.run_record is not None and source is not None and self._notes_norms and not source.sketching:
            self.run_record.collect(source.window)
        for stamp, sketches in self._pop():
            self.attribution.send(stamp, sketches, 0 if self._source is None else self._source.window)

    def _deliver(self, *, wait: bool = False) -> None:
        if not self._has_loops and not self._loops_loaded(wait=wait):
            return
        for indices, vectors in self.attribution.receive(self.epoch, self.planner.rule.keeps_table, wait=wait):
            self._observe(indices, vectors)

    def _loops_loaded(self, *, wait: bool) -> bool:
        """Whether what is stored can be: the first time on a machine loops are compiled while training goes on."""
        if self._cannot_store:
            self.attribution.drop()
            return False
        sources = self.rule.c_sources() if self.planner.sees_all else ()
        if not wait and not are_ready(*sources):
            return False
        try:
            load(*sources)
        except NoCompilerError as error:
            warn("%s. Training goes on in random order, without sketches", error)
            self.planner.gave_up = self._cannot_store = True
            return self._loops_loaded(wait=wait)
        self._has_loops = True
        return True

    def _start_early(self) -> None:
        current = self.iterations.latest
        if current is None or current.epoch is not self.epoch:
            return
        if not (current.used or self.iterations.has_trained(current)):
            return
        if self.planner.wants_start(self.epoch, current.trained):
            self._deliver(wait=True)
            self.rule.has_news = self.takes_sketches
            self.planner.start(self.epoch)

    def _settle(self) -> None:
        """Store all that can be stored."""
        self.drain(wait=True)
        for indices, vectors in self.attribution.settle(self.rule.keeps_table):
            self._observe(indices, vectors)

    def _forget_all(self) -> None:
        count = self.setup.examples
        step = FORGET if self.rule.keeps_table else count  # a rule without a table closes its epoch at each word
        for start in range(0, count, step):
            self.planner.forget(np.arange(start, min(start + step, count), dtype=np.int64))

    # The planner, its rule and table number the examples of the subset, 0..k-1. All else has the dataset's indices.

    def _epoch(self, number: int, plan: Plan, start: int = 0) -> Epoch:
        order, subset = plan.part, self.setup.subset
        if not isinstance(order, LazyOrder):
            if self._excluded.size:
                order = self.planner.partition.without(order, self._excluded, self.setup.examples)
            return Epoch(number, subset.numbers_of(order), plan, start)
        return Epoch(number, order if subset.numbers is None else order.renumbered(subset.numbers), plan, start)

    def _observe(self, examples: IntArray, vectors: NDArray[np.float32]) -> None:
        if not self.takes_sketches:  # they were taken for the record alone
            return
        rows = self.setup.subset.rows_of(examples)
        known = rows >= 0
        if known.all():
            self.planner.observe(rows, vectors)
            return
        self.attribution.left_out(int((~known).sum()))
        if known.any():
            self.planner.observe(rows[known], vectors[known])

    def _ids_in_subset(self, ids: Ids) -> Ids:
        if self.setup.subset.numbers is None:
            return ids

        def checked(batch: Any) -> IntArray:
            found = np.asarray(ids(batch)).astype(np.int64).reshape(-1)
            self.setup.subset.check(found)
            return found

        return checked

    def exclude(self, examples: IntArray) -> None:
        """Leave these examples out from the next epoch on. Of several workers all call it, and hear of all."""
        if isinstance(self.epoch.order, LazyOrder):
            raise ValueError("an order in two levels cannot leave out examples: start a new Sampler(subset=...)")
        if self.links.peers is not None:
            raise ValueError(
                "ranks that hold parts of one copy of the model would not all hear of it: start a new "
                "Sampler(subset=...)"
            )
        self.setup.subset.check(examples)
        mine = self.setup.subset.rows_of(examples) + self.planner.partition.offset()
        wanted = self._united(np.union1d(self._to_exclude, mine))
        if wanted.size >= self.examples:
            raise ValueError("all examples would be left out: nothing would be left to train on")
        self._to_exclude = wanted

    def _united(self, numbers: IntArray) -> IntArray:
        """With those that other workers name; without an answer from them what all know, or lengths would differ."""
        workers, heard = self.links.workers, list[IntArray]()
        if workers is None:
            return numbers
        self._settle()
        with suppress(RankFault):
            self.planner.consolidate(self.epoch, self._position(), lambda: heard.append(united(workers, numbers)))
        if not heard:
            warn("no example is left out: exclude() has to be called on every rank at the same step, and was not")
            return self._to_exclude
        return heard[0]

    def _exclude_now(self) -> None:
        """The next epoch is about to begin: the places of these examples in it go to others, and so do their rows."""
        new = np.setdiff1d(self._to_exclude, self._excluded)
        self._excluded = self._to_exclude
        offset = self.planner.partition.offset()
        own = new[(new >= offset) & (new < offset + self.setup.examples)] - offset
        if own.size and self.rule.keeps_table:
            self.planner.forget(own)

    # Epochs

    def draw(self) -> Iterator[int]:
        """The indices of an epoch: of the next one, if the current one was trained on and this is no look at it."""
        return chain.from_iterable(self._chunks())  # in C: no Python runs per index

    def _chunks(self) -> Iterator[Iterator[int]]:
        yield from self._begin().draw()

    def ask_for(self, epoch: int) -> None:
        """The next `draw` shall be of this epoch, if that lies ahead."""
        self._asked_epoch = epoch

    def _begin(self) -> Progress:
        asked = self._asked_epoch
        endless = is_endless()
        if not self.iterations.is_known_look():
            self.drain()
        if endless or (asked is not None and asked > self.epoch.number) or not self.iterations.is_look(self.epoch):
            self._asked_epoch = None
            self._settle()
            resumed_at_end = self._ended_before and asked != self.epoch.number
            if endless or resumed_at_end or self.iterations.is_over(self.epoch):
                self._advance()
            if asked is not None and asked > self.epoch.number:
                self._skip_to(asked)
            self._resumed = self._ended_before = False
        progress = Progress(
            self.epoch,
            self.setup.batch_size,
            self.ids,
            self.per,
            records=self.is_attached and self.sees_rows,
            listener=self,
        )
        self.iterations.add(progress)
        return progress

    # What an iteration tells: see `heeler.ordering.progress.IterationListener`

    def batch_handed_out(self, progress: Progress) -> None:
        """From now on training belongs to this iteration."""
        self.iterations.handed_out(progress)
        if progress.batches <= 1 and progress.epoch is self.epoch and self._source is not None:
            self._turn_source(self._source)  # not before: a loader draws ahead of the epoch's end
            if self.takes_sketches:
                self.sketched_at = self._source.weights()

    def iteration_ended(self, progress: Progress) -> None:
        """If it has trained, the other workers need not wait for the loop's next iteration."""
        if progress.epoch is self.epoch and not progress.is_look:
            self.drain(wait=True)
            self.iterations.note()
            self._tell_if_untrained(progress)
            if progress.done:
                self._settle()
                self._judge(progress)
                self._finish()

    def iteration_left(self, progress: Progress) -> None:
        """The same, if nobody else trains in this epoch."""
        if progress.epoch is self.epoch and not progress.is_look and self.links.workers is not None:
            self.drain()
            self._finish_if_over()

    def _finish_if_over(self) -> None:
        if self.judge_if_over():
            self._finish(may_go_on=not self.progress.over)

    def _finish(self, *, may_go_on: bool = False) -> None:
        self.rule.has_news = self.takes_sketches
        self.planner.finish(self.epoch, may_go_on=may_go_on)

    def judge_if_over(self) -> bool:
        """Whether the epoch has come to its end; if so, nothing of it is left to decide."""
        over = self.iterations.is_over(self.epoch)
        if over:
            self._settle()
            self._judge(self.progress)
        return over

    def _judge(self, progress: Progress) -> None:
        """An epoch has come to its end: drop rows that may be other examples', and say if few have a sketch."""
        doubtful = self.attribution.misfiled(progress)
        if self.run_record is not None and doubtful.size:
            self.run_record.forget(doubtful)
        if progress.finished:
            self._tell(progress)
        if doubtful.size > self._misfiled:
            self._misfiled = doubtful.size
            rows = self.setup.subset.rows_of(doubtful)
            self.planner.forget(rows[rows >= 0])
        self._tell_if_unknown()

    def _advance(self) -> None:
        """Make the next epoch."""
        progress = self.progress
        self._judge(progress)
        self._tell(progress)
        done = min(progress.trained, self.attribution.filed + progress.start)
        if self.run_record is not None:
            self.run_record.end_epoch(self.epoch.number, progress)
        sketched = self.takes_sketches
        self.spent.end_epoch(sketched=sketched)
        begun = time.perf_counter()
        plan = self._next_plan(self.epoch)
        self.spent.waits += time.perf_counter() - begun
        self._exclude_now()
        if self._misfiled:
            self.pace.begin_again(self.epoch.number + 1)
        elif sketched and progress.ended and done < ENOUGH_TRAINED * len(self.epoch.order):
            self.pace.repeat()  # an epoch that was cut short has left examples without a sketch: one more
        self._turn_to(self._epoch(self.epoch.number + 1, plan))

    def _turn_to(self, epoch: Epoch) -> None:
        self.epoch, self._misfiled = epoch, 0
        self.attribution.begin_epoch()

    def _next_plan(self, epoch: Epoch) -> Plan:
        self.rule.has_news = self.takes_sketches
        plan = self.planner.next(epoch)
        self._tell_if_unknown()
        return plan

    def _tell_if_unknown(self) -> None:
        """Say, once, that no more sketches are taken, and why, where all of them meet."""
        table = self.rule.table
        if self._gave_up or table is None or not self.planner.sees_all:
            return
        if table.own.at_chance:
            self._gave_up = True
            warn(GAVE_UP, 100 * table.own.share.value, table.own.share.comparisons)
        elif self.rule.useless:
            self._gave_up = True
            warn(STOPPED)

    def _tell_if_untrained(self, progress: Progress) -> None:
        """Once the loader was read twice: say that the attached model has never had a gradient."""
        source = self._source
        if source is None or source.backwards or progress.used or not progress.with_gradients:
            return
        self._untrained += 1
        if self._untrained == 2:
            warn(UNTRAINED)

    def _tell(self, progress: Progress) -> None:
        """After the first sketched epoch: say if it left few examples with a sketch."""
        if self._told or not self.takes_sketches or not self.is_attached or not progress.ended:
            return
        self._told = True
        share = (self.attribution.filed + progress.start) / max(1, len(self.epoch.order))
        if share < ENOUGH_TRAINED:
            warn(
                "only %.0f%% of the examples of an epoch have a sketch, so its order is largely random: %s",
                100 * share,
                self.attribution.why(progress),
            )

    def _skip_to(self, number: int) -> None:
        plan = self.epoch.plan
        if self.epoch.number < number <= self.epoch.number + FAST_FORWARD:
            for skipped in range(self.epoch.number, number):
                plan = self._next_plan(replace(self.epoch, number=skipped, plan=plan))
        number = max(number, self.epoch.number)
        # Whatever there is, it is not of the epochs before this one.
        self.pace.begin_again(number, skipped=number - self.epoch.number)
        self._turn_to(self._epoch(number, plan))

    # State and metrics

    def consolidate(self) -> None:
        """Bring what all workers have seen to the leader; every rank calls it."""
        self._settle()
        try:
            self.planner.consolidate(self.epoch, self._position(), self._gather_records)
        except RankFault as fault:
            warn("the record lacks what other ranks have seen, for not all of them called consolidate(): %s", fault)

    def _gather_records(self) -> None:
        """Bring what all workers' records hold to rank 0."""
        record, transport = self.run_record, self.links.workers
        if record is not None and transport is not None:
            record.take_others(gathered(transport, record.record(self.epoch.number).arrays()))

    @property
    def record(self) -> Record:
        """What the run knows about each example."""
        return self._needed_record().record(self.epoch.number)

    @property
    def steps(self) -> Steps:
        """The examples of the run's steps."""
        return self._needed_record().steps()

    def spikes(self) -> list[Spike]:
        """Steps whose gradient was far above the recent ones."""
        return self._needed_record().spikes(self.epoch.number)

    def _needed_record(self) -> RunRecord:
        if self.is_attached:
            self.drain(wait=True)
            self.judge_if_over()
        if self.run_record is None:
            raise ValueError(
                "no record is kept: attach(record=False) was asked for, no model is attached yet, or there are more "
                f"than {LARGEST} examples, of which attach(record=True) keeps one"
            )
        return self.run_record

    def _position(self) -> int:
        """How far training has come in this epoch; an evaluation does not count."""
        progress = self.progress
        return progress.trained if self.iterations.has_trained(progress) else self.epoch.start

    def state_dict(self) -> dict[str, Any]:
        """All state as a copy, arrays of NumPy."""
        self._settle()
        over = self.progress.over and self.judge_if_over()
        return {
            "epoch": self.epoch.number,
            "trained": self._position(),
            "over": over or self._ended_before,
            "examples": self.setup.examples,
            **self._pace_state(),
            "gave_up": self.planner.gave_up,
            **self._record_state(),
            **({"excluded": self._excluded, "to_exclude": self._to_exclude} if self._to_exclude.size else {}),
            **subset_state(self.links.subset, self.setup.subset, self.links.shard_sizes is None),
            **self.planner.state_dict(self.epoch),
        }

    def _record_state(self) -> dict[str, Any]:
        if self.run_record is None:
            return {}
        return {"record": self.run_record.state_dict(self.epoch.number, self._window)}

    @property
    def _window(self) -> int:
        return 0 if self._source is None else self._source.window

    def _pace_state(self) -> dict[str, int]:
        began, before = self.pace.began, self.pace.taken_before
        if self._misfiled:  # the next epoch begins again
            began, before = self.epoch.number + 1, self.pace.taken(self.epoch.number + 1)
        return {"sketches_began": began, "sketched_before": before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises before anything is changed if the state does not fit."""
        check_subset(state, self.links.subset)
        sizes = self.links.shard_sizes
        check_state(state, sum(sizes or (state.get("examples", 0),)))
        if sizes is None:
            self._check_length(state["examples"])
        elif tuple(state.get("shard_sizes", sizes)) != sizes:
            raise StateError(f"the state is of shards of {state['shard_sizes']} examples, these are {list(sizes)}")
        record = self.run_record
        if record is not None and "record" in state:
            record = record.loaded(state["record"], self._window, whole=self.links.leads)
        plan, same_workers = self.planner.load_state_dict(state)
        self._pop()  # whatever was under way belongs to another run
        self._excluded, self._to_exclude = (
            np.array(state.get(name, ()), np.int64) for name in ("excluded", "to_exclude")
        )
        self.run_record = record
        self._attribute()
        self._misfiled, self._gave_up = 0, self.planner.gave_up or self.rule.useless
        self.pace.restore(state["sketches_began"], state.get("sketched_before", 0))
        self._resume(state["epoch"], plan, self._own_position(state, plan) if same_workers else 0, over=state["over"])

    def _own_position(self, state: dict[str, Any], plan: Plan) -> int:
        """Where this worker stood: with unequal shards not where the leader did."""
        known = state.get("positions", [])
        own = known[self.setup.rank] if self.setup.rank < len(known) else -1
        return min(own if own >= 0 else state["trained"], len(plan.part))

    def position(self) -> dict[str, Any]:
        """Where the loader stands: small, and O(1) to make."""
        place = {"epoch": self.epoch.number, "drawn": self.progress.drawn, "examples": self.setup.examples}
        return place if self.links.subset == ALL else {**place, "subset": self.links.subset}

    def load_position(self, state: dict[str, Any]) -> None:
        """Go on where `position` was taken. The full state, if it was loaded, knows better and stands."""
        check_subset(state, self.links.subset)
        self._check_length(state["examples"])
        if self._resumed:
            return
        self._skip_to(state["epoch"])
        if self.rule.needs_vectors and state["epoch"] > 0:
            warn(
                "resuming from the sampler's small state alone: this epoch's order is a new, random one. "
                "Save handle.state_dict() too, and load it first, to go on in the same order."
            )
        drawn = state["drawn"]
        self._resume(self.epoch.number, self.epoch.plan, drawn, over=drawn == len(self.epoch.order))

    def _resume(self, number: int, plan: Plan, position: int, *, over: bool) -> None:
        self.epoch = self._epoch(number, plan, position)
        self.iterations.clear()
        self._resumed, self._ended_before = True, over

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any logger."""
        self.drain(wait=True)
        numbers = {"epoch": float(self.epoch.number), "ignored_passes": float(self.ignored_passes)}
        if self.rule.table is not None:
            numbers["examples_with_sketch"] = self.rule.table.share_seen
            agreement = self.rule.table.persistence.agreement
            if agreement is not None:
                numbers["sketch_agreement"] = agreement
            own = self.rule.table.own.share
            if own.comparisons:
                numbers["sketch_knows_its_own"], numbers["sketches_compared"] = own.value, own.comparisons
        if self.setup.strata is not None:
            numbers["strata"] = float(len(self.setup.strata.names))
        judgement = self.rule.judgement
        if judgement is not None and judgement.looks:
            numbers["order_is_balanced"] = float(judgement.ordered)
            if judgement.verdict.helps is not None:
                numbers["ordering_helps"] = float(judgement.verdict.helps)
            numbers["evenness"], numbers["evenness_lost"] = judgement.looks[-1].evenness, judgement.loss_of_evenness
            if judgement.balance is not None:
                numbers["realized_steps"], numbers["realized_prefixes"] = judgement.balance
        if self.pace.budget is not None:
            numbers["budget"] = self.pace.budget
            numbers["planned_share"] = self.pace.share(self.epoch.number + 1)
        numbers |= self.spent.metrics()
        solution = self.rule.last_solution
        if solution is not None:
            numbers["herding_bound"] = float(solution.bound_after)
            numbers["herding_bound_random"] = float(solution.bound_random)
            numbers["solve_seconds"] = float(solution.seconds)
            numbers["solve_sweeps"] = float(solution.sweeps)
        return {**numbers, **self.planner.metrics()}

    def _check_length(self, examples: int) -> None:
        if examples != self.setup.examples:
            raise StateError(
                f"the state is of a dataset of {examples} examples, this one has {self.setup.examples}: to carry it "
                "over to a dataset that has grown, use heeler.grow(state, examples)"
            )


def _close(planner: Planner, links: Links, training: Training) -> None:
    """Must be given nothing that refers to the session, or that would never be freed."""
    planner.close(None)
    links.close()
    training.close()
