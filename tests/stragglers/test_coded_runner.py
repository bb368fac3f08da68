"""BCC, and the runner over real ranks: exact whoever answers, and it goes on without those who sleep or die."""

import itertools
import os
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from heeler.stragglers import CodedRunner, assign_bcc
from tests.distributed.ranks import Heard, problem, run_ranks

EXAMPLES = 24
RATE = 2.0**-10
ASSIGNMENTS = {
    "each its own": [0, 1, 2, 3],
    "bcc": assign_bcc(4, 2, seed=3),
    "pairs": [0, 0, 1, 1],
    "six, bcc": assign_bcc(6, 2, seed=1),
    "six, threes": [0, 0, 0, 1, 1, 1],
}


@given(workers=st.integers(1, 40), share=st.floats(0.05, 0.35), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_bcc_covers_every_batch_whatever_the_draw(workers: int, share: float, seed: int) -> None:
    batches = max(1, int(workers * share))
    assignment = assign_bcc(workers, batches, seed)
    assert assignment.shape == (workers,)
    assert set(assignment.tolist()) == set(range(batches))
    assert np.array_equal(assignment, assign_bcc(workers, batches, seed))


def test_bcc_is_uniform_among_the_draws_that_cover() -> None:
    """3 workers, 2 batches: six draws cover both, each as often as the others."""
    drawn = [tuple(assign_bcc(3, 2, seed).tolist()) for seed in range(3000)]
    counts = [drawn.count(draw) for draw in itertools.product(range(2), repeat=3)]
    assert counts[0] == counts[-1] == 0
    assert all(abs(count - 500) < 100 for count in counts[1:-1])  # 4.9 standard deviations


def test_a_single_draw_often_misses_a_batch() -> None:
    """What `assign_bcc` redraws for: 8 workers and 4 batches, 38%."""
    rng = np.random.default_rng(0)
    missed = np.mean([len(np.unique(rng.integers(0, 4, 8))) < 4 for _ in range(4000)])
    assert missed == pytest.approx(0.377, abs=0.03)


def test_bcc_that_cannot_cover_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="cannot cover 5 batches"):
        assign_bcc(4, 5)
    with pytest.raises(ValueError, match="assign them in turn"):
        assign_bcc(40, 40)


