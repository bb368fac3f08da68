"""A rank that dies, stalls or sends nonsense costs the others a bounded wait and an order, never their training."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from heeler.ordering.distributed import wire
from heeler.ordering.distributed.screening import suspicious
from tests.distributed.ranks import Heard, problem, run_ranks, set_up, walk


def faulty(rank: int, who: int, how: str, shards: str) -> tuple[list[list[int]], list[str], float]:
    heard = Heard()
    dataset, model = problem(24)
    sampler, _, loader = set_up(dataset, model, shards=shards, exchange_timeout=3.0)
    orders = walk(model, sampler, loader, 2)
    if rank == who:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    started = time.monotonic()
    orders += walk(model, sampler, loader, 3)
    return orders, heard.said, time.monotonic() - started


@pytest.mark.parametrize("shards", ["global", "local"])
@pytest.mark.parametrize("how", ["dies", "stalls"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_lost_rank(who: int, how: str, shards: str) -> None:
    results = run_ranks(3, faulty, who, how, shards, lost=(who,))
    alive = [result for result in results if result is not None]
    assert len(alive) == 2
    for orders, said, seconds in alive:
        assert seconds < 30
        assert len(said) == 1
        assert f"rank {who} " in said[0]
        for order in orders:
            assert len(order) == len(set(order)) == (8 if shards == "global" else 24)
    if shards == "global":
        for epoch in range(5):  # the orders of those who are left never overlap
            assert not set(alive[0][0][epoch]) & set(alive[1][0][epoch])


def nonsense(rank: int, what: float, shards: str, order: str) -> tuple[list[list[int]], list[str], list[bool]]:
    heard = Heard()
    dataset, model = problem(24)
    sampler, handle, loader = set_up(dataset, model, shards=shards, order=order)
    if rank == 1:
        planner, original = sampler.session.planner, sampler.session.planner.observe
        planner.observe = lambda indices, vectors: original(indices, (vectors + 1e-3) * np.float32(what))
    orders = walk(model, sampler, loader, 4)
    handle.session.drain()
    table = getattr(sampler.session.rule, "table", None)
    fine = [bool(np.isfinite(table.rows).all())] if table is not None and rank == 0 else []
    return orders, heard.said, fine


@pytest.mark.parametrize("what", [np.nan, np.inf, 1e6])
@pytest.mark.parametrize(("shards", "order"), [("global", "herd"), ("local", "herd"), ("local", "cd-grab")])
def test_a_rank_that_sends_nonsense_is_named_and_spoils_nothing(what: float, shards: str, order: str) -> None:
    (mine, said, fine), (theirs, _, _) = run_ranks(2, nonsense, what, shards, order)
    assert all(fine)
    assert said
    assert all(message.startswith("rank 1 sent ") for message in said)
    for epoch in range(4):
        if shards == "global":
            assert sorted(mine[epoch] + theirs[epoch]) == list(range(24))
        else:
            assert sorted(mine[epoch]) == sorted(theirs[epoch]) == list(range(24))


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf, 1e6, 1e12])
def test_screening_a_hundred_seeds(what: float) -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        ranks = int(rng.integers(2, 9))
        batches = [
            (rng.standard_normal((rng.integers(1, 20), 8)) * 10 ** rng.uniform(-3, 3, (1, 1))).astype(np.float32)
            for _ in range(ranks)
        ]
        scale = 10 ** rng.uniform(-1, 1)
        batches = [(b / np.linalg.norm(b, axis=1).max() * scale).astype(np.float32) for b in batches]
        bad = int(rng.integers(0, ranks))
        with np.errstate(invalid="ignore", over="ignore"):
            batches[bad] = (batches[bad] * np.float32(what)).astype(np.float32)
        verdicts = suspicious(batches)
        largest = np.argmax(np.nan_to_num(np.linalg.norm(batches[bad].astype(np.float64), axis=1), nan=np.inf))
        assert verdicts[bad][largest]
        assert not any(verdict.any() for rank, verdict in enumerate(verdicts) if rank != bad)


def test_screening_lets_heavy_tails_of_one_rank_pass() -> None:
    rng = np.random.default_rng(0)
    tails = [(rng.standard_normal((50, 4)) * 10 ** rng.uniform(-6, 0, (50, 1))).astype(np.float32) for _ in range(3)]
    assert not any(verdict.any() for verdict in suspicious(tails))
    assert not any(verdict.any() for verdict in suspicious([np.zeros((3, 4), np.float32)] * 2))
    assert [verdict.size for verdict in suspicious([np.empty((0, 4), np.float32)])] == [0]


def disagreeing(rank: int, options: list[dict[str, Any]]) -> str:
    dataset, model = problem(options[rank].pop("examples", 24))
    try:
        set_up(dataset, model, **options[rank])
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"examples": 24}, {"examples": 25}, ["length", "24", "25"]),
        ({"seed": 1}, {"seed": 2}, ["seed", "1", "2"]),
        ({"order": "herd"}, {"order": "pair"}, ["order", "herd", "pair"]),
        ({"batch_size": 2}, {"batch_size": 4}, ["batch_size", "2", "4"]),
        ({"shards": "global"}, {"shards": "local"}, ["shards", "global", "local"]),
    ],
)
def test_ranks_that_disagree_find_out_at_the_start(one: dict, other: dict, words: list[str]) -> None:
    for message in run_ranks(2, disagreeing, [one, other]):
        assert all(word in message for word in words)


def of_different_sizes(rank: int) -> str:
    import torch

    import heeler

    try:
        heeler.attach(torch.nn.Linear(3 + rank, 1), heeler.Sampler(10, batch_size=2))
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_with_sketches_of_different_sizes_find_out_at_the_start() -> None:
    for message in run_ranks(2, of_different_sizes):
        assert "'4'" in message
        assert "'5'" in message


def test_a_header_that_cannot_be() -> None:
    """A rank that announces an absurd number of sketches is named; nobody allocates memory for them."""

    def lying(rank: int) -> list[str]:
        heard = Heard()
        dataset, model = problem(24)
        sampler, _, loader = set_up(dataset, model, exchange_timeout=2.0)
        if rank == 1:
            wire.torch = _Lies(wire.torch)
        walk(model, sampler, loader, 2)
        return heard.said

    said = run_ranks(2, lying)
    assert "rank 1 " in said[0][0]


class _Lies:
    """torch, but for the header."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def tensor(self, values: Any, **options: Any) -> Any:
        return self._torch.tensor([2**40, *values[1:]], **options)
