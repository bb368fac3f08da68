"""Strata of several workers: the same for one order, and one list of names for workers with examples of their own."""

from typing import Any

import numpy as np
import pytest
from torch.distributed.device_mesh import init_device_mesh

import heeler
from tests.distributed.ranks import problem, run_ranks, set_up, walk

SHARDS = (["däh", "b", "däh", "b", "b"] * 4, ["c", "a", "b", "c"] * 4)
NAMES = ["a", "b", "c", "däh"]


def disagreeing(rank: int, options: list[dict[str, Any]]) -> str:
    try:
        heeler.Sampler(12, batch_size=2, **options[rank])
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ([{"strata": [0, 1] * 6}, {"strata": [1, 0] * 6}], ["2 strata, digest"]),
        ([{"strata": [0, 1] * 6}, {}], ["2 strata, digest", "'none'"]),
        ([{"strata": [0, 1] * 6, "shards": "local"}, {"shards": "local"}], ["'integers'", "'none'"]),
        ([{"strata": [0, 1] * 6, "shards": "local"}, {"strata": ["0"] * 12, "shards": "local"}], ["'text'"]),
        ([{"strata": [0, 1] * 6}, {"strata": ["no", "yes"] * 6}], ["no error"]),
    ],
)
def test_ranks_that_disagree_find_out(options: list[dict[str, Any]], values: list[str]) -> None:
    for message in run_ranks(2, disagreeing, options):
        assert all(value in message for value in values)
        assert "disagree on strata" in message or message == "no error"


def own_shards(rank: int) -> tuple[np.ndarray, list[list[int]], np.ndarray]:
    labels = SHARDS[rank]
    dataset, model = problem(len(labels), seed=rank)
    sampler, _, loader = set_up(dataset, model, shards="local", strata=labels)
    orders = walk(model, sampler, loader, 3)
    return sampler.session.rule.strata, orders, sampler.strata


def test_own_shards_have_one_list_of_names() -> None:
    results = run_ranks(2, own_shards)
    expected = [NAMES.index(name) for labels in SHARDS for name in labels]
    for rank, (codes, orders, own) in enumerate(results):
        assert codes.tolist() == expected
        assert all(sorted(order) == list(range(len(SHARDS[rank]))) for order in orders)
        assert own.tolist() == np.unique(SHARDS[rank], return_inverse=True)[1].tolist()


def stratified_shards(rank: int) -> list[list[int]]:
    labels = SHARDS[rank]
    dataset, model = problem(len(labels), seed=rank)
    sampler, _, loader = set_up(dataset, model, shards="local", order="stratified", strata=labels)
    return walk(model, sampler, loader, 3)


def test_every_worker_stratifies_its_own_shard() -> None:
    """All of its batches of four, after the first epoch, which is random."""
    for labels, orders in zip(SHARDS, run_ranks(2, stratified_shards), strict=True):
        assert len({tuple(order) for order in orders}) == 3
        for order in orders[1:]:
            assert sorted(order) == list(range(len(labels)))
            for start in range(0, len(order), 4):
                batch = [labels[index] for index in order[start : start + 4]]
                assert all(abs(batch.count(name) - 4 * labels.count(name) / len(labels)) < 1 for name in NAMES)


def with_peers(rank: int) -> list[int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    labels = [10 * (rank // 2) + i % 3 for i in range(8)]
    sampler = heeler.Sampler(8, batch_size=2, shards="local", strata=labels, process_group=(mesh, "dp"))
    return sampler.session.rule.strata.tolist()


def test_ranks_that_hold_parts_of_a_model_learn_of_all_strata() -> None:
    expected = [3 * worker + i % 3 for worker in range(2) for i in range(8)]
    assert run_ranks(4, with_peers) == [expected] * 4
