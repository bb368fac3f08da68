"""Whatever a loop does to the sampler, an epoch is a permutation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

import heeler
from heeler.herding import make_rule, rule_names
from heeler.ordering.partition import deal
from tests.ordering.loops import attached, backward, problem


def train_one_epoch(model: torch.nn.Module, loader: DataLoader, sampler: heeler.Sampler) -> list[int]:
    seen: list[int] = []
    for batch in loader:
        seen += sampler.indices[len(seen) : len(seen) + len(batch[0])].tolist()
        backward(model, batch)
    return seen


@pytest.mark.parametrize("order", rule_names())
def test_every_rule_gives_epochs_in_which_every_example_appears_once(order: str) -> None:
    _, model, sampler, _, loader = attached(examples=37, order=order)
    epochs = [train_one_epoch(model, loader, sampler) for _ in range(4)]
    assert all(sorted(epoch) == list(range(37)) for epoch in epochs)
    if order not in {"once", "incremental"}:
        assert epochs[1] != epochs[0]


@pytest.mark.parametrize(("examples", "batch_size"), [(1, 1), (1, 8), (5, 8), (8, 8), (9, 8), (64, 64)])
def test_odd_sizes(examples: int, batch_size: int) -> None:
    _, model, sampler, _, loader = attached(examples=examples, batch_size=batch_size)
    for _ in range(3):
        assert sorted(train_one_epoch(model, loader, sampler)) == list(range(examples))


def test_the_first_index_of_the_loader_is_the_first_of_the_order() -> None:
    _, _, sampler, _, _ = attached()
    assert list(sampler) == sampler.indices.tolist()
    assert len(sampler) == 64


def test_the_same_seed_gives_the_same_orders_and_another_seed_others() -> None:
    def orders(seed: int) -> list[list[int]]:
        _, model, sampler, _, loader = attached(seed=seed)
        return [train_one_epoch(model, loader, sampler) for _ in range(4)]

    assert orders(3) == orders(3)
    assert orders(3) != orders(4)


def test_loader_workers_do_not_change_the_orders() -> None:
    def orders(**options) -> list[list[int]]:
        _, model, sampler, _, loader = attached(**options)
        return [train_one_epoch(model, loader, sampler) for _ in range(3)]

    assert orders() == orders(num_workers=2, persistent_workers=True)


def test_an_order_that_was_only_looked_at_is_given_again() -> None:
    _, model, sampler, _, loader = attached()
    peeked = list(sampler)
    next(iter(loader))
    next(iter(loader))
    assert sum(len(inputs) for inputs, _ in loader) == len(peeked)
    assert train_one_epoch(model, loader, sampler) == peeked


def test_an_abandoned_epoch_is_followed_by_a_whole_one() -> None:
    _, model, sampler, _, loader = attached()
    for step, batch in enumerate(loader):
        backward(model, batch)
        if step == 2:
            break
    assert sorted(train_one_epoch(model, loader, sampler)) == list(range(64))


def test_without_attach_every_epoch_is_shuffled_anew() -> None:
    sampler = heeler.Sampler(100, batch_size=10)
    epochs = [list(sampler) for _ in range(3)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_set_epoch_gives_the_order_that_epoch_would_have_had() -> None:
    straight = heeler.Sampler(50, batch_size=10, order="random", seed=7)
    epochs = [list(straight) for _ in range(5)]
    resumed = heeler.Sampler(50, batch_size=10, order="random", seed=7)
    resumed.set_epoch(3)
    assert list(resumed) == epochs[3]
    resumed.set_epoch(4)
    assert list(resumed) == epochs[4]


def test_set_epoch_in_every_epoch_changes_nothing() -> None:
    def orders(call: bool) -> list[list[int]]:
        _, model, sampler, _, loader = attached()
        result = []
        for epoch in range(4):
            if call:
                sampler.set_epoch(epoch)
            result.append(train_one_epoch(model, loader, sampler))
        return result

    assert orders(True) == orders(False)


def test_set_epoch_far_away_does_not_take_for_ever() -> None:
    sampler = heeler.Sampler(10, batch_size=2)
    sampler.set_epoch(10**12)
    assert sorted(sampler) == list(range(10))


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 5), st.booleans(), st.integers(0, 3))
def test_dealing(examples: int, workers: int, batch_size: int, drop_last: bool, seed: int) -> None:
    order = np.random.default_rng(seed).permutation(examples)
    hands = [deal(order, workers, rank, batch_size, drop_last=drop_last) for rank in range(workers)]
    assert len({len(hand) for hand in hands}) == 1
    dealt = np.concatenate(hands)
    if drop_last:
        assert len(np.unique(dealt)) == len(dealt) == examples // workers * workers
    else:
        assert set(dealt.tolist()) == set(range(examples))
        assert len(dealt) - examples < workers
    for step in range(examples // (workers * batch_size)):  # a step of all workers together is a stretch of the order
        together = np.concatenate([hand[step * batch_size : (step + 1) * batch_size] for hand in hands])
        stretch = order[step * workers * batch_size : (step + 1) * workers * batch_size]
        assert together.tolist() == stretch.tolist()


def test_a_rule_of_ones_own() -> None:
    dataset, model = problem(12)
    sampler = heeler.Sampler(dataset, batch_size=3, order=make_rule("flipflop", 12, seed=1))
    heeler.attach(model, sampler)
    loader = DataLoader(dataset, batch_size=3, sampler=sampler)
    first = train_one_epoch(model, loader, sampler)
    assert train_one_epoch(model, loader, sampler) == first[::-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": 0}, "empty"),
        ({"batch_size": 0}, "batch_size"),
        ({"dim": -1}, "dim"),
        ({"order": "sideways"}, "herd"),
        ({"shards": "mine"}, "local"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    given_ones = {"dataset": 10, "batch_size": 2, **arguments}
    with pytest.raises(ValueError, match=message):
        heeler.Sampler(given_ones.pop("dataset"), **given_ones)


def test_workers_that_cannot_hear_of_each_other_are_refused() -> None:
    """Each would find an order of its own, and examples would be lost and doubled."""
    dataset, model = problem(12)
    with pytest.raises(ValueError, match="process group"):
        heeler.attach(model, heeler.Sampler(dataset, batch_size=2, num_replicas=2, rank=0))
    heeler.attach(model, heeler.Sampler(dataset, batch_size=2, num_replicas=2, rank=0, order="random")).detach()
    heeler.attach(model, heeler.Sampler(dataset, batch_size=2, num_replicas=2, rank=0, shards="local"))


def test_a_dataset_without_length_is_refused() -> None:
    with pytest.raises(TypeError, match="IterableDataset"):
        heeler.Sampler(iter([1, 2]), batch_size=1)  # type: ignore[arg-type]


def test_it_is_a_distributed_sampler_but_no_random_sampler() -> None:
    sampler = heeler.Sampler(10, batch_size=2)
    assert isinstance(sampler, torch.utils.data.distributed.DistributedSampler)
    assert not isinstance(sampler, RandomSampler)
    assert not hasattr(sampler, "generator")  # Accelerate would seed it


@pytest.mark.parametrize(
    ("examples", "features", "asked", "dim"),
    [
        (5000, 2000, None, 2001),  # a small model: the whole gradient
        (5000, 2048, None, 1024),  # a bias too many
        (4096, 4095, None, 4096),  # of few examples more
        (4096, 4096, None, 4096),
        (100_000, 1500, None, 1024),  # a table of whole gradients would be too large
        (100_000, 250, None, 251),
        (1000, 2000, 64, 64),  # what was asked for
    ],
)
def test_small_models_keep_whole_gradients(examples: int, features: int, asked: int | None, dim: int) -> None:
    sampler = heeler.Sampler(examples, batch_size=10, dim=asked, budget=None)
    handle = heeler.attach(nn.Linear(features, 1), sampler)
    assert (sampler.session.dim, handle.sketcher.exact) == (dim, dim == features + 1)
