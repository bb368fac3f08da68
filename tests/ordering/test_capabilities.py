"""What a rule declares is what everyone reads; what does not fit together is said where the sampler is made."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.herding import OrderingRule, make_rule
from tests.distributed.ranks import run_ranks
from tests.herding.every_rule import make_any
from tests.ordering.loops import attached, backward, problem


class Counting(OrderingRule):
    """A rule of one's own, with nothing but what it must have: the largest gradients first."""

    def __init__(self, examples: int) -> None:
        self.norms = np.zeros(examples)
        self.lengths: set[int] = set()
        self.current = np.random.default_rng(0).permutation(examples)

    @property
    def order(self) -> np.ndarray:
        return self.current

    def observe(self, indices: Any, vectors: Any) -> None:
        self.norms[indices] = np.linalg.norm(vectors, axis=1)
        self.lengths.add(vectors.shape[1])

    def next_order(self) -> np.ndarray:
        self.current = np.argsort(-self.norms, kind="stable")
        return self.current

    def state_dict(self) -> dict[str, Any]:
        return {"norms": self.norms.copy(), "order": self.current.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.norms, self.current = state["norms"].copy(), state["order"].copy()


def train(rule: Any, epochs: int = 2, examples: int = 24, **options: Any) -> tuple[heeler.Sampler, heeler.Handle]:
    dataset, model = problem(examples)
    sampler = heeler.Sampler(dataset, batch_size=4, order=rule, **options)
    handle = heeler.attach(model, sampler)
    for _ in range(epochs):
        for batch in DataLoader(dataset, batch_size=4, sampler=sampler):
            backward(model, batch)
    return sampler, handle


def test_a_rule_needs_no_more_than_five_methods() -> None:
    rule = Counting(24)
    sampler, _ = train(rule)
    list(sampler)
    assert rule.lengths == {6}  # the exact gradient of six parameters
    assert np.array_equal(sampler.indices, np.argsort(-rule.norms, kind="stable"))


def on_two_ranks(rank: int) -> tuple[list[int], bool]:
    rule = Counting(24)
    sampler, handle = train(rule, exchange_timeout=10.0)
    list(sampler)
    return sorted(rule.lengths), handle.session.planner.fault is None  # type: ignore[attr-defined]


def test_a_rule_of_ones_own_is_coordinated_over_ranks_with_a_small_model() -> None:
    leader, member = run_ranks(2, on_two_ranks)
    assert leader == ([6], True)
    assert member == ([], True)


def test_a_declared_table_must_be_one() -> None:
    class Odd(type(make_rule("random", 4))):  # type: ignore[misc]
        keeps_table = True

    with pytest.raises((TypeError, ValueError), match="table"):
        heeler.Sampler(4, batch_size=2, order=Odd(4))


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"no ordering rule.*subclass of heeler.herding.OrderingRule"):
        heeler.Sampler(4, batch_size=2, order=object())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="herd"):
        heeler.Sampler(4, batch_size=2, order="herds")


def test_a_rules_dim_is_adopted() -> None:
    rule = make_rule("herd", 64, 32, batch_size=4)
    sampler = heeler.Sampler(64, batch_size=4, order=rule)
    handle = heeler.attach(nn.Linear(100, 10), sampler)
    assert handle.sketcher.dim == 32
    assert handle.table is rule.table


def test_dims_that_do_not_fit_are_refused_at_once() -> None:
    rule = make_rule("herd", 64, 1024, batch_size=4)
    with pytest.raises(ValueError, match="1024"):
        heeler.Sampler(64, batch_size=4, order=rule, dim=256)
    model = nn.Linear(5, 1)
    with pytest.raises(ValueError, match="dim=6"):  # the exact gradient has six numbers
        heeler.attach(model, heeler.Sampler(64, batch_size=4, order=rule))
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_rule_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="63"):
        heeler.Sampler(64, batch_size=4, order=make_rule("herd", 63, 16))


def test_exact_and_dim_together_are_refused() -> None:
    with pytest.raises(ValueError, match="exact=True"):
        heeler.attach(nn.Linear(5, 1), heeler.Sampler(64, batch_size=4, dim=16), exact=True)


@pytest.mark.parametrize("order", ["random", "flipflop"])
def test_a_rule_without_gradients_never_sketches(order: str) -> None:
    sampler, handle = train(order, refresh=1)
    assert not handle.sketcher.sketching
    assert sampler.epoch == 1
    assert sampler.session.progress.trained == 24


@pytest.mark.parametrize("order", ["herd", "pair"])
def test_what_is_said_of_refresh_is_what_happens(order: str) -> None:
    said = heeler.explain(nn.Linear(5, 1), 24, 4, epochs=8, order=order)
    dataset, model = problem(24)
    sampler = heeler.Sampler(dataset, batch_size=4, order=order)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    sketched = []
    for _ in range(8):
        for batch in loader:
            backward(model, batch)
        sketched.append(handle.sketcher.sketching)
    expected = [True] * 8 if said.refresh == 1 else [True, True, False, True, False, False, False, True]
    assert sketched == expected


def test_metrics_know_of_an_epochs_sketches_at_once() -> None:
    _, model, _, handle, loader = attached()
    for batch in loader:
        backward(model, batch)
    assert handle.metrics()["examples_with_sketch"] == 1.0


def test_every_rule_declares_what_it_is() -> None:
    for name in heeler.herding.rule_names():
        rule = make_any(name, 8, 3)
        assert isinstance(rule, OrderingRule)
        assert (rule.table is not None) == rule.keeps_table
        assert rule.needs_vectors or not (rule.keeps_table or rule.coordinates_shards or rule.solves_in_background)