def batch_loss(model: nn.Module, batches: int, batch: int) -> torch.Tensor:
    x, y = problem(EXAMPLES)[0].tensors
    rows = slice(batch * EXAMPLES // batches, (batch + 1) * EXAMPLES // batches)
    return (model(x[rows]) - y[rows]).square().sum() / 2


def plainly(batches: int, steps: int) -> list[torch.Tensor]:
    """The twin: one process, batch after batch; the weights after every step."""
    _, model = problem(EXAMPLES)
    states = []
    for _ in range(steps):
        model.zero_grad()
        for batch in range(batches):
            batch_loss(model, batches, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= RATE * p.grad
        states.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    return states


def run(
    rank: int, name: str, steps: int, sleepers: dict[int, float], faults: dict[int, tuple[str, int]], timeout: float
) -> dict[str, Any]:
    heard = Heard()
    _, model = problem(EXAMPLES)
    if rank:
        for p in model.parameters():
            nn.init.zeros_(p)  # workers have the leader's weights or none
    runner = CodedRunner(model, ASSIGNMENTS[name], timeout=timeout)

    def loss_of(batch: int, step: int) -> torch.Tensor:
        if rank in faults and step >= faults[rank][1]:
            os.kill(os.getpid(), signal.SIGKILL if faults[rank][0] == "killed" else signal.SIGSTOP)
        time.sleep(sleepers.get(rank, 0.0))
        return batch_loss(model, runner.batches, batch)

    if rank:
        return {"answered": runner.serve(loss_of)}
    states, gathered = [], []
    error, started = None, time.monotonic()
    try:
        for _ in range(steps):
            gathered.append(runner.gather())
            time.sleep(0.02 if sleepers else 0.0)  # so that sleepers wake up before the run is over
            with torch.no_grad():
                for p in model.parameters():
                    p -= RATE * p.grad
            states.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        runner.close()
    except RuntimeError as raised:
        error = str(raised)
    seconds = time.monotonic() - started
    return {"states": states, "gathered": gathered, "error": error, "seconds": seconds, "said": heard.said}


def check(name: str, result: dict[str, Any], steps: int) -> None:
    expected = plainly(len(set(ASSIGNMENTS[name])), steps)
    assert result["error"] is None
    assert [g.step for g in result["gathered"]] == list(range(steps))
    assert all(torch.equal(found, wanted) for found, wanted in zip(result["states"], expected, strict=True))


@pytest.mark.parametrize("name", ["each its own", "bcc"])
def test_the_sum_is_exact(name: str) -> None:
    results = run_ranks(5, run, name, 12, {}, {}, 30.0)
    check(name, results[0], 12)
    gathered = results[0]["gathered"]
    assert all(len(g.used) == len(set(ASSIGNMENTS[name])) and set(g.used) <= set(g.heard) for g in gathered)
    if name == "each its own":
        assert all(sorted(g.heard) == [1, 2, 3, 4] for g in gathered)
        assert [r["answered"] for r in results[1:]] == [12] * 4


@pytest.mark.parametrize(("name", "sleepers"), [("pairs", [2]), ("six, threes", [1, 2, 4]), ("six, bcc", None)])
def test_sleepers_are_not_waited_for_and_their_late_messages_are_dropped(name: str, sleepers: list[int] | None) -> None:
    assignment = list(ASSIGNMENTS[name])
    if sleepers is None:  # all but one worker of each batch
        sleepers = [w + 1 for w in range(6) if assignment.index(assignment[w]) != w]
    steps, nap = 30, 0.3
    results = run_ranks(len(assignment) + 1, run, name, steps, dict.fromkeys(sleepers, nap), {}, 30.0)
    check(name, results[0], steps)
    gathered = results[0]["gathered"]
    assert np.median([g.seconds for g in gathered]) < nap / 2
    for rank in sleepers:
        assert results[rank]["answered"] < steps
        assert sum(rank in g.used for g in gathered) <= 0.2 * steps
    assert sum(g.late for g in gathered) > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", ["six, bcc", "six, threes"])
def test_sleepers_drawn_at_random(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chosen = (1 + rng.permutation(6)[: 1 + seed % 3]).tolist()
    results = run_ranks(7, run, name, 200, {rank: float(rng.uniform(0.01, 0.2)) for rank in chosen}, {}, 60.0)
    check(name, results[0], 200)
    assert sum(g.late for g in results[0]["gathered"]) > 0


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_dead_worker_is_treated_like_a_late_one(how: str) -> None:
    results = run_ranks(5, run, "pairs", 20, {}, {3: (how, 5)}, 1.5, lost=(3,))
    check("pairs", results[0], 20)
    assert results[0]["seconds"] < 2.0 + 3.0
    said = ["ranks 3 did not answer within 1.5 s and may still be at work"]
    assert results[0]["said"] == (said if how == "frozen" else [])  # a closed connection tells at once


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_dead_worker_that_is_needed_is_named_within_the_timeout(how: str) -> None:
    results = run_ranks(5, run, "each its own", 20, {}, {3: (how, 5)}, 1.5, lost=(1, 2, 3, 4))
    assert len(results[0]["states"]) == 5
    assert "nothing came from ranks 3 " in results[0]["error"]
    assert ("ranks 3 are gone" in results[0]["error"]) == (how == "killed")
    assert results[0]["seconds"] < 2.0 + 3.0


def dying_while_it_sends(rank: int) -> list[list[int]]:
    model = nn.Linear(2_000_000, 1, bias=False)
    runner = CodedRunner(model, [0, 0], timeout=20.0)
    if rank == 0:
        heard = [runner.gather().heard for _ in range(6)]
        runner.close()
        return heard

    def loss_of(batch: int, step: int) -> torch.Tensor:
        if rank == 1 and step >= 2:
            group, half = runner._group, torch.zeros(8_000_008, dtype=torch.uint8)
            dist.isend(half, 0, group=group)  # the message has begun, and its sender is gone
            os.kill(os.getpid(), signal.SIGKILL)
        return model.weight.sum()

    runner.serve(loss_of)
    return []


def test_a_worker_that_dies_while_it_sends() -> None:
    heard = run_ranks(3, dying_while_it_sends, lost=(1,))[0]
    assert len(heard) == 6
    assert heard[3:] == [[2]] * 3


def leaderless(rank: int) -> tuple[str, float]:
    _, model = problem(EXAMPLES)
    runner = CodedRunner(model, [0, 1, 2, 3], timeout=3.0)
    if rank == 0:
        runner.gather()
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        runner.serve(lambda batch, step: batch_loss(model, 4, batch))
    return "ended", time.monotonic() - started


def test_workers_do_not_outlast_their_leader() -> None:
    for ended, seconds in run_ranks(5, leaderless, lost=(0,))[1:]:
        assert ended == "ended"
        assert seconds < 3 + 3


def refusals(rank: int) -> list[str]:
    _, model = problem(EXAMPLES)
    said = []
    for build in (
        lambda: CodedRunner(model, [0, 1, 2]),
        lambda: CodedRunner(model, np.eye(2)),
        lambda: CodedRunner(model, []),
        lambda: CodedRunner(model, [0, 2]),
        lambda: CodedRunner(nn.parallel.DistributedDataParallel(nn.Linear(2, 1)), [0, 0]),
        lambda: CodedRunner(model, [0, 1] if rank != 2 else [1, 0]),
    ):
        with pytest.raises((ValueError, TypeError)) as caught:
            build()
        said.append(str(caught.value))
    runner = CodedRunner(model, [0, 0], timeout=5.0)
    wrong = runner.gather if rank else lambda: runner.serve(lambda batch, step: torch.zeros(()))
    with pytest.raises(RuntimeError) as caught:
        wrong()
    dist.barrier()
    return [*said, str(caught.value)]


def test_what_is_refused() -> None:
    for said in run_ranks(3, refusals):
        assert "3 workers need 4 ranks" in said[0]
        assert "one per worker" in said[1]
        assert "one per worker" in said[2]
        assert "no worker has batch 1" in said[3]
        assert "wrapped in DDP" in said[4]
        assert "rank 2 has another assignment" in said[5]
        assert "rank 0 calls gather()" in said[6]
