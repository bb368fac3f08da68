"""What a handle says of diversity: the table's own numbers, once an epoch, and nothing where there is no table."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.diversity import batch_size_bound, epoch, layouts_of, sentence
from tests.distributed.ranks import gradients, problem, run_ranks, set_up, walk

N, BATCH = 96, 8


def run(order="herd", epochs=2, dim=None, width=5, each_step=lambda handle: None):
    """A handle after some epochs of a small network, and its table."""
    torch.manual_seed(0)
    x, y = torch.randn(N, 12), torch.randint(0, 3, (N,))
    model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Linear(width, 3))
    sampler = heeler.Sampler(N, batch_size=BATCH, order=order, dim=dim, refresh=1)
    handle = heeler.attach(model, sampler, layers="all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, sampler=sampler)
    for _ in range(epochs):
        for inputs, target in loader:
            nn.functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            each_step(handle)
    return handle


@pytest.mark.parametrize("dim", [None, 64], ids=["whole gradients", "sketches"])
def test_metrics_hold_what_the_table_says(dim):
    handle = run(dim=dim, width=40)
    handle.collect(wait=True)
    numbers = handle.metrics()
    table, layouts = handle.sampler.rule.table, layouts_of(handle.sketcher)
    assert (layouts is None) == (dim is None)
    expected = batch_size_bound(table.rows, sketch=layouts)
    assert numbers["batch_size_bound"] == pytest.approx(expected.value)
    assert numbers["batch_size_bound_low"] == pytest.approx(expected.low)
    assert numbers["batch_size_bound_high"] == pytest.approx(expected.high)
    assert (expected.low < expected.high) == (dim is not None)  # whole gradients leave nothing uncertain
    assert numbers["gradient_diversity"] == pytest.approx(expected.value / N)
    assert numbers["noise_scale"] == pytest.approx(expected.value - 1)
    said = "train as well as single examples; you use 8"
    assert sentence(expected, BATCH).endswith(said)
    assert handle.batch_size_advice() == sentence(expected, BATCH) + (
        " (an upper end: the weights moved while this was measured)"
    )


def test_the_table_is_read_once_an_epoch_however_often_metrics_are_asked_for(monkeypatch):
    reads = []
    true = epoch.diversity_of
    monkeypatch.setattr(epoch, "diversity_of", lambda t, **kw: reads.append(kw["rows"].mean()) or true(t, **kw))
    logged = []
    handle = run(epochs=3, each_step=lambda handle: logged.append(handle.metrics().get("batch_size_bound")))
    steps = N // BATCH
    first, second, third = logged[:steps], logged[steps : 2 * steps], logged[2 * steps :]
    assert first[:-1] == [None] * (steps - 1)  # nothing before all examples were seen
    assert set(second[:-1]) == {first[-1]}  # what the epoch before said
    assert set(third[:-1]) == {second[-1]}
    assert len(reads) == 3
    assert min(reads) >= 1 - 2 / steps
    # At an epoch's end the numbers are of that epoch, though the last batch is not filed yet.
    handle.collect(wait=True)
    whole = float(batch_size_bound(handle.sampler.rule.table.rows))
    assert third[-1] == pytest.approx(whole, rel=0.2)
    assert third[-1] != third[-2]


def test_whoever_asks_at_an_epochs_start_alone_hears_of_the_one_before():
    handle = run(epochs=3)
    handle.sampler.epoch, handle.sampler.positions.trained = 3, 0  # as when the fourth epoch has begun
    assert handle.metrics()["batch_size_bound"] > 1


@pytest.mark.parametrize("order", ["pair", "random"])
def test_without_a_table_there_are_no_such_numbers(order):
    handle = run(order)
    assert not {"gradient_diversity", "batch_size_bound", "noise_scale"} & handle.metrics().keys()
    assert "keeps no sketches" in handle.batch_size_advice()


def test_before_enough_was_seen_the_advice_says_so():
    assert "too few examples" in run(epochs=0).batch_size_advice()


def test_a_loaded_state_has_numbers_of_its_own():
    trained, fresh = run(epochs=3), run(epochs=1)
    before = fresh.metrics()["batch_size_bound"]
    fresh.load_state_dict(trained.state_dict())
    assert fresh.metrics()["batch_size_bound"] == pytest.approx(trained.metrics()["batch_size_bound"])
    assert fresh.metrics()["batch_size_bound"] != before


def test_a_table_that_is_written_to_is_not_waited_for():
    handle = run(epochs=2)
    table, held = handle.sampler.rule.table, heeler.diversity.epoch.EpochDiversity(handle.sketcher)
    lock = _Lock(free=False)
    assert held.read(table, 0, lock) is None
    lock.free = True
    first = held.read(table, 0, lock)
    assert first is not None
    assert lock.released == 1
    lock.free = False
    assert held.read(table, 1, lock) is first


def test_numbers_that_are_not_finite_are_left_out():
    rows = np.array([[1.0, 2.0], [-1.0, -2.0]])
    assert epoch.as_numbers(epoch.diversity_of(rows)) == {}


class _Lock:
    def __init__(self, free):
        self.free, self.released = free, 0

    def acquire(self, blocking):
        assert not blocking
        return self.free

    def release(self):
        self.released += 1


def test_with_several_workers_rank_0_knows_of_all_examples():
    def advised(rank):
        dataset, model = problem(64)
        sampler, handle, loader = set_up(dataset, model)
        walk(model, sampler, loader, 3)
        exact = float(batch_size_bound(gradients(dataset, model)))
        return handle.metrics().get("batch_size_bound"), handle.batch_size_advice(), exact

    host, other = run_ranks(2, advised)
    assert host[0] == pytest.approx(host[2], rel=1e-3)  # the weights stay where they are; the table is half precision
    assert "you use 8 (" in host[1]
    assert other[0] is None
    assert "ask rank 0" in other[1]
