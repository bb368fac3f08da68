"""`select_together`: one selection for all workers, or everybody's own part of it."""

import os
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

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
    chosen = select_together(handle, K, "facility", labels=labels)
    alone = heeler.select(handle, K, "facility", labels=labels).as_dict() if rank == 0 else None
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
    heeler.select(np.eye(8, 4, dtype=np.float32), 4, "facility")
    first, second = run_ranks(2, global_rank)
    assert first["chosen"].as_dict() == second["chosen"].as_dict() == first["alone"]
    for one, other in zip(first["orders"], second["orders"], strict=True):
        assert sorted(one + other) == sorted(first["chosen"].indices.tolist())
    assert torch.equal(first["weights"], second["weights"])
    assert first["filed"]


def local_rank(rank: int, order: str, labelled: bool) -> dict[str, Any]:
    dataset, model = problem(SIZES[rank], seed=rank)
    _, model = problem(1)
    sampler, handle, loader = set_up(dataset, model, shards="local", order=order)
    walk(model, sampler, loader, 1)
    labels = [["b", "a"], ["c", "b"]][rank] * (SIZES[rank] // 2) if labelled else None
    chosen = select_together(handle, 0.25, "facility", labels=labels)
    handle.detach()
    sampler, handle, loader = set_up(dataset, model, shards="local", subset=chosen)
    orders = walk(model, sampler, loader, 2)
    handle.consolidate()
    table = handle.table
    saved = handle.state_dict()
    again = select_together(handle, 4, "facility")
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
    names = ["b0", "a0"] * 12 + ["c1", "b1"] * 8 if labelled else ["0"] * 24 + ["1"] * 16  # a class ends in its rank
    classes = np.unique([name[::-1] for name in names], return_inverse=True)[1]
    whole = heeler.select(np.concatenate([r["gradients"] for r in results]), 10, "facility", labels=classes)
    parts = []
    for rank, result in enumerate(results):
        chosen = result["chosen"]
        mine = (whole.indices >= SIZES[0]) == (rank == 1)
        np.testing.assert_array_equal(chosen.indices, whole.indices[mine] - SIZES[0] * rank)
        np.testing.assert_array_equal(chosen.weights, whole.weights[mine])
        assert (chosen.error, *chosen.random_mmd) == pytest.approx((whole.error, *whole.random_mmd))
        if labelled:
            assert np.count_nonzero(chosen.indices % 2) == len(chosen) // 2
        assert all(sorted(order) == sorted(chosen.indices.tolist()) for order in result["orders"])
        parts.append(result["gradients"][np.sort(chosen.indices)])
        assert set(result["again"].indices) <= set(chosen.indices)
    np.testing.assert_array_equal(results[0]["rows"], np.concatenate(parts))
    used = np.concatenate([result["weights"][result["chosen"].indices] for result in results])
    assert used.mean() == pytest.approx(1.0)
    assert sum(len(result["again"]) for result in results) == 4
    assert "select_together" in results[0]["refused"]
    with pytest.raises(ValueError, match="select_together"):
        heeler.select(results[0]["state"], 4)


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


def held(rank: int, options: dict[str, Any]) -> list[tuple[int, int]]:
    """Threads and descriptors after each of some selections; errors are kept, with all that they refer to."""
    dataset, model = problem(N)
    sampler, handle, loader = set_up(dataset, model)
    walk(model, sampler, loader, 1)
    counts, errors = [], []
    for _ in range(4):
        try:
            select_together(handle, **options)
        except ValueError as error:
            errors.append(error)
        time.sleep(0.2)  # a thread that was told to end does so in a moment
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts what Linux lists")
@pytest.mark.parametrize("options", [{"k": K}, {"k": 0}])
def test_connections_are_closed_whether_it_works_or_not(options: dict[str, Any]) -> None:
    for first, *others in run_ranks(2, held, options):
        assert others == [first] * 3


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
