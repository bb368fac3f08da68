"""A run of two ranks that was saved in the middle of an epoch goes on in the orders of one that was not."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import heeler
from heeler.ordering.distributed import rounds
from tests.distributed.ranks import problem, run_ranks, set_up

EXAMPLES = 400  # 50 steps of 4 on each of two ranks; the last eight lie behind the start of a large solve
STEPS = 50
EPOCHS = 3


def train(rank: int, options: dict[str, Any], start: dict[str, Any] | None, stop: int | None) -> tuple[Any, Any]:
    """The indices trained on, step by step, and the state where it stopped."""
    rounds.ROUND_BYTES = 512  # several rounds an epoch
    options = dict(options)
    if options.pop("table", "") == "large":  # a solve leaves the last eight steps to the next epoch
        rounds.LARGE = 1
    dataset, model = problem(EXAMPLES)
    shards = options.get("shards", "global") == "local"
    data = torch.utils.data.Subset(dataset, range(rank, EXAMPLES, 2)) if shards else dataset
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    sampler, handle, loader = set_up(data, wrapped, **options)
    steps = 0
    if start is not None:
        handle.load_state_dict(start["heeler"])
        wrapped.load_state_dict(start["model"])
        steps = start["steps"]
    walked = []
    while steps < EPOCHS * STEPS:
        at = steps % STEPS
        for inputs, targets in loader:
            walked.append(sampler.indices[4 * at : 4 * (at + 1)].tolist())
            optimizer.zero_grad()
            ((wrapped(inputs) - targets).square().sum() / 2).backward()
            optimizer.step()
            at, steps = at + 1, steps + 1
            if steps == stop:
                handle.consolidate()
                return walked, {"heeler": handle.state_dict(), "model": wrapped.state_dict(), "steps": steps}
    return walked, None


RULES = [
    {"order": "herd", "table": "large"},
    {"order": "herd", "shards": "local"},
    {"order": "cd-grab", "shards": "local"},
    {"order": "pair"},  # online, over one dealt order
]


@pytest.mark.parametrize("options", RULES, ids=lambda o: "-".join(o.values()))
def test_resumed_runs_walk_the_orders_of_undisturbed_ones(options: dict[str, Any]) -> None:
    undisturbed = [walked for walked, _ in run_ranks(2, train, options, None, None)]
    # In the first epoch, with its solve under way, in the second, between epochs.
    for stop in (7, STEPS - 2, STEPS + 11, 2 * STEPS) if options == RULES[0] else (STEPS + 11,):
        before = run_ranks(2, train, options, None, stop)
        after = run_ranks(2, train, options, before[0][1], None)
        for rank in range(2):
            assert before[rank][0] + after[rank][0] == undisturbed[rank], (stop, rank)


def test_one_worker_has_nothing_to_bring_together() -> None:
    handle = heeler.attach(nn.Linear(2, 1), heeler.Sampler(8, batch_size=2))
    handle.consolidate()
