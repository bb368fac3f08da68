"""Many workers walk one order: the one that a single process would find."""

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import heeler
from heeler.herding import make_rule
from heeler.ordering.distributed import rounds
from tests.distributed.ranks import Heard, freeze, gradients, problem, run_ranks, set_up, walk

EPOCHS = 5


def global_walk(rank: int, examples: int, order: str) -> list[list[int]]:
    dataset, model = problem(examples)
    sampler, _, loader = set_up(dataset, model, order=order, seed=3)
    return walk(model, sampler, loader, EPOCHS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_n_workers_walk_what_one_would_with_n_times_the_batch(ranks: int) -> None:
    examples = 48 * ranks // ranks
    several = run_ranks(ranks, global_walk, examples, "herd")
    dataset, model = problem(examples)
    sampler, _, loader = set_up(dataset, model, order="herd", seed=3, batch_size=4 * ranks)
    for epoch, alone in enumerate(walk(model, sampler, loader, EPOCHS)):
        steps = range(0, examples // ranks, 4)
        together = [index for step in steps for hand in several for index in hand[epoch][step : step + 4]]
        assert together == alone


@pytest.mark.parametrize("order", ["herd", "pair", "grab", "random", "flipflop"])
def test_every_example_once_an_epoch(order: str) -> None:
    hands = run_ranks(3, global_walk, 47, order)
    for epoch in range(EPOCHS):
        dealt = list(itertools.chain.from_iterable(hand[epoch] for hand in hands))
        assert set(dealt) == set(range(47))
        assert len(dealt) == 48  # one is repeated, so that all have equally many
    assert hands[0][1] != hands[0][0]


def test_online_rules_see_the_epoch_in_the_common_order() -> None:
    hands = run_ranks(2, global_walk, 32, "pair")
    dataset, model = problem(32)
    sampler, _, loader = set_up(dataset, model, order="pair", seed=3, batch_size=8)
    for epoch, alone in enumerate(walk(model, sampler, loader, EPOCHS)):
        together = [i for step in range(0, 16, 4) for hand in hands for i in hand[epoch][step : step + 4]]
        assert together == alone


def accumulating_walk(rank: int, shards: str, loader_batch: int) -> list[list[int]]:
    """Steps of 4 examples per rank, trained on in batches of `loader_batch`."""
    sizes = (24, 24) if shards == "local" else (46,)
    dataset, _, model, _ = shard(rank if shards == "local" else 0, sizes)
    sampler = heeler.Sampler(dataset, batch_size=4, shards=shards, seed=3)
    handle = heeler.attach(model, sampler, reduction="sum")
    loader = torch.utils.data.DataLoader(dataset, batch_size=loader_batch, sampler=sampler)
    orders = walk(model, sampler, loader, EPOCHS)
    assert handle.ignored_passes == 0
    return orders


@pytest.mark.parametrize("shards", ["global", "local"])
def test_a_step_may_be_trained_on_in_several_batches(shards: str) -> None:
    """What the ranks train on between two steps of the optimizer does not depend on the loaders' batches."""
    hands = run_ranks(2, accumulating_walk, shards, 2)
    assert hands == run_ranks(2, accumulating_walk, shards, 4)
    if shards == "global":  # and it is what one rank would take in a step of twice as many, the padded end included
        dataset, model = problem(46)
        sampler, _, loader = set_up(dataset, model, seed=3, batch_size=8)
        for epoch, alone in enumerate(walk(model, sampler, loader, EPOCHS)):
            for step in range(0, 20, 4):
                together = [i for hand in hands for i in hand[epoch][step : step + 4]]
                assert together == alone[2 * step : 2 * step + 8]
            assert [i for hand in hands for i in hand[epoch][20:]] == alone[40:]


# Own shards


def shard(rank: int, sizes: tuple[int, ...]) -> Any:
    whole, model = problem(sum(sizes))
    start = sum(sizes[:rank])
    part = slice(start, start + sizes[rank])
    return TensorDataset(*(tensor[part] for tensor in whole.tensors)), whole, model, start


def local_walk(rank: int, sizes: tuple[int, ...], order: str, round_bytes: int = 1 << 26) -> list[list[int]]:
    rounds.ROUND_BYTES = round_bytes
    own, _, model, _ = shard(rank, sizes)
    sampler, _, loader = set_up(own, model, order=order, shards="local", seed=5)
    assert len(sampler) == sizes[rank]
    return walk(model, sampler, loader, EPOCHS)


def reference(sizes: tuple[int, ...], order: str) -> list[list[list[int]]]:
    """The same rule in one process: epoch, worker, indices."""
    whole, model = problem(sum(sizes))
    vectors = gradients(whole, model)
    rule = make_rule(order, sum(sizes), vectors.shape[1], seed=5, batch_size=4, shard_sizes=sizes)
    bounds = np.cumsum([0, *sizes])
    result = []
    for _ in range(EPOCHS):
        parts = [rule.order[a:b] for a, b in itertools.pairwise(bounds)]
        result.append([(part - a).tolist() for part, a in zip(parts, bounds[:-1], strict=True)])
        for part in parts:
            rule.observe(part, vectors[part])
        rule.next_order()
    return result


@pytest.mark.parametrize("sizes", [(12,), (16, 16), (12, 12, 12), (8, 8, 8, 8), (9, 16, 4)])
def test_cd_grab_is_the_published_rule_rank_by_rank(sizes: tuple[int, ...]) -> None:
    hands = run_ranks(len(sizes), local_walk, sizes, "cd-grab")
    expected = reference(sizes, "cd-grab")
    for epoch in range(EPOCHS):
        assert [hand[epoch] for hand in hands] == expected[epoch]


def test_cd_grab_in_many_small_rounds() -> None:
    sizes = (20, 24)
    hands = run_ranks(2, local_walk, sizes, "cd-grab", 64)
    assert [[hand[epoch] for hand in hands] for epoch in range(EPOCHS)] == reference(sizes, "cd-grab")


@pytest.mark.parametrize("sizes", [(16, 16), (9, 16, 4)])
def test_herd_over_own_shards(sizes: tuple[int, ...]) -> None:
    hands = run_ranks(len(sizes), local_walk, sizes, "herd")
    for rank, size in enumerate(sizes):
        assert all(sorted(epoch) == list(range(size)) for epoch in hands[rank])
    assert [hand[:2] for hand in hands] == [[e[r] for e in reference(sizes, "herd")[:2]] for r in range(len(sizes))]


@pytest.mark.parametrize("order", ["id-grab", "random"])
def test_uncoordinated_workers_do_not_shuffle_alike(order: str) -> None:
    hands = run_ranks(2, local_walk, (16, 16), order)
    for epoch in range(EPOCHS):
        assert hands[0][epoch] != hands[1][epoch]
        assert sorted(hands[0][epoch]) == sorted(hands[1][epoch]) == list(range(16))


# DDP and FSDP2


def wrapped_walk(rank: int, wrapper: str) -> tuple[list[list[int]], float]:
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(60, 8), torch.randn(60, 1))
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sampler = heeler.Sampler(dataset, batch_size=5)
    handle = heeler.attach(model, sampler)
    loader = torch.utils.data.DataLoader(dataset, batch_size=5, sampler=sampler)
    orders = []
    for _ in range(3):
        seen: list[int] = []
        for step, (inputs, targets) in enumerate(loader):
            seen += sampler.indices[len(seen) : len(seen) + len(inputs)].tolist()
            optimizer.zero_grad()
            if wrapper == "ddp" and step % 2:
                with model.no_sync():
                    nn.functional.mse_loss(model(inputs), targets).backward()
                continue
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        orders.append(seen)
    handle.session.drain()
    seen_share = float(sampler.session.rule.table.seen.mean()) if rank == 0 else 1.0
    return orders, seen_share


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_under_the_wrappers(wrapper: str) -> None:
    (one, share), (other, _) = run_ranks(2, wrapped_walk, wrapper)
    assert share == 1.0
    for mine, theirs in zip(one, other, strict=True):
        assert sorted(mine + theirs) == list(range(60))
    assert one[1] != one[0]


def uneven(rank: int) -> list[int]:
    """Shards of different lengths under DDP's join: ranks run out of batches at different times."""
    sizes = (24, 9)
    own, _, model, _ = shard(rank, sizes)
    wrapped = DistributedDataParallel(model)
    sampler, _, loader = set_up(own, wrapped, shards="local")
    lengths = []
    for _ in range(3):
        with wrapped.join():
            for inputs, targets in loader:
                ((wrapped(inputs) - targets).square().sum() / 2).backward()
        lengths.append(sampler.session.progress.drawn)
    return lengths


def test_uneven_numbers_of_batches() -> None:
    assert run_ranks(2, uneven) == [[24] * 3, [9] * 3]


def test_numbers_of_the_exchange() -> None:
    def measured(rank: int) -> dict[str, float]:
        dataset, model = problem(64)
        sampler, handle, loader = set_up(dataset, model)
        walk(model, sampler, loader, 3)
        torch.distributed.barrier()  # both look at the same moment, and not while a round is on its way
        time.sleep(0.5)
        return handle.metrics()

    host, other = run_ranks(2, measured)
    assert other["bytes_sent"] < 3 * 32 * (2 * 4 + 4) + 1000
    # The third epoch has no sketches, so its eight rounds are empty: a header each, and all may be under way.
    assert 0 <= other["bytes_sent"] - host["bytes_received"] <= 8 * 16
    assert {"exchange_seconds", "solve_seconds", "waited_seconds"} <= host.keys()


def mesh_of_four() -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def test_a_subgroup_can_be_named() -> None:
    def grouped(rank: int) -> list[list[int]]:
        dataset, model = problem(32)
        sampler, _, loader = set_up(dataset, model, process_group=mesh_of_four()["dp"])
        assert sampler.num_replicas == 2
        return walk(model, sampler, loader, 3)

    hands = run_ranks(4, grouped)
    for epoch in range(3):
        assert sorted(hands[0][epoch] + hands[2][epoch]) == list(range(32))
        assert sorted(hands[1][epoch] + hands[3][epoch]) == list(range(32))


@pytest.mark.parametrize("shards", ["global", "local"])
def test_ranks_that_hold_parts_of_one_model_see_one_order(shards: str) -> None:
    def parallel(rank: int) -> list[list[int]]:
        dataset, model = problem(32)
        with torch.no_grad():
            model[0].weight += rank % 2  # as tensor-parallel ranks do, they see different gradients
        sampler, _, loader = set_up(dataset, model, process_group=(mesh_of_four(), "dp"), shards=shards)
        assert (sampler.num_replicas, sampler.rank) == (2, rank // 2)
        return walk(model, sampler, loader, 4)

    hands = run_ranks(4, parallel)
    assert hands[0] == hands[1]
    assert hands[2] == hands[3]
    assert hands[0][1] != hands[0][0]
    for epoch in range(4):
        if shards == "global":
            assert sorted(hands[0][epoch] + hands[2][epoch]) == list(range(32))
        else:
            assert sorted(hands[0][epoch]) == sorted(hands[2][epoch]) == list(range(32))


def test_a_mesh_of_several_dimensions_is_refused() -> None:
    def refused(rank: int) -> str:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        try:
            heeler.Sampler(10, batch_size=2, process_group=mesh)
        except ValueError as error:
            return str(error)
        return ""

    assert "(mesh, 'dp')" in run_ranks(1, refused)[0]


def misfiled(rank: int, ranks: int, lost: bool) -> dict[str, Any]:
    """Epochs in which every sketch is stored under another example of its batch; the orders, and when it was sketched.

    lost: rank 1 is frozen in the epoch after which no more would be taken.
    """
    heard = Heard()
    dataset, model = problem(1200)
    sampler, handle, loader = set_up(dataset, model, batch_size=20, refresh=1, exchange_timeout=3.0)
    planner, rng = sampler.session.planner, np.random.default_rng(rank)
    observe = planner.observe
    planner.observe = lambda indices, vectors: observe(rng.permutation(indices), vectors)
    orders, sketched, seen = [], [], []
    for epoch in range(8):
        if epoch == 2 and lost and rank == 1:
            freeze(8.0)
        orders += walk(model, sampler, loader, 1)
        sketched.append(handle.sketcher.sketching)
        if rank == 0:
            seen.append(handle.metrics()["examples_with_sketch"])
        if epoch != 2:
            dist.barrier()
    state = handle.state_dict()
    again = set_up(*problem(1200), batch_size=20, refresh=1, exchange_timeout=3.0)
    shared = [state if rank == 0 else None]
    dist.broadcast_object_list(shared)
    again[1].load_state_dict(shared[0])
    return {
        "orders": orders,
        "sketched": sketched,
        "seen": seen,
        "said": [each for each in heard.said if "by chance" in each],
        "resumed": again[0].session.takes_sketches,
    }


@pytest.mark.parametrize("lost", [False, True])
def test_all_ranks_stop_sketching_in_the_same_epoch(lost: bool) -> None:
    first, second = run_ranks(2, misfiled, 2, lost)
    assert first["sketched"] == second["sketched"]
    assert first["sketched"][:2] == [True, True]  # there is nothing to compare with before the second
    assert not first["sketched"][-1]
    assert first["seen"][-1] == 0.0
    assert [len(first["said"]), len(second["said"])] == [1, 0]
    assert not first["resumed"]
    assert not second["resumed"]
    for mine, theirs in zip(first["orders"], second["orders"], strict=True):
        assert sorted(mine + theirs) == list(range(1200))
