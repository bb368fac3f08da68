"""What a handle says of diversity: the table's own numbers, on request, and nothing where there is no table."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.diversity import advice, batch_size_bound, diversity_of, layouts_of, of, of_handle, sentence
from tests.distributed.ranks import gradients, problem, run_ranks, set_up, walk

N, BATCH = 96, 8


def run(order="herd", epochs=2, dim=None, width=5, each_step=lambda handle: None):
    """A handle after some epochs of a small network."""
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


@pytest.mark.parametrize("dim", [None, 64], ids=["exact gradients", "sketches"])
def test_the_handle_says_what_the_table_says(dim):
    handle = run(dim=dim, width=40)
    numbers = of(handle).as_numbers()
    layouts = layouts_of(handle.sketcher)
    assert (layouts is None) == (dim is None)
    expected = batch_size_bound(handle.table.rows, sketch=layouts)
    assert numbers["batch_size_bound"] == pytest.approx(expected.value)
    assert numbers["batch_size_bound_low"] == pytest.approx(expected.low)
    assert numbers["batch_size_bound_high"] == pytest.approx(expected.high)
    assert (expected.low < expected.high) == (dim is not None)  # exact gradients leave nothing uncertain
    assert numbers["gradient_diversity"] == pytest.approx(expected.value / N)
    assert numbers["noise_scale"] == pytest.approx(expected.value - 1)
    said = "train as well as single examples; you use 8"
    assert sentence(expected, BATCH).endswith(said)
    assert advice(handle) == sentence(expected, BATCH) + (" (an upper end: the weights moved while this was measured)")


def test_metrics_do_not_read_the_table(monkeypatch):
    reads = []
    monkeypatch.setattr(
        of_handle, "diversity_of", lambda *args, **options: reads.append(args) or diversity_of(*args, **options)
    )
    run(epochs=3, each_step=lambda handle: handle.metrics())
    assert not reads
    of(run(epochs=1))
    assert len(reads) == 1


@pytest.mark.parametrize("order", ["pair", "random"])
def test_without_a_table_there_are_no_such_numbers(order):
    handle = run(order)
    assert handle.table is None
    assert of(handle) is None
    assert "keeps no sketches" in advice(handle)


def test_before_enough_was_seen_the_advice_says_so():
    handle = run(epochs=0)
    assert of(handle) is None
    assert "too few examples" in advice(handle)


def test_a_loaded_state_has_numbers_of_its_own():
    trained, fresh = run(epochs=3), run(epochs=1)
    before = of(fresh).bound.value
    fresh.load_state_dict(trained.state_dict())
    assert of(fresh).bound.value == pytest.approx(of(trained).bound.value)
    assert of(fresh).bound.value != before


def test_numbers_that_are_not_finite_are_left_out():
    assert diversity_of(np.array([[1.0, 2.0], [-1.0, -2.0]])).as_numbers() == {}


def test_with_several_workers_rank_0_knows_of_all_examples():
    def advised(rank):
        dataset, model = problem(64)
        sampler, handle, loader = set_up(dataset, model)
        walk(model, sampler, loader, 3)
        exact = float(batch_size_bound(gradients(dataset, model)))
        found = of(handle)
        return None if found is None else found.bound.value, advice(handle), exact

    leader, other = run_ranks(2, advised)
    assert leader[0] == pytest.approx(leader[2], rel=1e-3)  # the weights stay as they are; the table is half precision
    assert "you use 8 (" in leader[1]
    assert other[0] is None
    assert "ask rank 0" in other[1]
