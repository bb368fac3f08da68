"""One budget for all that Heeler does: planned by a model of the machine, measured by the clock."""

from __future__ import annotations

import math
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.ordering.pace import LEAST_EPOCHS, LEAST_SECONDS, Costs, Pace, affordable_dim, wanted
from heeler.ordering.spent import Spent
from tests.ordering.loops import backward, problem

costs = st.builds(Costs, st.floats(1e-3, 1e3), st.floats(0, 1e3), st.floats(0, 1.0))
shares = st.floats(1e-4, 1.0)
refreshes = st.integers(1, 12)


@given(refreshes, shares, costs)
def test_no_more_is_planned_than_the_budget_allows(refresh, share, cost):
    pace, spent = Pace(refresh, share, cost), cost.start
    for age in range(1, 60):
        if pace.is_due(age - 1):
            spent += cost.sketches
            assert spent <= max(LEAST_SECONDS, share * cost.epoch * max(age, LEAST_EPOCHS)) * (1 + 1e-12)


@given(refreshes, shares, costs)
def test_what_a_larger_budget_takes_is_no_less(refresh, share, cost):
    less, more = Pace(refresh, share, cost), Pace(refresh, 2 * share, cost)
    assert all(less.taken(epochs) <= more.taken(epochs) for epochs in range(1, 60))


@given(refreshes, costs)
def test_without_a_limit_sketches_are_taken_as_asked(refresh, cost):
    due = [wanted(age, refresh) for age in range(1, 60)]
    assert [Pace(refresh, None, cost).is_due(age - 1) for age in range(1, 60)] == due
    assert [Pace(refresh, 0.5).is_due(age - 1) for age in range(1, 60)] == due  # before a model is attached
    assert [Pace(refresh, 0.02, Costs(1.0, 0.0)).is_due(age - 1) for age in range(1, 60)] == due


@given(refreshes, shares, costs, st.permutations(range(1, 40)))
def test_the_plan_does_not_depend_on_who_asks_first(refresh, share, cost, ages):
    pace, other = Pace(refresh, share, cost), Pace(refresh, share, cost)
    assert {age: pace.is_due(age) for age in ages} == {age: other.is_due(age) for age in sorted(ages)}


def test_expensive_sketches_are_taken_later_and_seldom():
    every = Pace(8, 0.02, Costs(epoch=10.0, sketches=1.0))
    taken = [age for age in range(1, 201) if every.is_due(age - 1)]
    assert taken[0] == 1  # 2% of ten epochs are two seconds: enough for two
    assert taken[1] == 2
    assert taken[2:5] == [15, 20, 25]
    assert every.share(200) <= 0.02
    never = Pace(8, 0.02, Costs(epoch=10.0, sketches=100.0))
    assert never.taken(499) == 0
    assert never.is_due(499)


@given(refreshes, shares, costs, st.lists(st.sampled_from(["go on", "repeat", "begin again"]), max_size=60))
def test_what_was_spent_counts_when_sketches_begin_again(refresh, share, cost, happenings):
    pace, spent = Pace(refresh, share, cost), cost.start
    for epoch, what in enumerate(happenings):
        due = pace.is_due(epoch)
        if due:
            spent += cost.sketches
            assert spent <= pace.allowance(epoch + 1) * (1 + 1e-9)
        if what == "repeat" and due:
            pace.repeat()
        elif what == "begin again":
            pace.begin_again(epoch + 1)
        other = Pace(refresh, share, cost)
        other.restore(pace.began, pace.taken_before)
        assert other.is_due(epoch + 1) == pace.is_due(epoch + 1)


def test_a_run_of_a_few_seconds_may_take_more_than_its_share():
    pace = Pace(8, 0.02, Costs(epoch=0.01, sketches=0.06))
    assert [age for age in range(1, 41) if pace.is_due(age - 1)] == [1, 2, 4, 8, 16]


