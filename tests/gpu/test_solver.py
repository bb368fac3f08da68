"""Orders found on a GPU: on the CPU by the plain twin of the kernel, and where there is a GPU by the kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import heeler
from heeler.gpu import solver
from heeler.gpu.exchange import FIRST, FIXED, SECOND, exchange, exchange_plain, load_kernel
from heeler.gpu.solver import GpuSolver, gpu_seconds, order_on_device, widths
from heeler.herding.batches import solve_batches
from heeler.herding.realized import realized_balance
from heeler.herding.rules.herd import Herd

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = [CPU, pytest.param(torch.device("cuda"), marks=needs_gpu)]


@pytest.fixture
def small_windows(monkeypatch):
    """The twin goes through a window example by example."""
    monkeypatch.setattr(solver, "WINDOW", 8)


def vectors(examples, dim, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((examples, dim)) / np.sqrt(1 + np.arange(dim)) + 0.5).astype(np.float16)


def balance(rows, order, batch_size, seen=None):
    seen = np.ones(len(rows), bool) if seen is None else seen
    return realized_balance(rows, order, batch_size=batch_size, shards=np.array([0, len(rows)]), seen=seen)


def pairs(count, half, dim, seed=0):
    """Windows, D of each pair, and kinds of which some are fixed."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 2 * half, dim, generator=draw)
    gap = 8 * torch.randn(count, dim, generator=draw)
    kinds = (torch.arange(2 * half) >= half).int().repeat(count, 1)
    kinds[torch.rand(kinds.shape, generator=draw) < 0.2] = FIXED
    return x, gap, kinds


def test_exchanges_shorten_the_prefix_and_leave_fixed_places_alone():
    x, gap, kinds = pairs(12, 8, 4)
    found = exchange_plain(x @ x.mT, (x * gap[:, None]).sum(2), kinds)
    place = torch.arange(16)
    assert (found.sort(1).values == place).all()
    assert (found == place)[kinds == FIXED].all()
    moved = found != place
    assert (place.expand_as(found)[moved] < 8).eq(found[moved] >= 8).all()  # from the other window
    left = gap / 2 - ((x - x.gather(1, found[..., None].expand_as(x))) * (place < 8)[:, None]).sum(1)
    assert (left.norm(dim=1) < gap.norm(dim=1) / 2).all()
    for i in range(12):  # no single exchange is left that would shorten it
        now = x[i][found[i]]
        for a in torch.where(kinds[i] == FIRST)[0]:
            for b in torch.where(kinds[i] == SECOND)[0]:
                assert (left[i] - now[a] + now[b]).norm() > left[i].norm() - 1e-3


