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


def check_first(order: np.ndarray, labels: np.ndarray, batch_size: int) -> bool:
    """The first half of the batches is left to chance, and each of the others holds its share of what is left.

    Returns whether the first half, too, happens to hold its shares.
    """
    np.testing.assert_array_equal(np.sort(order), np.arange(labels.size))
    half = labels.size // batch_size // 2 * batch_size
    rest = labels[order[half:]]
    check_shares(np.arange(rest.size), rest, batch_size)
    parts = labels[order[:half]].reshape(-1, batch_size)
    share = np.bincount(labels) * batch_size / labels.size
    return all((np.abs(np.bincount(part, minlength=share.size) - share) < 1).all() for part in parts)


def test_every_batch_holds_its_share_after_half_of_the_first_epoch() -> None:
    sampler, handle, (model, loader) = run(order="stratified", seed=1)
    orders = []
    for _ in range(4):
        for batch in loader:
            backward(model, batch)
        orders.append(sampler.indices)
    assert not check_first(orders[0], LABELS, 8)
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


@pytest.mark.parametrize("order", ["stratified", "herd"])
def test_the_first_half_of_the_first_epoch_is_random(order: str) -> None:
    """Every example is as likely there as any other, whatever its stratum; it holds its shares by chance alone."""
    seeds, half = 300, 67 // 8 // 2 * 8
    orders = [make_rule(order, 67, 4, batch_size=8, strata=LABELS, seed=seed).order for seed in range(seeds)]
    assert sum(check_first(each, LABELS, 8) for each in orders) < 0.1 * seeds
    early = np.bincount(np.concatenate([each[:half] for each in orders]), minlength=67) / seeds
    assert np.abs(early - half / 67).max() < 4.5 * np.sqrt(half / 67 * (1 - half / 67) / seeds)
    held = [np.bincount(LABELS[each[:half]], minlength=3) for each in orders]
    expected = half * np.bincount(LABELS) / 67
    spread = expected * (1 - np.bincount(LABELS) / 67) * (67 - half) / 66  # as drawn without replacement
    np.testing.assert_allclose(np.var(held, axis=0), spread, rtol=0.35)


def test_epochs_of_herd_without_sketches_are_those_of_stratified() -> None:
    sampler, _, (_, loader) = run(strata=LABELS, seed=1)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        list(loader)  # no backward, no sketch
        orders.append(sampler.indices)
    assert not check_first(orders[0], LABELS, 8)
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
    assert not check_first(sampler.indices, LABELS, 8)
    check_shares(sampler.session.planner.next(sampler.session.epoch).part, LABELS, 8)


@pytest.mark.parametrize("workers", [2, 3])
def test_each_workers_batches_hold_their_share_too(workers: int) -> None:
    labels = np.random.default_rng(1).integers(0, 4, 48 * workers)
    common = {"num_replicas": workers, "order": "stratified", "strata": labels}
    samplers = [heeler.Sampler(labels.size, batch_size=8, rank=rank, **common) for rank in range(workers)]
    first = [sampler.indices for sampler in samplers]
    second = [sampler.session.planner.next(sampler.session.epoch).part for sampler in samplers]
    for hands, begin in ((first, 24), (second, 0)):
        together = np.concatenate([hand[start : start + 8] for start in range(0, 48, 8) for hand in hands])
        np.testing.assert_array_equal(np.sort(together), np.arange(labels.size))
        rest = labels[together[begin * workers :]]
        check_shares(np.arange(rest.size), rest, 8 * workers)
        share = np.bincount(rest, minlength=4) * 8 / rest.size
        for hand in hands:
            for start in range(begin, 48, 8):
                assert (np.abs(np.bincount(labels[hand[start : start + 8]], minlength=4) - share) < 1).all()
        if begin:
            assert not check_first(together, labels, 8 * workers)


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
    check_first(sampler.indices, LABELS, 8)
    check_shares(sampler.session.planner.next(sampler.session.epoch).part, LABELS, 8)
