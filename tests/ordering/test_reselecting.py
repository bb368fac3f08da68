"""`Sampler(subset=Selector(...), reselect_every=R)`: an epoch over everything, a selection, R − 1 epochs over it."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.herding import make_rule
from heeler.ordering.state import StateError
from tests.ordering.loops import problem, true_gradients

N, BATCH, K, EVERY = 67, 4, 20, 3
LABELS = np.random.default_rng(0).integers(0, 3, N)


def set_up(
    selector: Any = None, workers: int = 0, persistent: bool = False, drop_last: bool = False, **options: Any
) -> tuple[Any, ...]:
    dataset, model = problem(N)
    selector = selector or heeler.Selector(K, labels=LABELS)
    sampler = heeler.Sampler(N, batch_size=BATCH, subset=selector, **{"reselect_every": EVERY, **options})
    handle = heeler.attach(model, sampler)
    whole = TensorDataset(*dataset.tensors, torch.arange(N), sampler.weights)
    loader = DataLoader(
        whole, BATCH, sampler=sampler, num_workers=workers, persistent_workers=persistent, drop_last=drop_last
    )
    return dataset, model, sampler, handle, loader


def epoch_of(model: nn.Module, loader: Any, optimizer: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Train for an epoch: which examples, and with which weights."""
    found = []
    for inputs, targets, numbers, weights in loader:
        found.append((numbers, weights))
        ((model(inputs) - targets).square()[:, 0] * weights).mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    numbers, weights = (torch.cat(each).numpy() for each in zip(*found, strict=True))
    return numbers, weights


