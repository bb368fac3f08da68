"""When rounds begin, what an order waits for, and that waiting takes no processor."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from heeler.herding import make_rule
from heeler.ordering.distributed import rounds
from heeler.ordering.distributed.leader import Leader
from heeler.ordering.distributed.rounds import LARGE, Rounds
from heeler.ordering.distributed.store import BoundedStore
from heeler.ordering.distributed.wire import News, _median
from heeler.ordering.partition import deal
from tests.distributed.ranks import gradients, problem, run_ranks, set_up, walk


def test_a_small_table_is_waited_for_in_the_first_epoch_alone() -> None:
    small = Rounds(longest=1000, row_bytes=16, numbers=LARGE - 1, batch_size=4)
    assert small.count == 1
    assert small.due(1, 1000, first=True) == math.inf
    assert small.due(1, 1000, first=False) == 970


def test_an_online_rule_waits_for_every_sketch() -> None:
    online = Rounds(longest=1 << 20, row_bytes=16, numbers=0, batch_size=4)
    assert online.count == rounds.ROUNDS
    assert [online.due(8, 1000, first=first) for first in (True, False)] == [math.inf] * 2
    assert online.due(4, 1000, first=False) == 500


@pytest.mark.parametrize(("steps", "late"), [(5, 0), (6, 1), (50, 8), (98, 16), (200, 16), (390, 16)])
@pytest.mark.parametrize("first", [True, False])
def test_a_large_table_leaves_whole_steps(steps: int, late: int, first: bool) -> None:
    large = Rounds(longest=16 * steps, row_bytes=512, numbers=LARGE, batch_size=16)
    assert large.due(large.count, 16 * steps, first=first) == min(0.97 * 16 * steps, 16 * (steps - late))


def test_long_epochs_leave_three_hundredths() -> None:
    large = Rounds(longest=16_000, row_bytes=512, numbers=LARGE, batch_size=16)
    due = [large.due(number, 16_000, first=True) for number in range(1, large.count + 1)]
    assert due[-1] == 0.97 * 16_000
    np.testing.assert_allclose(np.diff(due), due[0])


EXAMPLES, STEP = 2 * 4 * 40, 4
LATE = 6  # steps, a sixth of 40


def large_walk(rank: int, count: int) -> tuple[list[list[int]], float]:
    rounds.LARGE, rounds.ROUNDS, rounds.LITTLE = 1, count, 0
    dataset, model = problem(EXAMPLES)
    sampler, _, loader = set_up(dataset, model, seed=5, refresh=1)
    orders = walk(model, sampler, loader, 3)
    table = sampler.session.rule.table
    return orders, float(table.seen.mean()) if rank == 0 else 1.0


@pytest.mark.parametrize("count", [1, 5])
def test_the_first_solve_is_of_what_has_arrived(count: int) -> None:
    """The plain twin: a rule that is shown what every rank saw up to the last round."""
    (mine, seen), (theirs, _) = run_ranks(2, large_walk, count)
    dataset, model = problem(EXAMPLES)
    vectors = gradients(dataset, model)
    rule = make_rule("herd", EXAMPLES, vectors.shape[1], seed=5, batch_size=2 * STEP)
    shown = np.concatenate([deal(rule.order, 2, rank, STEP)[: -LATE * STEP] for rank in range(2)])
    rule.observe(shown, vectors[shown])
    assert (~rule.table.seen).sum() == 2 * LATE * STEP
    for epoch in (0, 1):
        assert [mine[epoch], theirs[epoch]] == [deal(rule.order, 2, rank, STEP).tolist() for rank in range(2)]
        rule.next_order()
    assert seen == 1.0  # what came late came with the second epoch
    for epoch in range(3):
        assert sorted(itertools.chain(mine[epoch], theirs[epoch])) == list(range(EXAMPLES))


def test_a_late_row_does_not_replace_a_newer_one() -> None:
    leader = object.__new__(Leader)
    leader.rule, leader._stash = make_rule("herd", 4, 2), None
    nothing, ones = np.empty(0, np.int64), np.ones((2, 2), np.float32)
    newer = News((np.array([0, 1]), 2 * ones), 0, nothing)
    late = News((np.array([1, 2]), np.stack([ones[0], 3 * ones[0]])), 1, nothing)
    leader._feed_all([newer, late])
    np.testing.assert_array_equal(leader.rule.table.sketches([0, 1, 2])[:, 0], [2, 2, 3])
    leader._feed_all([late, newer])
    np.testing.assert_array_equal(leader.rule.table.sketches([0, 1, 2])[:, 0], [2, 2, 3])


def counted(rank: int) -> int:
    """How often this rank asked the store, in six epochs without a fault."""
    calls = 0
    call = BoundedStore.call

    def counting(self: Any, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        return call(self, *args)

    dataset, model = problem(24)
    sampler, _, loader = set_up(dataset, model)
    BoundedStore.call = counting
    walk(model, sampler, loader, 6)
    torch.distributed.barrier()
    return calls


def test_members_wait_without_asking() -> None:
    asked = run_ranks(3, counted)
    assert asked[0] > 0
    assert asked[1:] == [0, 0]


def test_a_median_without_a_package() -> None:
    rng = np.random.default_rng(0)
    for size in range(1, 30):
        sizes = rng.random(size).astype(np.float32)
        assert _median(sizes) == float(np.median(sizes))
