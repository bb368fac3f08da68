"""Many workers whose orders balance nothing: all stop taking sketches in the same epoch, and rank 0 says why."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed.ranks import Heard, compile_rule, run_ranks
from tests.ordering.test_judged_runs import STOPPED, N, Run, drawn

EPOCHS = 7


class Part(Run):
    """One rank's run: `begin` is where its examples begin among those of all, if it has its own."""

    def __init__(self, stays: float, examples: int, begin: int, **options: Any) -> None:
        self.begin = begin
        super().__init__(stays, examples, **options)

    def rows_of(self, epoch: int) -> Any:
        return drawn(self.stays, N, epoch)[self.begin : self.begin + self.examples]


def judged(rank: int, stays: float, shards: str) -> dict[str, Any]:
    heard = Heard()
    sizes = (300, N - 300) if shards == "local" else (N, N)
    run = Part(stays, sizes[rank], 300 * rank if shards == "local" else 0, shards=shards, seed=3)
    orders = run.train(0, EPOCHS)
    run.handle.consolidate()
    result = {"orders": orders, "sketched": run.sketched, "said": heard.said, "metrics": run.handle.metrics()}
    result["gave_up"] = run.sampler.session.planner.gave_up
    return {**result, "verdict": run.handle.verdict, "sketching": run.handle.sketcher.sketching}


def check_all_seen(results: list[dict[str, Any]], shards: str) -> None:
    for epoch in range(EPOCHS):
        lists = [result["orders"][epoch] for result in results]
        if shards == "local":
            assert [sorted(own) for own in lists] == [list(range(300)), list(range(N - 300))]
        else:
            assert sorted(lists[0] + lists[1]) == list(range(N))


@pytest.mark.parametrize("shards", ["global", "local"])
def test_all_ranks_stop_in_the_same_epoch_and_only_rank_0_says_so(shards: str) -> None:
    compile_rule()
    results = run_ranks(2, judged, 0.2, shards)
    first, second = results
    assert first["sketched"] == second["sketched"] == [True] * 3 + [False] * (EPOCHS - 3)
    assert first["gave_up"]
    assert second["gave_up"]
    assert not first["sketching"]
    assert not second["sketching"]
    assert [sum(STOPPED in word for word in result["said"]) for result in results] == [1, 0]
    assert first["verdict"].helps is False
    assert "No more sketches" in first["verdict"].why
    assert second["verdict"] == (None, "rank 0 of the workers knows.")
    assert min(first["metrics"]["realized_steps"], first["metrics"]["realized_prefixes"]) >= 0.9
    assert "realized_steps" not in second["metrics"]
    check_all_seen(results, shards)
    assert len({tuple(order) for order in first["orders"]}) == EPOCHS


@pytest.mark.parametrize("shards", ["global", "local"])
def test_gradients_that_stay_are_balanced_by_all_ranks(shards: str) -> None:
    first, second = results = run_ranks(2, judged, 1.0, shards)
    assert first["sketched"] == second["sketched"] == [True] * EPOCHS
    assert not any(STOPPED in word for result in results for word in result["said"])
    assert first["verdict"].helps is True
    assert second["verdict"].helps is None
    assert first["metrics"]["realized_steps"] < 0.5
    assert first["metrics"]["realized_prefixes"] < 0.2
    check_all_seen(results, shards)


def resumed(rank: int, shards: str) -> list[dict[str, Any]]:
    found = []
    state: dict[str, Any] = {}
    for begin, end in ((0, 4), (4, EPOCHS)):
        heard = Heard()
        sizes = (300, N - 300) if shards == "local" else (N, N)
        run = Part(0.2, sizes[rank], 300 * rank if shards == "local" else 0, shards=shards, seed=3)
        if begin:
            run.handle.load_state_dict(state)
        orders = run.train(begin, end)
        run.handle.consolidate()
        if rank == 0:
            state = run.handle.state_dict()
        state = _from_rank_0(state)
        found.append({"orders": orders, "sketched": run.sketched, "said": heard.said, "verdict": run.handle.verdict})
        run.handle.detach()
    return found


def _from_rank_0(state: dict[str, Any]) -> dict[str, Any]:
    box = [state]
    dist.broadcast_object_list(box, src=0)
    return box[0]


@pytest.mark.parametrize("shards", ["global", "local"])
def test_having_stopped_outlasts_a_restart_of_all_ranks(shards: str) -> None:
    whole, parts = run_ranks(2, judged, 0.2, shards), run_ranks(2, resumed, shards)
    for rank in range(2):
        first, second = parts[rank]
        assert first["orders"] + second["orders"] == whole[rank]["orders"]
        assert first["sketched"] + second["sketched"] == whole[rank]["sketched"]
        assert not any(STOPPED in word for word in second["said"])
        assert second["verdict"] == whole[rank]["verdict"]
    assert sum(STOPPED in word for word in parts[0][0]["said"]) == 1
