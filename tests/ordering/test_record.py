"""The record is what an honest diary of the loop says, in every epoch, or says nothing."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.ordering.record import Passes, Record

CLASSES = 4
Diary = dict[int, list[tuple[int, int, float]]]
"""By example: (epoch, step, norm) of each time it was trained on."""


class Indexed(TensorDataset):
    """Its items end with their own number, which the model never sees."""


class Run:
    """A loop that writes its own diary."""

    def __init__(self, examples: int = 90, batch_size: int = 16, *, record: bool | None = True, **options: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        inputs = torch.randn(examples, 6, generator=generator)
        targets = (inputs @ torch.randn(6, CLASSES, generator=generator)).argmax(1)
        self.dataset, self.batch_size = Indexed(inputs, targets, torch.arange(examples)), batch_size
        torch.manual_seed(1)
        self.model: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))
        self.sampler = heeler.Sampler(self.dataset, batch_size=batch_size, budget=None, **options)
        self.handle = heeler.attach(self.model, self.sampler, record=record)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.diary: Diary = defaultdict(list)
        self.epoch = self.step = 0

    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(self.dataset, batch_size=self.batch_size, sampler=self.sampler, **options)

    def norms(self, inputs: Tensor, targets: Tensor) -> list[float]:
        with self.handle.paused(), torch.no_grad():
            probabilities = self.model(inputs).softmax(1)
        return (probabilities - nn.functional.one_hot(targets, CLASSES)).norm(dim=1).tolist()

    def train(self, batch: list[Tensor], parts: int = 1) -> None:
        self.optimizer.zero_grad()
        for inputs, targets, numbers in zip(*(each.chunk(parts) for each in batch), strict=True):
            self.note(inputs, targets, numbers)
            nn.functional.cross_entropy(self.model(inputs), targets).backward()
        self.optimizer.step()
        self.step += 1

    def note(self, inputs: Tensor, targets: Tensor, numbers: Tensor) -> None:
        for number, norm in zip(numbers.tolist(), self.norms(inputs, targets), strict=True):
            self.diary[number].append((self.epoch, self.step, norm))

    def epochs(self, count: int, parts: int = 1, until: int | None = None, **options: Any) -> None:
        for _ in range(count):
            for batch in self.loader(**options):
                self.train(batch, parts)
                if self.step == until:
                    return
            self.epoch += 1

    def check(self, *, of_epochs: Any = None) -> None:
        record = self.handle.record
        for number in range(len(self.dataset)):
            times = [each for each in self.diary[number] if of_epochs is None or each[0] in of_epochs]
            assert record.times[number] == len(times), number
            if times:
                assert record.mean[number] == pytest.approx(np.mean([norm for _, _, norm in times]), rel=1e-4)
                assert record.last[number] == pytest.approx(times[-1][2], rel=1e-4)
                assert record.epoch[number] == times[-1][0]
            else:
                assert np.isnan(record.mean[number])
                assert record.epoch[number] == -1
        by_step = defaultdict(set)
        for number, times in self.diary.items():
            for epoch, step, _ in times:
                if of_epochs is None or epoch in of_epochs:
                    by_step[step].add(number)
        assert set(self.handle.steps.numbers.tolist()) == set(by_step)
        assert all(set(self.handle.steps[step].tolist()) == found for step, found in by_step.items())


@pytest.mark.parametrize("order", ["herd", "random", "pair"])
@pytest.mark.parametrize(("examples", "options"), [(90, {}), (96, {"drop_last": True}), (90, {"num_workers": 2})])
def test_it_is_what_the_loop_did(order: str, examples: int, options: dict[str, Any]) -> None:
    run = Run(examples, order=order)
    run.epochs(5, **options)
    if "drop_last" not in options or order != "pair":
        run.check()


@pytest.mark.parametrize("kind", ["shards", "two levels"])
def test_of_streams_and_of_orders_in_two_levels(kind: str) -> None:
    run = Run(96, 8, **({"order": heeler.two_levels(block_size=24)} if kind == "two levels" else {}))
    if kind == "shards":
        run.handle.detach()
        parts = [torch.utils.data.Subset(run.dataset, range(start, start + 16)) for start in range(0, 96, 16)]
        run.dataset = heeler.streams.from_parts(parts)
        run.sampler = heeler.Sampler(run.dataset, batch_size=8, budget=None)
        run.handle = heeler.attach(run.model, run.sampler, record=True)
    run.epochs(4)
    run.check()


@settings(max_examples=15, deadline=None)
@given(
    examples=st.integers(3, 60),
    batch_size=st.integers(1, 17),
    parts=st.integers(1, 3),
    order=st.sampled_from(["herd", "random"]),
    subset=st.booleans(),
)
def test_of_generated_loops(examples: int, batch_size: int, parts: int, order: str, subset: bool) -> None:
    chosen = {"subset": np.arange(0, examples, 2)} if subset else {}
    run = Run(examples, batch_size, order=order, **chosen)
    run.epochs(4, parts if batch_size % parts == 0 and len(run.sampler) % batch_size % parts == 0 else 1)
    run.check()


def test_it_is_the_same_after_a_resume_anywhere() -> None:
    whole = Run()
    whole.epochs(6)
    for stop in (3, 6, 14, 18, 25):
        first = Run()
        first.epochs(6, until=stop)
        state = copy.deepcopy((first.handle.state_dict(), first.model.state_dict()))
        second = Run()
        second.handle.load_state_dict(state[0])
        second.model.load_state_dict(state[1])
        second.epochs(6 - -(-stop // 6) + (stop % 6 > 0))
        for name in ("times", "mean", "square", "last", "epoch"):
            np.testing.assert_array_equal(getattr(second.handle.record, name), getattr(whole.handle.record, name))
        assert all(np.array_equal(second.handle.steps[t], whole.handle.steps[t]) for t in range(36))


def test_by_default_small_models_are_recorded_where_they_are_sketched() -> None:
    run = Run(record=None)
    run.epochs(5)
    run.check(of_epochs={0, 1, 3})
    assert heeler.attach(nn.Linear(4096, 4096), heeler.Sampler(range(99), batch_size=64)).session.run_record.affordable


def test_none_is_kept_if_none_is_wanted() -> None:
    run = Run(record=False)
    run.epochs(2)
    with pytest.raises(ValueError, match=r"attach\(record=False\)"):
        _ = run.handle.record
    assert "record" not in run.handle.state_dict()["session"]


# Loops that do something else in an epoch that nobody looks at: nothing of it is kept, rather than something wrong


def skips(run: Run) -> None:
    for place, batch in enumerate(run.loader()):
        if place != 2:
            run.train(batch)


def drops_rows(run: Run) -> None:
    for place, batch in enumerate(run.loader()):
        run.train([each[1:] for each in batch] if place == 2 else batch)


def looks_ahead(run: Run) -> None:
    batches = iter(run.loader())
    held = next(batches)
    for batch in batches:
        run.train(held)
        held = batch
    run.train(held)


def adds_a_pass(run: Run) -> None:
    for place, batch in enumerate(run.loader()):
        if place == 1:
            nn.functional.cross_entropy(run.model(torch.randn_like(batch[0])), batch[1]).backward()
            run.step += 1  # `train` clears its gradient
        run.train(batch)


@pytest.mark.parametrize("odd", [skips, drops_rows, looks_ahead, adds_a_pass])
def test_an_epoch_that_goes_otherwise_is_left_out(odd: Any) -> None:
    run = Run(order="herd")
    run.epochs(2)  # epoch 0 and 1 are sketched, 2 is not
    odd(run)
    run.epoch += 1
    run.epochs(1)
    run.check(of_epochs={0, 1, 3})


def test_a_loop_that_always_looks_ahead_is_recorded() -> None:
    run = Run(order="herd")
    for _ in range(5):
        looks_ahead(run)
        run.epoch += 1
    run.check()


def test_a_skipped_batch_that_fits_another_turn_is_noticed_at_the_end() -> None:
    """To a loop that looks ahead, one batch that is outstanding looks as usual."""
    run = Run(96, order="herd")
    for epoch in (looks_ahead, looks_ahead, skips, looks_ahead):
        epoch(run)
        run.epoch += 1
    run.check(of_epochs={0, 1, 3})


def test_other_passes_in_every_epoch_prove_nothing() -> None:
    run = Run(order="herd")
    for _ in range(5):
        adds_a_pass(run)
        run.epoch += 1
    run.check(of_epochs={0, 1, 3})


def test_rows_that_the_loop_reorders_are_recorded_while_they_are_recognized() -> None:
    run = Run(order="herd")
    for _ in range(5):
        for inputs, targets, numbers in run.loader():
            mixed = torch.randperm(len(inputs))
            run.train([inputs[mixed], targets[mixed], numbers[mixed]])
        run.epoch += 1
    run.check(of_epochs={0, 1, 3})


def test_an_evaluation_that_takes_gradients_is_no_training() -> None:
    run = Run(order="herd")
    for _ in range(4):
        for place, batch in enumerate(run.loader()):
            if place == 3:
                run.model(batch[0])
            run.train(batch)
        run.epoch += 1
    run.check()


# What the model returns


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.inner(x)
        if self.kind == "dict":
            return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}
        if self.kind == "tuple":
            return logits.sum(), logits
        return nn.functional.cross_entropy(logits, y)


@pytest.mark.parametrize("kind", ["dict", "tuple", "loss"])
def test_the_output_is_found_in_what_a_model_returns(kind: str) -> None:
    run = Run()
    inner = run.model
    model = Wrapped(inner, kind)
    run.handle.detach()
    sampler = heeler.Sampler(run.dataset, batch_size=16, budget=None)
    handle = heeler.attach(model, sampler, record=True)
    run.model = lambda x: inner(x)
    for _ in range(4):
        for inputs, targets, numbers in DataLoader(run.dataset, batch_size=16, sampler=sampler):
            probabilities = inner(inputs).softmax(1).detach()
            for n, norm in zip(
                numbers.tolist(), (probabilities - nn.functional.one_hot(targets, 4)).norm(dim=1), strict=True
            ):
                run.diary[n].append((0, 0, float(norm)))
            out = model(inputs, targets)
            loss = out["loss"] if kind == "dict" else out
            (nn.functional.cross_entropy(out[1], targets) if kind == "tuple" else loss).backward()
    record = handle.record
    if kind == "loss":  # it has no row per example
        assert np.isnan(record.mean).all()
        assert (record.times == 3).all()  # sketches know their examples
    else:
        expected = [np.mean([norm for *_, norm in run.diary[n]]) for n in range(len(run.dataset))]
        np.testing.assert_allclose(record.mean, expected, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_of_a_compiled_model() -> None:
    run = Run()
    run.handle.detach()
    run.sampler = heeler.Sampler(run.dataset, batch_size=16, budget=None)
    run.model = torch.compile(run.model, backend="aot_eager")
    run.handle = heeler.attach(run.model, run.sampler, record=True)
    run.norms = lambda inputs, targets: [0.0] * len(inputs)  # a paused forward would be compiled, too
    run.epochs(4)
    record = run.handle.record
    assert (record.times == 4).all()
    assert np.isfinite(record.mean).all()
    assert (record.mean > 0.1).all()


def test_a_scaler_and_a_summed_loss_leave_no_trace() -> None:
    means = []
    for factor, reduction in ((1.0, "mean"), (1.0, "sum")):
        run = Run(order="random")
        run.handle.detach()
        run.sampler = heeler.Sampler(run.dataset, batch_size=16, order="random")
        run.handle = heeler.attach(run.model, run.sampler, record=True, reduction=reduction)  # type: ignore[arg-type]
        for group in run.optimizer.param_groups:
            group["lr"] = 0.0
        for _ in range(3):
            for inputs, targets, _ in run.loader():
                (factor * nn.functional.cross_entropy(run.model(inputs), targets, reduction=reduction)).backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
        means.append(run.handle.record.mean)
    np.testing.assert_allclose(means[0], means[1], rtol=1e-4)


# The record itself


@settings(max_examples=60, deadline=None)
@given(
    passes=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 5), st.floats(0, 10, width=32) | st.just(float("nan"))), max_size=30
    ),
    cut=st.integers(0, 4),
)
def test_it_can_be_split_among_workers(passes: list[tuple[int, int, float]], cut: int) -> None:
    """A record of all passes is that of two workers', brought together; epochs come in turn."""
    passes = [(epoch, example, norm) for epoch, example, norm in passes if norm == norm or example == 5]
    passes = [(e, x, float("nan") if x == 5 else n) for e, x, n in passes]  # example 5's output tells nothing
    whole, parts = Record(6), [Record(6), Record(6)]
    for epoch in range(5):
        for record, which in ((whole, {0, 1}), (parts[0], {0}), (parts[1], {1})):
            mine = [(x, n) for e, x, n in passes if e == epoch and int(x > cut) in which]
            examples = np.array([x for x, _ in mine], np.int64)
            record.add(epoch, Passes(np.zeros(len(mine), np.int64), examples, np.array([n for _, n in mine], "f4")))
    parts[0].merge(parts[1])
    for name in ("times", "mean", "square", "last", "epoch"):
        np.testing.assert_allclose(getattr(parts[0], name), getattr(whole, name), rtol=1e-5)


def test_a_grown_state_keeps_it() -> None:
    run = Run(60, order="herd")
    run.epochs(3)
    grown = heeler.grow(run.handle.state_dict(), 80)
    longer = Run(80, order="herd")
    longer.handle.load_state_dict(grown)
    np.testing.assert_array_equal(longer.handle.record.times, [3] * 60 + [0] * 20)


def test_a_state_of_another_length_is_refused() -> None:
    run = Run(60, order="random")
    run.epochs(1)
    state = run.handle.state_dict()
    state["session"]["record"]["times"] = state["session"]["record"]["times"][:-1]
    with pytest.raises(ValueError, match="record"):
        run.handle.load_state_dict(state)
