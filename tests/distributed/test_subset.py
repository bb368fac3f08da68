"""Subsets of several workers: one selection for all of them, the same subset everywhere, or everybody's own part."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

import heeler
from heeler.selection import proportional_parts, select_together
from tests.distributed.ranks import gradients, problem, run_ranks, set_up, walk

N, K = 40, 12
SIZES = (24, 16)


def global_rank(rank: int) -> dict[str, Any]:
    dataset, model = problem(N)
    sampler, handle, loader = set_up(dataset, model)
    walk(model, sampler, loader, 1)
    labels = np.arange(N) % 2
    chosen = select_together(handle, K, "norm", labels=labels)
    alone = heeler.select(handle, K, "norm", labels=labels).as_dict() if rank == 0 else None
    handle.detach()
    sampler, handle, loader = set_up(dataset, model, subset=chosen)
    orders = walk(model, sampler, loader, 3)
    handle.consolidate()
    table = handle.table
    rows = table.rows.astype(np.float32) / table.scale if rank == 0 else None
    return {
        "chosen": chosen,
        "alone": alone,
        "orders": orders,
        "weights": sampler.weights,
        "filed": rank > 0 or np.array_equal(rows, gradients(dataset, model)[sampler.subset]),
    }


def test_rank_0_selects_for_all_and_all_train_on_it() -> None:
    heeler.select(np.eye(8, 4, dtype=np.float32), 4, "norm")
    first, second = run_ranks(2, global_rank)
    assert first["chosen"].as_dict() == second["chosen"].as_dict() == first["alone"]
    np.testing.assert_array_equal(first["chosen"].scores, second["chosen"].scores)
    for one, other in zip(first["orders"], second["orders"], strict=True):
        assert sorted(one + other) == sorted(first["chosen"].indices.tolist())
    assert torch.equal(first["weights"], second["weights"])
    assert first["filed"]


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


def local_rank(rank: int, order: str, labelled: bool) -> dict[str, Any]:
    dataset, model = problem(SIZES[rank], seed=rank)
    _, model = problem(1)
    sampler, handle, loader = set_up(dataset, model, shards="local", order=order)
    walk(model, sampler, loader, 1)
    labels = [["b", "a"], ["c", "b"]][rank] * (SIZES[rank] // 2) if labelled else None
    chosen = select_together(handle, 0.25, "norm", labels=labels)
    handle.detach()
    sampler, handle, loader = set_up(dataset, model, shards="local", subset=chosen)
    orders = walk(model, sampler, loader, 2)
    handle.consolidate()
    table = handle.table
    saved = handle.state_dict()
    again = select_together(handle, 4, "norm")
    refused = ""
    if rank == 0:
        try:
            heeler.select(handle, 4)
        except ValueError as error:
            refused = str(error)
    return {
        "chosen": chosen,
        "orders": orders,
        "weights": sampler.weights.numpy(),
        "gradients": gradients(dataset, model),
        "rows": table.rows.astype(np.float32) / table.scale if rank == 0 else None,
        "state": saved if rank == 0 else None,
        "again": again,
        "refused": refused,
    }


@pytest.mark.parametrize("labelled", [False, True])
def test_local_shards_get_proportional_parts_of_their_own(labelled: bool) -> None:
    results = run_ranks(2, local_rank, "herd", labelled)
    assert [len(result["chosen"]) for result in results] == proportional_parts(10, SIZES).tolist() == [6, 4]
    parts = []
    for rank, result in enumerate(results):
        chosen = result["chosen"]
        norms = np.linalg.norm(result["gradients"], axis=1)
        assert chosen.scores.shape == (SIZES[rank],)
        np.testing.assert_allclose(chosen.scores, norms, rtol=1e-3)
        for group in [slice(0, None, 2), slice(1, None, 2)] if labelled else [slice(None)]:
            own = np.arange(SIZES[rank])[group]
            picked = np.intersect1d(chosen.indices, own)
            assert len(picked) == len(chosen) // (2 if labelled else 1)
            np.testing.assert_allclose(np.sort(norms[picked]), np.sort(norms[own])[-len(picked) :], rtol=1e-3)
        assert all(sorted(order) == sorted(chosen.indices.tolist()) for order in result["orders"])
        parts.append(result["gradients"][np.sort(chosen.indices)])
        assert set(result["again"].indices) <= set(chosen.indices)
        assert np.isnan(result["again"].scores).sum() == SIZES[rank] - len(chosen)
    np.testing.assert_array_equal(results[0]["rows"], np.concatenate(parts))
    used = np.concatenate([result["weights"][result["chosen"].indices] for result in results])
    assert used.mean() == pytest.approx(1.0)
    assert sum(len(result["again"]) for result in results) == 4
    assert "select_together" in results[0]["refused"]
    with pytest.raises(ValueError, match="select_together"):
        heeler.select(results[0]["state"], 4)


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


def refused(rank: int, options: list[dict[str, Any]], shards: str) -> str:
    dataset, model = problem(N)
    sampler, handle, loader = set_up(dataset, model, shards=shards)
    walk(model, sampler, loader, 1)
    try:
        select_together(handle, **options[rank])
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("options", "shards", "message"),
    [
        ([{"k": 0}] * 2, "global", "k=0 of 40 examples cannot be selected"),
        ([{"k": 4}, {"k": 5}], "global", "the ranks disagree on k"),
        ([{"k": 9, "labels": [0, 1] * 20}, {"k": 9, "labels": [0, 1]}], "local", "rank 1 has 'unusable: labels have"),
        ([{"k": 1}] * 2, "local", "k=1 would leave some of the 2 classes empty"),
    ],
)
def test_what_rank_0_cannot_do_every_rank_hears(options: list[dict[str, Any]], shards: str, message: str) -> None:
    for said in run_ranks(2, refused, options, shards):
        assert message in said


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


def with_peers(rank: int) -> tuple[list[int], list[list[int]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dataset, model = problem(N)
    sampler, handle, loader = set_up(dataset, model, process_group=(mesh, "dp"))
    walk(model, sampler, loader, 1)
    chosen = select_together(handle, K)
    sampler = heeler.Sampler(dataset, batch_size=4, subset=chosen, order="random", process_group=(mesh, "dp"))
    return chosen.indices.tolist(), [inputs.tolist() for inputs, _ in DataLoader(dataset, 4, sampler=sampler)]


def test_ranks_that_hold_parts_of_a_model_hear_of_it_too() -> None:
    results = run_ranks(4, with_peers)
    assert len({tuple(indices) for indices, _ in results}) == 1
    assert results[0][1] == results[1][1] != results[2][1] == results[3][1]
