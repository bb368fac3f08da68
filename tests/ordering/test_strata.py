"""`Sampler(strata=...)`: who takes them, that they are no state, and that batches hold their shares to the end."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import heeler
from heeler.herding import make_rule
from tests.ordering.loops import backward, problem

LABELS = np.random.default_rng(0).integers(0, 3, 67)


def run(examples: int = 67, **options: Any) -> tuple[heeler.Sampler, heeler.Handle, Any]:
    dataset, model = problem(examples)
    sampler = heeler.Sampler(dataset, batch_size=8, **{"strata": LABELS[:examples], **options})
    handle = heeler.attach(model, sampler)
    return sampler, handle, (model, DataLoader(dataset, batch_size=8, sampler=sampler))


def check_shares(order: np.ndarray, labels: np.ndarray, batch_size: int) -> None:
    for start in range(0, order.size, batch_size):
        batch = order[start : start + batch_size]
        share = np.bincount(labels) * batch.size / labels.size
        assert (np.abs(np.bincount(labels[batch], minlength=share.size) - share) < 1).all()


def check_first(order: np.ndarray, seed: int = 0) -> None:
    """As random order: class noise helps a network away from a symmetric start."""
    np.testing.assert_array_equal(order, heeler.Sampler(order.size, batch_size=8, order="random", seed=seed).indices)


def test_every_batch_holds_its_share_after_the_first_epoch() -> None:
    sampler, handle, (model, loader) = run(order="stratified", seed=1)
    orders = []
    for _ in range(4):
        for batch in loader:
            backward(model, batch)
        orders.append(sampler.indices)
    check_first(orders[0], seed=1)
    for order in orders[1:]:
        check_shares(order, LABELS, 8)
    assert len({tuple(order.tolist()) for order in orders}) == 4
    assert handle.metrics()["strata"] == 3.0
    np.testing.assert_array_equal(sampler.strata, LABELS)


def test_names_may_be_text_and_herd_holds_them() -> None:
    sampler, handle, _ = run(strata=[f"source {label}" for label in LABELS])
    np.testing.assert_array_equal(sampler.session.rule.strata, LABELS)
    assert handle.metrics()["strata"] == 3.0
    plain = heeler.Sampler(67, batch_size=8)
    assert plain.strata is None
    assert "strata" not in plain.session.metrics()


@pytest.mark.parametrize("sizes", [None, [40, 27]])
@pytest.mark.parametrize("order", ["stratified", "herd"])
def test_the_first_epoch_is_random(order: str, sizes: list[int] | None) -> None:
    for seed in range(3):
        common: dict[str, Any] = {"batch_size": 8, "shard_sizes": sizes, "seed": seed}
        found = make_rule(order, 67, 4, strata=LABELS, **common).order
        np.testing.assert_array_equal(found, make_rule("random", 67, **common).order)


def test_epochs_of_herd_without_sketches_are_those_of_stratified() -> None:
    sampler, _, (_, loader) = run(strata=LABELS, seed=1)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(loader)  # no backward, no sketch
        orders.append(sampler.indices)
    check_first(orders[0], seed=1)
    for order in orders[1:]:
        check_shares(order, LABELS, 8)
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_orders_that_make_no_use_of_strata_refuse_them() -> None:
    for order in ("random", "pair", "id-grab"):
        with pytest.raises(ValueError, match=rf"'{order}' makes no use of strata.*'herd' and 'stratified'"):
            heeler.Sampler(67, batch_size=8, order=order, strata=LABELS)
    with pytest.raises(ValueError, match=r"needs|was given no strata: pass strata=labels.*dataset.targets"):
        heeler.Sampler(67, batch_size=8, order="stratified")
    with pytest.raises(ValueError, match="66 entries for 67 examples"):
        heeler.Sampler(67, batch_size=8, strata=LABELS[:66])


def test_a_rule_that_is_made_already_gets_its_strata_itself() -> None:
    rule = make_rule("stratified", 67, batch_size=8, strata=LABELS, seed=1)
    with pytest.raises(ValueError, match=r"make_rule\(..., strata=strata\)"):
        heeler.Sampler(67, batch_size=8, order=rule, strata=LABELS)
    sampler = heeler.Sampler(67, batch_size=8, order=rule)
    check_first(sampler.indices, seed=1)
    check_shares(sampler.session.planner.next(sampler.session.epoch).part, LABELS, 8)


@pytest.mark.parametrize("workers", [2, 3])
def test_each_workers_batches_hold_their_share_too(workers: int) -> None:
    labels = np.random.default_rng(1).integers(0, 4, 48 * workers)
    common = {"num_replicas": workers, "order": "stratified", "strata": labels}
    samplers = [heeler.Sampler(labels.size, batch_size=8, rank=rank, **common) for rank in range(workers)]
    first = [sampler.indices for sampler in samplers]
    second = [sampler.session.planner.next(sampler.session.epoch).part for sampler in samplers]
    for hands in (first, second):
        together = np.concatenate([hand[start : start + 8] for start in range(0, 48, 8) for hand in hands])
        np.testing.assert_array_equal(np.sort(together), np.arange(labels.size))
    check_shares(together, labels, 8 * workers)
    share = np.bincount(labels, minlength=4) * 8 / labels.size
    for hand in second:
        for start in range(0, 48, 8):
            assert (np.abs(np.bincount(labels[hand[start : start + 8]], minlength=4) - share) < 1).all()


@pytest.mark.parametrize("order", ["stratified", "herd"])
def test_strata_are_no_part_of_the_state(order: str) -> None:
    """Exact with the same strata; with other ones the epoch under way stands, and the next follows the new."""
    sampler, handle, (model, loader) = run(order=order)
    for step, batch in enumerate(loader):
        backward(model, batch)
        if step == 3:
            break
    state = handle.state_dict()
    assert "strata" not in str(state["session"].keys()) + str(state["session"]["rule"].keys())
    rest = sampler.indices[32:].tolist()
    following = []
    for _ in range(2):
        other, resumed, (model, loader) = run(order=order)
        resumed.load_state_dict(state)
        assert list(other) == rest
        following.append(other.session.planner.next(other.session.epoch).part.tolist())
    assert following[0] == following[1]
    other, resumed, _ = run(order=order, strata=(LABELS + 1) % 2)
    resumed.load_state_dict(state)
    assert list(other) == rest
    following = other.session.planner.next(other.session.epoch).part
    if order == "stratified":
        check_shares(following, (LABELS + 1) % 2, 8)


def test_a_dataset_may_grow_and_its_strata_with_it() -> None:
    more = np.concatenate([LABELS, np.full(13, 5)])  # a new stratum
    sampler, handle, (model, loader) = run(order="stratified")
    for step, batch in enumerate(loader):
        backward(model, batch)
        if step == 3:
            break
    state = heeler.grow(handle.state_dict(), 80)
    dataset, model = problem(80)
    grown = heeler.Sampler(dataset, batch_size=8, order="stratified", strata=more)
    heeler.attach(model, grown).load_state_dict(state)
    assert sorted([*sampler.indices[:32].tolist(), *grown]) == list(range(80))
    check_shares(grown.session.planner.next(grown.session.epoch).part, np.unique(more, return_inverse=True)[1], 8)


def test_strata_may_be_a_tensor() -> None:
    sampler = heeler.Sampler(67, batch_size=8, order="stratified", strata=torch.from_numpy(LABELS))
    plain = heeler.Sampler(67, batch_size=8, order="stratified", strata=LABELS)
    np.testing.assert_array_equal(sampler.indices, plain.indices)
    check_first(sampler.indices)
    check_shares(sampler.session.planner.next(sampler.session.epoch).part, LABELS, 8)
