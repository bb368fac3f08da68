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


def test_every_batch_of_every_epoch_holds_its_share() -> None:
    sampler, handle, (model, loader) = run(order="stratified")
    orders = []
    for _ in range(3):
        for batch in loader:
            backward(model, batch)
        orders.append(sampler.indices)
        check_shares(orders[-1], LABELS, 8)
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert handle.metrics()["strata"] == 3.0
    np.testing.assert_array_equal(sampler.strata, LABELS)


def test_names_may_be_text_and_herd_holds_them() -> None:
    sampler, handle, _ = run(strata=[f"source {label}" for label in LABELS])
    np.testing.assert_array_equal(sampler.session.rule.strata, LABELS)
    assert handle.metrics()["strata"] == 3.0
    plain = heeler.Sampler(67, batch_size=8)
    assert plain.strata is None
    assert "strata" not in plain.session.metrics()


def test_the_first_epoch_of_herd_is_stratified_and_so_is_one_without_sketches() -> None:
    sampler, _, (_, loader) = run(strata=LABELS)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(loader)  # no backward, no sketch
        orders.append(sampler.indices)
    for order in orders:
        check_shares(order, LABELS, 8)
    assert len({tuple(order.tolist()) for order in orders}) > 1


def test_orders_that_make_no_use_of_strata_refuse_them() -> None:
    for order in ("random", "pair", "id-grab"):
        with pytest.raises(ValueError, match=rf"'{order}' makes no use of strata.*'herd' and 'stratified'"):
            heeler.Sampler(67, batch_size=8, order=order, strata=LABELS)
    with pytest.raises(ValueError, match=r"needs|was given no strata: pass strata=labels.*dataset.targets"):
        heeler.Sampler(67, batch_size=8, order="stratified")
    with pytest.raises(ValueError, match="66 entries for 67 examples"):
        heeler.Sampler(67, batch_size=8, strata=LABELS[:66])


def test_a_rule_that_is_made_already_gets_its_strata_itself() -> None:
    rule = make_rule("stratified", 67, batch_size=8, strata=LABELS)
    with pytest.raises(ValueError, match=r"make_rule\(..., strata=strata\)"):
        heeler.Sampler(67, batch_size=8, order=rule, strata=LABELS)
    check_shares(heeler.Sampler(67, batch_size=8, order=rule).indices, LABELS, 8)


@pytest.mark.parametrize("workers", [2, 3])
def test_each_workers_batches_hold_their_share_too(workers: int) -> None:
    labels = np.random.default_rng(1).integers(0, 4, 48 * workers)
    hands = []
    for rank in range(workers):
        options = {"num_replicas": workers, "rank": rank, "order": "stratified", "strata": labels}
        hands.append(heeler.Sampler(labels.size, batch_size=8, **options).indices)
        share = np.bincount(labels) * 8 / labels.size
        for start in range(0, 48, 8):
            assert (np.abs(np.bincount(labels[hands[-1][start : start + 8]], minlength=4) - share) < 1).all()
    together = np.concatenate([hand[start : start + 8] for start in range(0, 48, 8) for hand in hands])
    np.testing.assert_array_equal(np.sort(together), np.arange(labels.size))
    check_shares(together, labels, 8 * workers)


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
    check_shares(sampler.indices, LABELS, 8)