def test_sketches_have_fewer_dimensions_where_all_are_too_expensive():
    def per_dim(dim: int) -> Costs:
        return Costs(epoch=1.0, sketches=1e-3 * dim)

    def fixed(dim: int) -> Costs:
        return Costs(epoch=1.0, sketches=10.0 + 1e-4 * dim)

    assert affordable_dim(1024, 8, None, per_dim) == 1024
    assert affordable_dim(1024, 8, 1.0, per_dim) == 1024
    assert affordable_dim(1024, 8, 0.05, per_dim) == 64
    assert affordable_dim(650, 8, 0.1, per_dim) == 256
    assert affordable_dim(1024, 8, 0.02, fixed) == 1024  # fewer would make it hardly cheaper
    assert affordable_dim(50, 8, 0.02, per_dim) == 50


@pytest.mark.parametrize("budget", [0, -0.1, math.inf, math.nan, "2%", True])
def test_a_budget_is_a_share(budget):
    with pytest.raises(ValueError, match="budget must be a share"):
        heeler.Sampler(10, batch_size=2, budget=budget)


def test_the_clock_has_no_say(monkeypatch):
    """A machine that is ten times slower, or stands still, gives the same orders."""

    def orders(budget: float | None) -> tuple[list[list[int]], list[bool]]:
        torch.manual_seed(0)
        dataset, model = problem(64)
        sampler = heeler.Sampler(dataset, batch_size=8, budget=budget)
        handle = heeler.attach(model, sampler)
        found, sketched = [], []
        for _ in range(5):
            for batch in DataLoader(dataset, batch_size=8, sampler=sampler):
                backward(model, batch)
            found.append(sampler.indices.tolist())
            sketched.append(handle.sketcher.sketching)
        return found, sketched

    fast = orders(0.02)
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: 1e3 * clock())
    assert orders(0.02) == fast
    assert fast[1] == [True, True, False, True, False]


def test_a_budget_that_pays_for_nothing_leaves_a_run_to_chance(monkeypatch):
    monkeypatch.setattr("heeler.ordering.pace.LEAST_SECONDS", 0.0)
    dataset, model = problem(64)
    sampler = heeler.Sampler(dataset, batch_size=8, budget=1e-6)
    handle = heeler.attach(model, sampler)
    orders = set()
    for _ in range(4):
        for batch in DataLoader(dataset, batch_size=8, sampler=sampler):
            backward(model, batch)
        assert not handle.sketcher.sketching
        orders.add(tuple(sampler.indices.tolist()))
    assert len(orders) == 4
    assert handle.metrics()["examples_with_sketch"] == 0
    assert handle.sketcher.dim == sampler.session.dim


def test_what_was_spent_is_measured():
    """Steps that take longer with sketches, and one that a validation interrupts."""
    spent, now = Spent(), [0.0]
    original, time.perf_counter = time.perf_counter, lambda: now[0]
    try:
        for sketched, seconds in ((True, 3.0), (False, 2.0), (False, 2.0)):
            for step in range(11):
                spent.step()
                now[0] += 1000.0 if step == 5 else seconds
            spent.end_epoch(sketched=sketched)
    finally:
        time.perf_counter = original
    # Ten intervals of each epoch; of the long one ten times the median counts.
    assert spent.metrics()["heeler_seconds"] == pytest.approx((9 * 3 + 30) - (9 * 2 + 20))
    spent.start, spent.waits = 5.0, 1.0
    assert spent.metrics()["heeler_seconds"] == pytest.approx(25.0)
    assert spent.metrics()["heeler_share"] == pytest.approx(25.0 / (30 * 3.8))


def test_metrics_have_both():
    x, y = torch.randn(128, 4), torch.randint(0, 3, (128,))
    model = nn.Linear(4, 3)
    sampler = heeler.Sampler(128, batch_size=8)
    handle = heeler.attach(model, sampler)
    for _ in range(4):
        for a, b in DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler):
            nn.functional.cross_entropy(model(a), b).backward()
    metrics = handle.metrics()
    assert metrics["budget"] == 0.02
    assert metrics["heeler_seconds"] > 0
    assert metrics["heeler_share"] > 0
    assert metrics["planned_share"] == pytest.approx(sampler.session.pace.share(4))
    assert "budget" not in heeler.attach(nn.Linear(4, 3), heeler.Sampler(128, batch_size=8, budget=None)).metrics()