def disagreeing(rank: int, options: list[dict[str, Any]]) -> str:
    try:
        heeler.Sampler(10, batch_size=2, **options[rank])
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("name", ["refresh", "drop_last"])
def test_ranks_that_disagree_find_out(name: str) -> None:
    values: list[Any] = [4, 8] if name == "refresh" else [False, True]
    for message in run_ranks(2, disagreeing, [{name: value} for value in values]):
        assert name in message


def test_a_closed_state_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next order is known already when the dataset grows: both orders must take the new examples in."""
    monkeypatch.setattr("heeler.ordering.planner.EARLY_SIZE", 1)
    monkeypatch.setattr("heeler.ordering.planner.LATE", 0.4)
    dataset, model = problem(24)
    sampler = heeler.Sampler(dataset, batch_size=4, refresh=8)
    handle = heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler)
    for batch in loader:
        backward(model, batch)
    for step, batch in enumerate(loader):
        backward(model, batch)
        if step == 4:
            break
    state = handle.state_dict()
    assert state["session"]["closed"]
    grown = heeler.grow(state, 30)
    larger = TensorDataset(*(torch.cat([tensor, tensor[:6]]) for tensor in dataset.tensors))
    again = heeler.Sampler(larger, batch_size=4)
    model = problem(24)[1]
    heeler.attach(model, again).load_state_dict(grown)
    rest = list(again)
    assert set(rest) == set(range(30)) - set(sampler.indices[:20].tolist())
    for batch in DataLoader(larger, batch_size=4, sampler=again):
        backward(model, batch)
    assert sorted(again) == list(range(30))


@pytest.mark.parametrize(
    ("examples", "layers", "dim"),
    [(4096, "all", 4096), (4097, "all", 1024), (4096, None, 1024), (1 << 19, "all", 1024), ((1 << 19) + 1, "all", 256)],
)
def test_few_examples_have_longer_sketches_where_all_layers_are_tapped(
    examples: int, layers: str | None, dim: int
) -> None:
    model = nn.Sequential(nn.Linear(400, 100), nn.ReLU(), nn.Linear(100, 600))
    sampler = heeler.Sampler(range(examples), batch_size=64, budget=None)
    assert heeler.attach(model, sampler, layers=layers).sketcher.dim == sampler.session.dim == dim
    assert heeler.explain(model, examples, 64, layers=layers, budget=None).coverage.dim == dim


def test_longer_sketches_leave_no_layer_out() -> None:
    """Where layers are chosen by their price, they are chosen for sketches of the usual length."""
    images = (nn.Conv2d(3, 6, 5), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(*images, nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    few, many = (heeler.attach(model, heeler.Sampler(range(n), batch_size=64)) for n in (1000, 100_000))
    assert few.sketcher.sketched == many.sketcher.sketched
    assert few.sketcher.dim == many.sketcher.dim == 1024


def test_no_solve_starts_early_on_a_table_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    from heeler.ordering import planner

    monkeypatch.setattr(planner, "EARLY_SIZE", 1)
    monkeypatch.setattr(planner, "LATE", 0.2)
    rule = make_rule("herd", 24, 6, batch_size=4)
    planning = planner.LocalPlanner(rule, planner.Partition(batch_size=4))
    epoch = planner.Epoch(1, np.arange(24), planning.first())
    vectors = np.ones((24, 6), np.float32)
    planning.observe(np.arange(23), vectors[:23])
    assert not planning.wants_start(epoch, 20)
    planning.observe(np.array([23]), vectors[23:])
    assert not planning.wants_start(epoch, 19)
    assert planning.wants_start(epoch, 20)
    assert not planning.wants_start(epoch, 24)
    assert not planning.wants_start(epoch, 8)


def test_the_table_has_what_waits_for_a_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    from heeler.ordering import planner

    monkeypatch.setattr(planner, "EARLY_SIZE", 1)
    monkeypatch.setattr(planner, "LATE", 0.2)
    dataset, model = problem(40)
    sampler = heeler.Sampler(dataset, batch_size=4, refresh=1)
    handle = heeler.attach(model, sampler, exact=True)
    for _ in range(2):
        for x, y in DataLoader(dataset, batch_size=4, sampler=sampler):
            nn.functional.mse_loss(model(x), y).backward()
            model.zero_grad()
        with torch.no_grad():  # so that the second epoch's rows are others
            model[0].weight.mul_(2.0)
    last = sampler.indices[-4:]
    stale = sampler.session.rule.table.sketches(last).copy()
    handle.session.drain(wait=True)
    assert handle.session.planner._late
    newest = handle.table.sketches(last)
    assert not np.allclose(stale, newest, rtol=0.1)
    assert not handle.session.planner._late


def test_a_dataset_says_what_it_needs() -> None:
    heard: list[Any] = []

    class Backwards(TensorDataset):
        def order_spec(self, order: Any) -> Any:
            heard.append(order)
            return heeler.order_by(list(range(12, 0, -1)))

        def announce(self, indices: np.ndarray, batch_size: int, loader: Any) -> None:
            heard.append((indices.tolist(), batch_size, loader))

    dataset = Backwards(torch.arange(12))
    sampler = heeler.Sampler(dataset, batch_size=4, order="pair")
    drawn = [number for (batch,) in DataLoader(dataset, batch_size=4, sampler=sampler) for number in batch.tolist()]
    assert drawn == list(range(11, -1, -1))
    assert heard == ["pair", (drawn, 4, (4, 0))]
