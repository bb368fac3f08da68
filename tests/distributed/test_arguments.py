"""What only some ranks do: an empty shard, a timeout that is none, a consolidation alone; and unequal shards' state."""

import time
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import TensorDataset

import heeler
from tests.distributed.ranks import Heard, problem, run_ranks, set_up, walk


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan"), "10", True, None])
def test_a_timeout_is_a_positive_number(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"exchange_timeout must be a positive, finite number.*got"):
        heeler.Sampler(10, batch_size=2, exchange_timeout=timeout)


def test_an_empty_shard_is_named_on_every_rank() -> None:
    def with_examples(rank: int, sizes: list[int], shards: str) -> str:
        try:
            heeler.Sampler(sizes[rank], batch_size=2, shards=shards, exchange_timeout=2.0)
        except ValueError as error:
            return str(error)
        return "no error"

    for message in run_ranks(3, with_examples, [4, 0, 4], "local", timeout=20):
        assert "rank 1 is empty" in message
    for message in run_ranks(2, with_examples, [4, 0], "global", timeout=20):
        assert "length" in message
        assert "'0'" in message
    for message in run_ranks(2, with_examples, [0, 0], "global", timeout=20):
        assert "empty" in message
    with pytest.raises(ValueError, match="empty"):
        heeler.Sampler(0, batch_size=2, num_replicas=2, rank=1)


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_consolidating_alone_is_said_and_spoils_nothing(alone: int, at_the_end: bool) -> None:
    timeout = 4.0  # longer than a loaded machine takes for an exchange that nothing disturbs

    def sometimes_alone(rank: int) -> tuple[list[str], float, bool, list[int], list[list[int]]]:
        heard = Heard()
        dataset, model = problem(24)
        sampler, handle, loader = set_up(dataset, model, exchange_timeout=timeout)
        orders = walk(model, sampler, loader, 2)
        for step, (inputs, targets) in enumerate(loader):
            if step == 1 and not at_the_end:
                break
            ((model(inputs) - targets).square().sum() / 2).backward()
        started = time.monotonic()
        if rank == alone:
            handle.consolidate()
        seconds = time.monotonic() - started
        if not at_the_end:  # as under DDP, where the others wait in their next step
            dist.barrier()
        orders += walk(model, sampler, loader, 2)
        for inputs, targets in loader:
            ((model(inputs) - targets).square().sum() / 2).backward()
            break
        handle.consolidate()
        state = handle.state_dict()["session"]
        return heard.said, seconds, sampler.session.planner.fault is None, state.get("positions", []), orders

    results = run_ranks(2, sometimes_alone)
    for rank, (said, seconds, fine, _, _) in enumerate(results):
        assert fine, said
        assert seconds < (0.5 if at_the_end else 2.0) * timeout + 3.0
        assert len(said) == (rank == alone)
        assert all("every rank" in message and f"rank {1 - alone} did not" in message for message in said)
    assert results[0][3] == [4, 4]  # and later all of them could
    for mine, theirs in zip(results[0][4], results[1][4], strict=True):
        assert sorted(mine + theirs) == list(range(24))


def test_rank_0_knows_where_each_rank_is() -> None:
    sizes = (24, 9, 14)

    def unequal(rank: int) -> list[Any]:
        whole, model = problem(sizes[rank])
        sampler, handle, loader = set_up(TensorDataset(*whole.tensors), model, shards="local")
        walk(model, sampler, loader, 1)
        states = []
        for step, (inputs, targets) in enumerate(loader):
            ((model(inputs) - targets).square().sum() / 2).backward()
            if step == (3, 1, 2)[rank]:
                handle.consolidate()
                states.append(handle.state_dict()["session"])
            if step == (4, 2, 3)[rank]:
                states.append(handle.state_dict()["session"])
        states.append(handle.state_dict()["session"])
        return [(state.get("positions"), state.get("shard_sizes")) for state in states]

    # Here the ranks are at different steps, but, with one round, in the same stage of the exchange.
    first, *_ = run_ranks(3, unequal)
    assert first[0] == ([16, 8, 12], [24, 9, 14])
    assert first[1] == ([20, -1, -1], [24, 9, 14])  # the others have gone on since
    assert first[2][0] == [24, -1, -1]
