"""`Sampler(subset=...)`: the chosen examples, each once per epoch, in the dataset's numbers, filed under their own."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

import heeler
from heeler.herding import rule_class, rule_names
from heeler.ordering.state import StateError
from tests.ordering.loops import backward, problem, true_gradients
from tests.ordering.test_strata import check_shares

N, BATCH = 67, 4
LABELS = np.random.default_rng(0).integers(0, 3, N)
CHOSEN = np.random.default_rng(1).permutation(N)[:30]


def set_up(subset: Any = CHOSEN, order: str = "herd", **options: Any) -> tuple[Any, ...]:
    dataset, model = problem(N)
    if rule_class(order).needs_strata:
        options["strata"] = LABELS
    sampler = heeler.Sampler(dataset, batch_size=BATCH, order=order, subset=subset, **options)
    handle = heeler.attach(model, sampler)
    return dataset, model, sampler, handle, DataLoader(dataset, batch_size=BATCH, sampler=sampler)


@dataclass
class Weighted:
    """As `heeler.select` returns them; the core's tests do without it."""

    indices: np.ndarray
    weights: np.ndarray

    def as_dict(self) -> dict[str, Any]:
        return {"method": "ours", "indices": self.indices.tolist(), "weights": self.weights.tolist()}


def selection() -> Weighted:
    rng = np.random.default_rng(2)
    return Weighted(rng.permutation(N)[:30], rng.permutation([2.0] * 23 + [3.0] * 7))  # weights add up to N


@pytest.mark.parametrize("order", rule_names())
def test_every_rule_orders_within_the_subset(order: str) -> None:
    _, model, sampler, _, loader = set_up(order=order)
    assert len(sampler) == len(CHOSEN)
    assert len(loader) == 8
    for _ in range(3):
        drawn = []
        for batch in loader:
            backward(model, batch)
            drawn.append(batch)
        assert sorted(sampler.indices.tolist()) == sorted(CHOSEN.tolist())
        inputs = torch.cat([each for each, _ in drawn])
        assert torch.equal(inputs, loader.dataset.tensors[0][sampler.indices])


@pytest.mark.parametrize("order", [name for name in rule_names() if rule_class(name).needs_vectors])
def test_orders_are_those_of_a_dataset_of_the_chosen_alone(order: str) -> None:
    _, model, sampler, _, loader = set_up(order=order)
    numbers = np.sort(CHOSEN)
    dataset, twin = problem(N)
    part = TensorDataset(*(tensor[numbers] for tensor in dataset.tensors))
    alone = heeler.Sampler(part, batch_size=BATCH, order=order)
    heeler.attach(twin, alone)
    for _ in range(3):
        assert sampler.indices.tolist() == numbers[alone.indices].tolist()
        for batch, other in zip(loader, DataLoader(part, batch_size=BATCH, sampler=alone), strict=True):
            backward(model, batch)
            backward(twin, other)


def check_rows(handle: heeler.Handle, dataset: TensorDataset, model: nn.Module) -> None:
    handle.state_dict()
    table = handle.table
    rows = table.rows.astype(np.float32) / table.scale
    assert table.seen.all()
    np.testing.assert_allclose(rows, true_gradients(dataset, model)[np.sort(CHOSEN)], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("workers", [0, 1])
def test_sketches_are_filed_under_their_own_examples(workers: int) -> None:
    dataset, model, sampler, handle, _ = set_up()
    for batch in DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=workers):
        backward(model, batch)
    check_rows(handle, dataset, model)
    inputs, targets = dataset.tensors
    found = handle.verify(lambda i: nn.functional.mse_loss(model(inputs[i : i + 1]), targets[i : i + 1]))
    assert found.filed_right == 1.0
    assert set(found.examples) <= set(CHOSEN)