@settings(max_examples=30, deadline=None)
@given(examples=st.integers(1, 90), batch_size=st.integers(1, 40), seed=st.integers(0, 99), share=st.floats(0, 1))
def test_every_example_comes_once_and_the_balance_is_that_of_the_order(examples, batch_size, seed, share):
    rows = vectors(examples, 6, seed)
    seen = np.random.default_rng(seed).random(examples) < share
    options = {"batch_size": batch_size, "seed": seed, "device": CPU, "seen": seen}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(solver, "WINDOW", 4)
        found, again = order_on_device(rows, **options), order_on_device(rows, **options)
    assert sorted(found.order) == list(range(examples))
    assert np.array_equal(found.order, again.order)
    steps, prefixes = balance(rows, found.order, batch_size, seen)
    if found.bound_random > 1e-3:  # else there is nothing to balance
        assert found.unbalanced == pytest.approx(steps, rel=1e-3, abs=1e-5)
        assert found.bound_after / found.bound_random == pytest.approx(prefixes**0.5, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_orders_are_about_as_balanced_as_those_of_the_cpu(device):
    rows = vectors(1200, 16)
    there = balance(rows, order_on_device(rows, batch_size=16, seed=0, device=device).order, 16)
    here = balance(rows, solve_batches(rows, batch_size=16, seed=0).order, 16)
    assert there.steps < 1.2 * here.steps < 0.5
    assert there.prefixes < 2 * here.prefixes < 0.1


def test_another_seed_gives_another_order(small_windows):
    rows = vectors(200, 8)
    first, second = (order_on_device(rows, batch_size=8, seed=seed, device=CPU).order for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_a_large_mean_is_no_drift(small_windows):
    rows = (vectors(400, 8).astype(np.float32) + 30).astype(np.float16)
    steps, prefixes = balance(rows, order_on_device(rows, batch_size=8, seed=0, device=CPU).order, 8)
    assert steps < 0.3
    assert prefixes < 0.1


def test_rows_count_by_their_weights(small_windows):
    rows, weights = vectors(300, 8), np.where(np.arange(300) % 2, 1.0, 0.0).astype(np.float32)
    order = order_on_device(rows, batch_size=8, seed=0, device=CPU, weights=weights).order
    weighed = balance((rows * weights[:, None]).astype(np.float16), order, 8)
    assert weighed.prefixes < 0.1 < balance(rows, order, 8).prefixes


def test_steps_hold_about_their_share_of_each_stratum(small_windows):
    strata = np.random.default_rng(0).integers(0, 4, 400)
    order = order_on_device(vectors(400, 8), batch_size=16, seed=0, device=CPU, strata=strata).order
    held = np.stack([np.bincount(strata[step], minlength=4) for step in order.reshape(-1, 16)])
    random = np.stack([np.bincount(strata[step], minlength=4) for step in np.arange(400).reshape(-1, 16)])
    assert held.var(0).mean() < 0.5 * random.var(0).mean()


def test_unseen_examples_come_in_the_first_half(small_windows):
    seen = np.random.default_rng(0).random(200) > 0.2
    order = order_on_device(vectors(200, 8), batch_size=8, seed=0, device=CPU, seen=seen).order
    assert not (~seen[order])[100:].any()


def test_prefixes_are_running_sums():
    for steps in (1, 63, 64, 65, 5000):
        sums = torch.from_numpy(np.random.default_rng(steps).standard_normal((steps, 3)))
        torch.testing.assert_close(solver._prefixes(sums), sums.cumsum(0))


def test_many_windows_side_by_side_come_before_single_ones():
    assert widths(10_000, 100, 100, 256) == [50, 25, 12, 6, 3] + [1] * 32
    assert widths(100_000, 100, 100, 40) == [40, 20, 10, 5, 2] + [1] * 32
    assert widths(128, 1, 2, 256) == [1, 1]
    assert gpu_seconds(1_000_000, 256, 64) > gpu_seconds(10_000, 256, 64) > 0


def test_herd_asks_the_gpu_first_and_does_without_it(small_windows):
    rows = vectors(200, 8).astype(np.float32)
    asked = []

    def solve(table, **options):
        asked.append(table.shape)
        return order_on_device(table, device=CPU, **options) if len(asked) == 1 else None

    orders = []
    for solves in (solve, solve, None):
        rule = Herd(200, 8, batch_size=8)
        rule.gpu_solver = solves
        rule.observe(np.arange(200), rows)
        orders.append(rule.next_order())
    assert asked == [(200, 8), (200, 8)]
    assert not np.array_equal(orders[0], orders[2])
    assert np.array_equal(orders[1], orders[2])


def test_a_fault_on_the_gpu_is_said_and_costs_no_order(monkeypatch):
    asked = GpuSolver(CPU)
    monkeypatch.setattr(asked, "_fits", lambda *shape: True)
    monkeypatch.setattr(solver, "_exchange_tree", lambda *a: 1 / 0)
    with pytest.warns(heeler.HeelerWarning, match="found on the CPU"):
        assert asked(vectors(40, 4), batch_size=4, seed=0) is None


@needs_gpu
def test_the_kernel_does_what_its_plain_twin_does():
    load_kernel()
    for dim in (3, 64):
        x, gap, kinds = pairs(40, 64, dim)
        given = x @ x.mT, (x * gap[:, None]).sum(2), kinds
        assert torch.equal(exchange(*(t.cuda() for t in given)).cpu(), exchange_plain(*given))


@needs_gpu
def test_a_run_finds_its_orders_on_the_gpu(monkeypatch):
    monkeypatch.setattr(solver, "WORTH_SECONDS", 0.0)
    model = torch.nn.Linear(16, 4).cuda()
    x, y = torch.randn(512, 16), torch.randint(4, (512,))
    data = torch.utils.data.TensorDataset(x, y)
    sampler = heeler.Sampler(data, batch_size=16, budget=None)
    handle = heeler.attach(model, sampler)
    for _ in range(3):
        for inputs, labels in torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler):
            torch.nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda()).backward()
            model.zero_grad()
    assert handle.metrics()["herding_bound"] < 0.5 * handle.metrics()["herding_bound_random"]
    assert handle.metrics()["solve_sweeps"] == 0  # the loops in C sweep
