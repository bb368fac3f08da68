"""Forks of a rank, as loader workers are: they must not destroy the groups of samplers that the rank has dropped."""

import gc
import os
import signal
import time

from tests.distributed.ranks import problem, run_ranks, set_up, walk


def _forked(rank: int) -> int:
    gc.disable()  # until the fork collects
    dataset, model = problem(24)
    sampler, handle, loader = set_up(dataset, model)
    walk(model, sampler, loader, 1)
    handle.detach()
    circle: list[object] = [sampler]
    circle.append(circle)
    del sampler, handle, loader, circle
    child = os.fork()
    if not child:
        gc.collect()
        os._exit(0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return 0
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 1


def test_a_fork_may_collect_a_dropped_sampler() -> None:
    assert run_ranks(2, _forked) == [0, 0]