class Numbered(Dataset):
    """Gives the number of an example with it."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return (*self.dataset[index], index)


def backwards(items: list[Any]) -> Any:
    return torch.utils.data.default_collate(items[::-1])


def test_ids_and_names_are_the_datasets_numbers() -> None:
    dataset, model = problem(N)
    sampler = heeler.Sampler(N, batch_size=BATCH, subset=CHOSEN)
    handle = heeler.attach(model, sampler, ids=lambda batch: batch[2])
    for *batch, _ in DataLoader(Numbered(dataset), batch_size=BATCH, sampler=sampler, collate_fn=backwards):
        backward(model, batch)
    check_rows(handle, dataset, model)

    dataset, model, sampler, handle, _ = set_up()
    for indices in BatchSampler(sampler, BATCH, drop_last=False):
        with handle.examples(indices[::-1]):
            backward(model, dataset[indices[::-1]])
    check_rows(handle, dataset, model)
    outsider = int(np.setdiff1d(np.arange(N), CHOSEN)[0])
    with pytest.raises(ValueError, match=rf"example {outsider} is not in the sampler's subset of 30.*paused"):
        handle.examples([int(CHOSEN[0]), outsider])
    with pytest.raises(ValueError, match=r"0\.\.66"):
        handle.examples([N])


def test_ids_outside_the_subset_are_said_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    dataset, model = problem(N)
    sampler = heeler.Sampler(N, batch_size=BATCH, subset=CHOSEN)
    outsider = int(np.setdiff1d(np.arange(N), CHOSEN)[0])
    handle = heeler.attach(model, sampler, ids=lambda batch: torch.full_like(batch[2], outsider))
    for *batch, _ in DataLoader(Numbered(dataset), batch_size=BATCH, sampler=sampler):
        backward(model, batch)
    handle.state_dict()
    assert not handle.table.seen.any()
    assert f"example {outsider} is not in the sampler's subset" in caplog.text


class WithOthers:
    """A batch sampler that adds an example of its own to every batch."""

    def __init__(self, sampler: heeler.Sampler, other: int) -> None:
        self.batches, self.other = BatchSampler(sampler, BATCH, drop_last=False), other

    def __iter__(self) -> Any:
        return ([*batch, self.other] for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def test_examples_that_a_batch_sampler_adds_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    dataset, model, sampler, handle, _ = set_up()
    outsider = int(np.setdiff1d(np.arange(N), CHOSEN)[0])
    for batch in DataLoader(dataset, batch_sampler=WithOthers(sampler, outsider)):
        backward(model, batch)
    handle.state_dict()
    rows = handle.table.rows.astype(np.float32) / handle.table.scale
    seen = handle.table.seen
    assert seen.any()
    true = true_gradients(dataset, model)[np.sort(CHOSEN)]
    np.testing.assert_allclose(rows[seen], true[seen], rtol=2e-3, atol=2e-3)
    assert "not in the sampler's subset" in caplog.text


def test_strata_are_the_datasets_and_counted_in_the_subset() -> None:
    _, model, sampler, _, loader = set_up(order="stratified")
    numbers = np.sort(CHOSEN)
    np.testing.assert_array_equal(sampler.strata, LABELS[numbers])
    for epoch in range(3):
        for batch in loader:
            backward(model, batch)
        if epoch:  # the first one is random
            check_shares(np.searchsorted(numbers, sampler.indices), LABELS[numbers], BATCH)
    few = np.flatnonzero(LABELS != 1)  # codes have no gap where a stratum is missing
    assert set(heeler.Sampler(N, batch_size=BATCH, strata=LABELS, subset=few).strata) == {0, 1}
    with pytest.raises(ValueError, match="30 entries for 67"):
        heeler.Sampler(N, batch_size=BATCH, strata=LABELS[CHOSEN], subset=CHOSEN)


@pytest.mark.parametrize("drop_last", [False, True])
def test_workers_share_the_subset(drop_last: bool) -> None:
    hands = [
        heeler.Sampler(
            N, batch_size=BATCH, order="random", subset=CHOSEN, num_replicas=4, rank=rank, drop_last=drop_last
        )
        for rank in range(4)
    ]
    drawn = [index for hand in hands for index in hand]
    assert {len(hand) for hand in hands} == {7 if drop_last else 8}
    assert set(drawn) <= set(CHOSEN.tolist())
    assert len(set(drawn)) == (28 if drop_last else 30)


def test_weights_have_mean_one_over_the_chosen() -> None:
    chosen = selection()
    sampler = heeler.Sampler(N, batch_size=BATCH, subset=chosen)
    weights = sampler.weights
    assert weights.shape == (N,)
    assert weights.dtype == torch.float32
    np.testing.assert_allclose(weights[chosen.indices], chosen.weights * 30 / N, rtol=1e-6)
    assert weights[np.setdiff1d(np.arange(N), chosen.indices)].eq(0).all()
    np.testing.assert_array_equal(sampler.subset, np.sort(chosen.indices))
    assert heeler.Sampler(N, batch_size=BATCH, subset=CHOSEN).weights[CHOSEN].eq(1).all()
    assert heeler.Sampler(N, batch_size=BATCH).weights.eq(1).all()
    assert heeler.Sampler(N, batch_size=BATCH).subset is None


def test_sketches_are_of_weighted_losses() -> None:
    chosen = selection()
    dataset, model, sampler, handle, _ = set_up(chosen)
    weighted = TensorDataset(*dataset.tensors, sampler.weights)
    for inputs, targets, w in DataLoader(weighted, batch_size=BATCH, sampler=sampler):
        ((model(inputs) - targets).square()[:, 0] * w).mean().backward()
    rows = handle.table.rows.astype(np.float32) / handle.table.scale
    true = (true_gradients(dataset, model) * sampler.weights.numpy()[:, None])[sampler.subset]
    np.testing.assert_allclose(rows, true, rtol=2e-3, atol=2e-3)


def test_a_selection_its_plain_values_and_its_json_are_the_same_subset() -> None:
    chosen = selection()
    digests = {
        heeler.Sampler(N, batch_size=BATCH, subset=each).session.links.subset
        for each in (
            chosen,
            chosen.as_dict(),
            json.loads(json.dumps(chosen.as_dict())),
            {"indices": torch.from_numpy(chosen.indices[::-1].copy()), "weights": chosen.weights[::-1]},
        )
    }
    assert len(digests) == 1
    assert heeler.Sampler(N, batch_size=BATCH, subset=chosen.indices).session.links.subset not in digests


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        (0.1, r"a fraction is for heeler.select"),
        ("chosen.csv", "numbers of the chosen examples"),
        ([3, 5, 3], "example 3 more than once"),
        ([0, N], r"names example 67, the dataset has 0\.\.66"),
        ([-1], "names example -1"),
        ([], "the subset of it, is empty"),
        ([0.5, 1.0], "must hold integers"),
        (np.zeros(N, bool), r"a mask.*np.flatnonzero"),
        ([[1], [2]], "one dimension"),
        ({"weights": [1.0]}, "no 'indices'"),
        ({"indices": [1, 2], "weights": [1.0]}, "2 indices and weights of shape"),
        ({"indices": [1, 2], "weights": [1.0, np.nan]}, "finite"),
        ({"indices": [1, 2], "weights": [0.0, 0.0]}, "not all 0"),
    ],
)
def test_bad_subsets_are_refused(subset: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heeler.Sampler(N, batch_size=BATCH, subset=subset)


def train(
    subset: Any, steps: int, stop: int | None = None, saved: Any = None, order: str = "herd"
) -> tuple[list[list[int]], nn.Module, Any]:
    """Indices step by step, the model, and its checkpoint after `stop` steps."""
    dataset, model, _, handle, loader = set_up(subset, order)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done, walked = 0, []
    if saved is not None:
        done = saved["done"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        handle.load_state_dict(saved["heeler"])
    numbers = {tuple(row.tolist()): number for number, row in enumerate(dataset.tensors[0])}
    while done < steps:
        for batch in loader:
            walked.append([numbers[tuple(row.tolist())] for row in batch[0]])
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.step()
            done += 1
            if done == stop:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                return walked, model, {**state, "heeler": handle.state_dict(), "done": done}
            if done == steps:
                break
    return walked, model, None


@pytest.mark.parametrize("order", ["herd", "pair", "random", "stratified"])
@pytest.mark.parametrize("stop", [3, 8, 13])
def test_resume_is_exact(order: str, stop: int) -> None:
    chosen = selection()
    whole, model, _ = train(chosen, 24, order=order)
    first, _, saved = train(chosen, 24, stop, order=order)
    rest, twin, _ = train(chosen.as_dict(), 24, saved=saved, order=order)
    assert first + rest == whole
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_state_of_another_subset_is_refused_and_changes_nothing() -> None:
    chosen = selection()
    saved = train(chosen, 24, 13)[2]["heeler"]
    others = {
        "other examples": np.setdiff1d(np.arange(N), chosen.indices)[:30],
        "other weights": {"indices": chosen.indices, "weights": chosen.weights * np.arange(1, 31)},
        "none": None,
    }
    for subset in others.values():
        _, _, sampler, handle, _ = set_up(subset)
        before = sampler.indices.copy()
        with pytest.raises(StateError, match=r"subset with the digest .* this sampler has .*chosen.as_dict\(\)"):
            handle.load_state_dict(saved)
        np.testing.assert_array_equal(sampler.indices, before)
    _, _, sampler, handle, _ = set_up(None)
    whole = handle.state_dict()
    with pytest.raises(StateError, match="of all examples of a dataset, this sampler has a subset"):
        set_up(chosen)[3].load_state_dict(whole)
    with pytest.raises(StateError, match="of all examples"):
        set_up(chosen)[2].load_state_dict(sampler.state_dict())
    same = set_up(chosen)[2]
    same.load_state_dict(set_up(chosen)[2].state_dict())


def test_a_state_of_a_sampler_that_reselected_is_refused() -> None:
    """Version 0.2 had `Sampler(reselect_every=)`; no sampler of this version can go on with its states."""
    _, _, sampler, handle, _ = set_up()
    before = sampler.indices.copy()
    saved, small = handle.state_dict(), {**sampler.state_dict(), "reselect": {"every": 3}}
    saved["session"]["reselect"] = {"every": 3, "turn": 1, "part_epochs": 0}
    for load in (lambda: handle.load_state_dict(saved), lambda: sampler.load_state_dict(small)):
        with pytest.raises(StateError, match=r"reselect_every=.*finish that run with Heeler 0.2, or start a new"):
            load()
    np.testing.assert_array_equal(sampler.indices, before)


def test_a_state_of_a_subset_does_not_grow() -> None:
    with pytest.raises(ValueError, match="a state of a subset cannot grow"):
        heeler.grow(set_up()[3].state_dict(), N + 10)


def test_a_rule_of_your_own_orders_the_subset() -> None:
    rule = heeler.herding.make_rule("random", 30)
    assert sorted(heeler.Sampler(N, batch_size=BATCH, order=rule, subset=CHOSEN)) == sorted(CHOSEN.tolist())
    with pytest.raises(ValueError, match="the rule orders 30 examples, the subset has 29"):
        heeler.Sampler(N, batch_size=BATCH, order=rule, subset=CHOSEN[:29])


def test_a_sampler_of_all_examples_comes_back_between_subsets() -> None:
    """Choosing again by hand: the whole's next epoch has a new, herded order, and sketches at the new weights."""
    dataset, model = problem(N)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    whole = heeler.Sampler(dataset, batch_size=BATCH, refresh=1)
    orders = []
    for cycle in range(3):
        handle = heeler.attach(model, whole)
        before = {}
        for indices in BatchSampler(whole, BATCH, drop_last=False):
            true = true_gradients(dataset, model)
            before.update((index, true[index]) for index in indices)
            backward(model, dataset[indices])
            optimizer.step(), optimizer.zero_grad()
        assert whole.epoch == cycle
        orders.append(whole.indices.tolist())
        rows = handle.table.rows.astype(np.float32) / handle.table.scale
        assert handle.table.seen.all()
        np.testing.assert_allclose(rows, np.stack([before[i] for i in range(N)]), rtol=2e-3, atol=2e-3)
        handle.detach()
        part = heeler.Sampler(dataset, batch_size=BATCH, subset=np.random.default_rng(cycle).permutation(N)[:20])
        handle = heeler.attach(model, part)
        for _ in range(2):
            for batch in DataLoader(dataset, batch_size=BATCH, sampler=part):
                backward(model, batch)
                optimizer.step(), optimizer.zero_grad()
        handle.detach()
    assert len({tuple(order) for order in orders}) == 3
    assert whole.session.rule.last_solution is not None


def test_an_order_that_was_only_looked_at_is_given_again_after_attach() -> None:
    dataset, model = problem(N)
    sampler = heeler.Sampler(dataset, batch_size=BATCH)
    looked_at = list(sampler)
    handle = heeler.attach(model, sampler)
    assert list(sampler) == looked_at
    handle.detach()
    heeler.attach(model, sampler)
    assert len(set(sampler)) == N
