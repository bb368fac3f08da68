"""`reselect_every` on several workers: rank 0 chooses for all, own shards get their parts, and a restart goes on."""

from typing import Any

import numpy as np
import pytest

import heeler
from tests.distributed.ranks import gradients, problem, run_ranks, set_up

N, K, EVERY = 40, 12, 3
SIZES = (24, 16)


def trained(rank: int, shards: str, saved: Any, stop: int) -> tuple[list[list[list[int]]], list[Any], Any]:
    """Steps of each epoch until `stop` epochs are done, one step into the next; the state there."""
    size = N if shards == "global" else SIZES[rank]
    dataset, model = problem(size, seed=0 if shards == "global" else rank)
    selector = heeler.Selector(K, "norm", labels=np.arange(size) % 2)
    sampler, handle, loader = set_up(dataset, model, shards=shards, batch_size=2, subset=selector, reselect_every=EVERY)
    if saved is not None:
        handle.load_state_dict(saved)
    epochs: list[list[list[int]]] = []
    chosen: list[Any] = []
    while True:
        steps: list[list[int]] = []
        at = sampler.session.cursors.trained if saved is not None and not epochs else 0
        for inputs, targets in loader:
            steps.append(sampler.indices[at : at + len(inputs)].tolist())
            at += len(inputs)
            ((model(inputs) - targets).square().sum() / 2).backward()
            if sampler.epoch == stop and len(steps) == 1:
                handle.consolidate()
                return [*epochs, steps], chosen, handle.state_dict()
        epochs.append(steps)
        chosen.append(None if sampler.subset is None else (sampler.subset.tolist(), sampler.weights.numpy()))


def flat(steps: list[list[int]]) -> list[int]:
    return [number for step in steps for number in step]


@pytest.mark.parametrize("shards", ["global", "local"])
def test_all_ranks_go_over_their_part_of_one_choice(shards: str) -> None:
    heeler.select(np.eye(8, 4, dtype=np.float32), 4, "norm", labels=np.arange(8) % 2)
    (one, first, _), (two, second, _) = run_ranks(2, trained, shards, None, 7)
    assert [each is None for each in first] == [epoch % EVERY == 0 for epoch in range(7)]
    if shards == "global":
        dataset, model = problem(N)
        expected = heeler.select(gradients(dataset, model), K, "norm", labels=np.arange(N) % 2)
        for epoch in range(7):
            everything = range(N) if epoch % EVERY == 0 else sorted(expected.indices.tolist())
            assert sorted(flat(one[epoch]) + flat(two[epoch])) == list(everything)
        return
    sizes = [len(mine[0]) for mine in (first[1], second[1])]
    by_class = heeler.selection.proportional_parts(K, [size // 2 for size in SIZES for _ in range(2)])
    assert sizes == by_class.reshape(2, 2).sum(1).tolist()
    for own, chosen, size in ((one, first, SIZES[0]), (two, second, SIZES[1])):
        for epoch in range(7):
            everything = list(range(size)) if epoch % EVERY == 0 else chosen[epoch][0]
            assert sorted(flat(own[epoch])) == everything
    assert np.concatenate([first[1][1], second[1][1]]).sum() == pytest.approx(K)


@pytest.mark.parametrize("shards", ["global", "local"])
def test_a_restart_goes_on_exactly(shards: str) -> None:
    heeler.select(np.eye(8, 4, dtype=np.float32), 4, "norm", labels=np.arange(8) % 2)
    whole = run_ranks(2, trained, shards, None, 5)
    begun = run_ranks(2, trained, shards, None, 2)  # in the second epoch over what was chosen
    gone_on = run_ranks(2, trained, shards, begun[0][2], 5)
    for (every, _, _), (first, _, _), (rest, _, _) in zip(whole, begun, gone_on, strict=True):
        joined = [*first[:-1], first[-1] + rest[0], *rest[1:]]
        assert joined == every


def differing(rank: int) -> str:
    dataset, model = problem(N)
    try:
        set_up(dataset, model, subset=heeler.Selector(K), reselect_every=3 + rank)
    except ValueError as error:
        return str(error)
    return "no error"


def test_ranks_must_choose_as_often() -> None:
    for message in run_ranks(2, differing):
        assert "reselect_every" in message
