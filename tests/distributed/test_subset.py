"""Subsets of several workers: the same everywhere, or everybody's own part."""

from typing import Any

import numpy as np
from torch.utils.data import TensorDataset

import heeler
from tests.distributed.ranks import problem, run_ranks, set_up, walk

N = 40
SIZES = (24, 16)


def orders_of(rank: int, subset: np.ndarray | None, numbers: np.ndarray) -> list[list[int]]:
    dataset, model = problem(N)
    if subset is None:
        dataset = TensorDataset(*(tensor[numbers] for tensor in dataset.tensors))
    sampler, _, loader = set_up(dataset, model, subset=subset)
    return walk(model, sampler, loader, 3)


def test_orders_are_those_of_a_dataset_of_the_chosen_alone() -> None:
    numbers = np.sort(np.random.default_rng(0).permutation(N)[:25])
    within = run_ranks(2, orders_of, numbers, numbers)
    alone = run_ranks(2, orders_of, None, numbers)
    assert within == [[numbers[order].tolist() for order in orders] for orders in alone]


def disagreeing(rank: int, options: list[dict[str, Any]]) -> str:
    try:
        sampler = heeler.Sampler(12, batch_size=2, **options[rank])
    except ValueError as error:
        return str(error)
    return sampler.session.links.subset


def test_ranks_must_have_the_same_subset_unless_they_have_their_own_examples() -> None:
    for message in run_ranks(2, disagreeing, [{"subset": [0, 1, 2]}, {"subset": [0, 1, 3]}]):
        assert "the ranks disagree on subset" in message
    for message in run_ranks(2, disagreeing, [{}, {"subset": [0, 1, 3]}]):
        assert "the ranks disagree on subset" in message
    local = {"shards": "local"}
    one, other = run_ranks(2, disagreeing, [{**local, "subset": [0, 1]}, local])
    assert one == other != "all"
    for message in run_ranks(2, disagreeing, [{**local, "subset": []}, local]):
        assert "of rank 0 is empty" in message


def resumed(rank: int, subset: Any, saved: Any, stop: int | None) -> tuple[list[list[int]], Any]:
    dataset, model = problem(SIZES[rank], seed=rank)
    sampler, handle, loader = set_up(dataset, model, shards="local", subset=subset[rank], batch_size=2)
    if saved is not None:
        handle.load_state_dict(saved)
    steps, walked = 0, []
    for _ in range(3 if saved is None else 2):
        at = sampler.session.cursors.trained if saved is not None and steps == 0 else 0
        for inputs, targets in loader:
            walked.append(sampler.indices[at : at + len(inputs)].tolist())
            at, steps = at + len(inputs), steps + 1
            ((model(inputs) - targets).square().sum() / 2).backward()
            if steps == stop:
                handle.consolidate()
                return walked, handle.state_dict()
    return walked, None


def wrong_subset(rank: int, subset: Any, saved: Any) -> str:
    dataset, model = problem(SIZES[rank], seed=rank)
    _, handle, _ = set_up(dataset, model, shards="local", subset=subset[rank], batch_size=2)
    try:
        handle.load_state_dict(saved)
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_run_on_parts_of_shards_goes_on_exactly() -> None:
    subset = [[1, 5, 9, 20, 22, 23, 2, 3], [0, 15, 7, 3, 8, 2]]
    whole = run_ranks(2, resumed, subset, None, None)
    begun = run_ranks(2, resumed, subset, None, 5)
    gone_on = run_ranks(2, resumed, subset, begun[0][1], None)
    for (every, _), (first, _), (rest, _) in zip(whole, begun, gone_on, strict=True):
        assert first + rest == every
    # Rank 1's part differs, and rank 0 must not go on alone.
    for message in run_ranks(2, wrong_subset, [subset[0], [1, 15, 7, 3, 8, 2]], begun[0][1]):
        assert "make the sampler with the subset that the state was saved with" in message