def test_cycles_of_everything_and_of_what_was_chosen() -> None:
    _, model, sampler, handle, loader = set_up()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    chosen = []
    for epoch in range(3 * EVERY):
        expected = N if epoch % EVERY == 0 else K
        assert len(sampler) == sampler.num_samples == expected
        assert len(loader) == -(-expected // BATCH)
        numbers, weights = epoch_of(model, loader, optimizer)
        if epoch % EVERY == 0:
            assert sorted(numbers) == list(range(N))
            assert (weights == 1).all()
            assert sampler.subset is None
            continue
        selection = sampler.selection
        assert sorted(numbers) == sorted(selection.indices) == sampler.subset.tolist()
        given = dict(zip(selection.indices.tolist(), selection.weights / selection.weights.mean(), strict=True))
        np.testing.assert_allclose(weights, [given[number] for number in numbers], rtol=1e-6)
        chosen.append(selection.indices.tolist())
    assert chosen[0] == chosen[1] != chosen[2] == chosen[3]
    assert handle.ignored_passes == 0


def test_what_is_chosen_is_what_select_chooses_from_the_gradients_of_that_epoch() -> None:
    """The weights stand still, so the table holds the gradients of the model as it is."""
    dataset, model, sampler, handle, loader = set_up(heeler.Selector(0.3, "norm", seed=5))
    for turn in range(2):
        epoch_of(model, loader)
        epoch_of(model, loader)
        expected = heeler.select(true_gradients(dataset, model), 0.3, "norm", seed=5 + turn)
        assert sorted(sampler.selection.indices) == sorted(expected.indices)
        assert len(handle.table) == round(0.3 * N)  # of the subset, and of weighted losses:
        rows = handle.table.sketches(np.arange(len(sampler.subset)))
        np.testing.assert_allclose(rows, true_gradients(dataset, model)[sampler.subset], rtol=2e-3, atol=2e-3)
        again = heeler.select(handle, 5)
        assert set(again.indices) <= set(sampler.subset)
        epoch_of(model, loader)


def test_orders_within_the_subset_are_those_of_a_rule_of_its_own() -> None:
    _, model, sampler, handle, loader = set_up(heeler.Selector(K, "norm"), reselect_every=4)
    epoch_of(model, loader)
    orders = [epoch_of(model, loader)[0] for _ in range(3)]
    rows, numbers = handle.table.sketches(np.arange(K)), sampler.subset
    twin = make_rule("herd", K, handle.table.rows.shape[1], seed=sampler.session.setup.seed, batch_size=BATCH)
    for order in orders:
        np.testing.assert_array_equal(numbers[twin.order], order)
        twin.observe(twin.order, rows[twin.order])
        twin.next_order()


def train(steps: int, stop: int = 0, saved: Any = None, every: int = EVERY) -> tuple[list[list[int]], Any, Any]:
    """Indices and weights step by step, the model, and its checkpoint after `stop` steps."""
    _, model, _, handle, loader = set_up(reselect_every=every)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done, walked = 0, []
    if saved is not None:
        done = saved["done"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["heeler"])
    while done < steps:
        for inputs, targets, numbers, weights in loader:
            walked.append([*numbers.tolist(), *weights.tolist()])
            optimizer.zero_grad()
            ((model(inputs) - targets).square()[:, 0] * weights).mean().backward()
            optimizer.step()
            done += 1
            if done == stop:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                return walked, model, {**state, "heeler": handle.state_dict(), "done": done}
            if done == steps:
                break
    return walked, model, None


# 17 steps over everything, then 5 and 5 over what was chosen: in each kind of epoch, at their ends, in the second cycle
@pytest.mark.parametrize("stop", [3, 17, 19, 22, 24, 27, 30, 46])
def test_resume_is_exact(stop: int) -> None:
    whole, model, _ = train(60)
    first, _, saved = train(60, stop)
    rest, twin, _ = train(60, saved=saved)
    assert first + rest == whole
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_goes_through_a_file(tmp_path: Any) -> None:
    saved = train(60, 24)[2]
    torch.save(saved, tmp_path / "run.pt")
    again = torch.load(tmp_path / "run.pt", weights_only=True)
    assert train(60, saved=again)[0] == train(60, saved=saved)[0]


def test_heeler_save_and_load(tmp_path: Any) -> None:
    _, model, sampler, handle, loader = set_up()
    for _ in range(2):
        epoch_of(model, loader)
    heeler.save(handle, tmp_path / "run.heeler")
    _, other, _, again, others = set_up()
    heeler.load(again, tmp_path / "run.heeler")
    for one, two in zip(epoch_of(model, loader), epoch_of(other, others), strict=True):
        np.testing.assert_array_equal(one, two)
    assert set(heeler.select(tmp_path / "run.heeler", 5).indices) <= set(sampler.subset)  # its table is the subset's


@pytest.mark.parametrize("stop", [3, 24])
def test_states_that_do_not_fit_are_refused_and_change_nothing(stop: int) -> None:
    saved = train(60, stop)[2]["heeler"]
    dataset, model = problem(N)
    plain = heeler.attach(model, heeler.Sampler(dataset, batch_size=BATCH))
    with pytest.raises(StateError, match="chooses anew every 3 epochs"):
        plain.load_state_dict(saved)
    with pytest.raises(ValueError, match="cannot grow"):
        heeler.grow(saved, 2 * N)
    _, model, sampler, handle, loader = set_up(reselect_every=4)
    with pytest.raises(StateError, match="reselect_every=3, this sampler has 4"):
        handle.load_state_dict(saved)
    with pytest.raises(StateError, match="makes no selections"):
        handle.load_state_dict(plain.state_dict())
    _, model, sampler, handle, loader = set_up()
    for _ in range(2):
        epoch_of(model, loader)
    before, weights = handle.state_dict(), sampler.weights.clone()
    broken = {**saved, "session": {**saved["session"], "dim": 99}}
    with pytest.raises(StateError):
        handle.load_state_dict(broken)
    after = handle.state_dict()
    assert after["session"]["reselect"]["part_epochs"] == before["session"]["reselect"]["part_epochs"]
    assert torch.equal(after["session"]["order"], before["session"]["order"])
    assert torch.equal(sampler.weights, weights)
    assert sorted(epoch_of(model, loader)[0]) == sampler.subset.tolist()


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_see_the_weights_of_their_epoch(persistent: bool) -> None:
    _, model, sampler, _, loader = set_up(workers=1, persistent=persistent)
    for epoch in range(EVERY + 2):
        numbers, weights = epoch_of(model, loader)
        assert (weights == 1).all() if epoch % EVERY == 0 else (weights == sampler.weights.numpy()[numbers]).all()
        assert weights.mean() == pytest.approx(1, rel=1e-6)


def test_examples_that_the_loader_drops_are_not_chosen_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    _, model, sampler, _, loader = set_up(drop_last=True)
    seen, _ = epoch_of(model, loader)
    assert len(seen) == 64
    epoch_of(model, loader)
    assert "3 of 67 examples have no sketch yet" in caplog.text
    assert set(sampler.subset) <= set(seen)
    assert len(sampler.subset) == K


def test_an_epoch_that_was_cut_short_is_followed_by_another_over_everything(caplog: pytest.LogCaptureFixture) -> None:
    _, model, _, _, loader = set_up()
    for step, (inputs, targets, *_) in enumerate(loader):
        nn.functional.mse_loss(model(inputs), targets).backward()
        if step == 5:
            break
    assert len(epoch_of(model, loader)[0]) == N
    assert "too few examples have a sketch to choose from" in caplog.text
    assert len(epoch_of(model, loader)[0]) == K


def test_strata_are_those_of_the_chosen() -> None:
    _, model, sampler, _, loader = set_up(strata=LABELS)
    epoch_of(model, loader)
    epoch_of(model, loader)
    np.testing.assert_array_equal(sampler.strata, LABELS[sampler.subset])


def test_the_small_state_alone_does_not_know_what_is_chosen() -> None:
    _, model, sampler, _, loader = set_up()
    epoch_of(model, loader)
    small = sampler.state_dict()
    other = set_up()[2]
    with pytest.raises(StateError, match=r"handle\.state_dict\(\)"):
        other.load_state_dict(small)
    other.load_state_dict(set_up()[2].state_dict())  # of the beginning: nothing to know


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": heeler.Selector(K)}, "say reselect_every=5"),
        ({"reselect_every": 3}, "needs to know how to choose"),
        ({"subset": [1, 2, 3], "reselect_every": 3}, "needs to know how to choose"),
        ({"subset": heeler.Selector(K), "reselect_every": 1}, "at least 2"),
        ({"subset": heeler.Selector(K), "reselect_every": 2.0}, "whole number"),
        ({"subset": heeler.Selector(K), "reselect_every": 3, "order": "random"}, "keeps no sketches"),
        ({"subset": heeler.Selector(N + 1), "reselect_every": 3}, "cannot be selected"),
        ({"subset": heeler.Selector(2, labels=LABELS), "reselect_every": 3}, "classes empty"),
        ({"subset": heeler.Selector(K, labels=LABELS[1:]), "reselect_every": 3}, "one label per example"),
        ({"subset": heeler.Selector(3), "reselect_every": 3, "strata": LABELS}, "too many for a subset of 3"),
        ({"subset": heeler.Selector(K), "reselect_every": 3, "num_replicas": 2, "rank": 0}, "process group"),
        ({"subset": heeler.Selector(K), "reselect_every": 3, "order": make_rule("herd", N, 6)}, "name it"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heeler.Sampler(N, batch_size=BATCH, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((K, "craig"), "there is no method"), ((0.1, "glister"), "validation"), ((0,), "k=0"), ((1.5,), "fraction")],
)
def test_bad_selectors(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heeler.Selector(*arguments)
