"""The report names the rank that the others wait for, and nobody where nobody lags."""

import datetime
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from heeler.notices import HeelerWarning
from heeler.stragglers import Report, watch
from tests.distributed.ranks import run_ranks


def train(rank: int, watched, slow: dict[int, float], steps: int, where: str) -> None:
    model, optimizer = watched
    for _ in range(steps):
        if where == "loading":
            time.sleep(slow.get(rank, 0.0))
        x = torch.randn(4, 8)
        loss = model(x).square().mean()
        if where == "loss":
            time.sleep(slow.get(rank, 0.0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def set_up() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def reports(rank: int, runs: list[dict[int, float]], steps: int, folder: str) -> list[tuple[list[int], float, list]]:
    watched = set_up()
    train(rank, watched, {}, 2, "loading")
    found = []
    for run, slow in enumerate(runs):
        seen = watch(*watched)
        dist.barrier()
        started = time.perf_counter()
        train(rank, watched, slow, steps, ("loading", "loss")[run % 2])
        seconds = (time.perf_counter() - started) / steps
        report = seen.report()
        seen.close()
        found.append((report.stragglers, seconds, report.seconds.shape, report.last.tolist()))
        if folder and rank == 0 and run == 0:
            report.picture(Path(folder) / "picture.png")
            assert f"the others wait for rank {next(iter(slow))}" in str(report)
    return found


def test_one_and_two_sleepers_are_named_and_the_whole_step_tells_nothing(tmp_path: Path) -> None:
    runs = [{2: 0.05}, {0: 0.05}, {1: 0.05, 3: 0.06}]
    found = run_ranks(4, reports, runs, 11, str(tmp_path))
    for run, slow in enumerate(runs):
        for rank in range(4):
            named, _, shape, _ = found[rank][run]
            assert set(named) == set(slow)
            assert shape == (4, 10)  # the first step has no step before it
        whole = [found[rank][run][1] for rank in range(4)]
        assert max(whole) < 1.5 * min(whole)  # which is why the whole step is not what is timed
    assert found[0][0][3][2] == 1.0
    assert (tmp_path / "picture.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_sleeper_of_200_ms_is_named_in_100_of_100_runs() -> None:
    drawn = np.random.default_rng(0).integers(0, 4, 100).tolist()
    found = run_ranks(4, reports, [{rank: 0.2} for rank in drawn], 11, "", timeout=900)
    assert all(found[rank][run][0] == [drawn[run]] for rank in range(4) for run in range(100))


def accumulated(rank: int) -> list[int]:
    model, optimizer = set_up()
    seen = watch(model, optimizer)
    for _ in range(11):
        with model.no_sync():
            model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.04 if rank == 1 else 0)  # between the parts of one step
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(4, 8))
    return seen.report().stragglers


def test_accumulation_and_evaluation() -> None:
    assert run_ranks(2, accumulated) == [[1], [1]]


def lost(rank: int) -> float:
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    model = nn.Linear(2, 1)
    seen = watch(model, torch.optim.SGD(model.parameters(), lr=0.1), group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        seen.report()
    return time.monotonic() - started


def test_a_lost_rank_ends_a_report_within_the_groups_timeout() -> None:
    waited = run_ranks(3, lost, lost=(1,))
    assert max(waited[0], waited[2]) < 2 + 3


def of(seconds: list[list[float]]) -> Report:
    return Report(list(range(len(seconds))), np.array(seconds))


def test_numbers_by_hand() -> None:
    report = of([[1] * 8, [2] * 8, [1] * 8, [1] * 7 + [9]])
    assert report.behind.tolist() == [0, 1, 0, 1]
    assert report.waits.tolist() == [1.875, 0.875, 1.875, 0.875]
    assert report.last.tolist() == [0, 0.875, 0, 0.125]
    assert report.stragglers == [1]  # rank 3's one late step may be chance
    assert report.as_numbers()["straggler"] == 1


def test_of_two_ranks_the_quicker_is_the_measure() -> None:
    assert of([[1.0] * 8, [1.5] * 8]).stragglers == [1]


def test_pauses_of_the_machine_do_not_hide_a_straggler() -> None:
    """In a tenth of the steps some rank pauses for a second: 5 times what the slow one is behind."""
    hits = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        seconds = 0.1 + rng.exponential(0.02, (4, 20)) + (rng.random((4, 20)) < 0.025) * rng.exponential(1.0, (4, 20))
        seconds[2] += 0.2
        hits += Report(list(range(4)), seconds).stragglers == [2]
    assert hits >= 97


def test_a_rank_that_is_late_now_and_then_is_named() -> None:
    seconds = np.full((4, 100), 0.1)
    seconds[1, ::5] = 0.5
    assert Report(list(range(4)), seconds).stragglers == [1]


def test_nobody_is_named_for_noise() -> None:
    named = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        named += bool(Report(list(range(4)), 0.1 + rng.exponential(0.02, (4, 50))).stragglers)
    assert named <= 2
    assert "no rank stands out" in str(of([[1.0] * 8, [1.01] * 8]))
    assert of([[1.0] * 8, [1.01] * 8]).as_numbers()["straggler"] == -1


def test_too_few_steps_name_nobody() -> None:
    assert of([[1.0] * 7, [2.0] * 7]).stragglers == []
    empty = Report([0, 1], np.empty((2, 0)))
    assert empty.stragglers == []
    assert "no step was seen" in str(empty)
    assert empty.as_numbers() == {}
    with pytest.raises(ValueError, match="nothing to draw"):
        empty.picture("nowhere.png")


def test_one_process_without_a_group_and_a_model_with_named_outputs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
            return {"out": [self.layer(x)]}

    model = Named()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = watch(model, optimizer)
    for _ in range(300):
        model(torch.ones(1, 2))["out"][0].sum().backward()
        optimizer.step()
    report = seen.report()
    assert report.seconds.shape == (1, 256)
    assert report.stragglers == []
    assert seen.report().steps == 0  # each report is about what came after the last
    seen.close()
    model(torch.ones(1, 2))["out"][0].sum().backward()
    optimizer.step()
    assert seen.report().steps == 0


def test_a_model_whose_outputs_tell_nothing_is_said() -> None:
    model = nn.Linear(2, 1)
    watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.register_forward_hook(lambda *_: "text")
    watch(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(HeelerWarning, match="no tensor with a gradient"):
        model(torch.ones(1, 2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_time_is_the_gpus() -> None:
    """The host queues a step in no time; what the GPU does until the first gradient is what counts."""
    model = nn.Linear(8, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = watch(model, optimizer)
    for _ in range(6):
        torch.cuda._sleep(20_000_000)  # some 10 ms
        model(torch.ones(4, 8, device="cuda")).sum().backward()
        optimizer.step()
    seconds = seen.report().seconds
    assert seconds.shape == (1, 5)
    assert (seconds > 0.005).all()
