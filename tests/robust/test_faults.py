"""A rank that is killed inside the hook: the others' backward ends with an error, within the group's timeout."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch._dynamo  # DDP imports it: before the ranks fork, or each of them would for seconds
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from heeler import robust
from tests.distributed.ranks import run_ranks


def killed(rank, rule, distances):
    ddp = DistributedDataParallel(nn.Linear(8, 4))
    robust.install(ddp, rule, f=1, distances=distances)
    ddp(torch.ones(2, 8)).sum().backward()
    if rank == 2:
        robust.Aggregator._aggregate = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        ddp(torch.ones(2, 8)).sum().backward()
    return time.monotonic() - started


@pytest.mark.parametrize(("rule", "distances"), [("multi-krum", "sketch"), ("krum", "exact"), ("median", "sketch")])
def test_a_rank_killed_inside_the_hook(rule, distances):
    found = run_ranks(5, killed, rule, distances, lost=(2,), timeout=90.0)
    assert found[2] is None
    assert all(seconds < 61 for seconds in found if seconds is not None)  # run_ranks' groups wait for 60 s
