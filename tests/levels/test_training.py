"""Orders in two levels through sampler, handle and checkpoints; the table in memory and in a file."""

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import heeler
from heeler.levels import BlockHerd
from heeler.notices import HeelerWarning
from tests.ordering import test_own
from tests.ordering.loops import check_filed, problem

EXAMPLES, BATCH, BLOCK = 203, 8, 48
STEPS = -(-EXAMPLES // BATCH)


def job(table=None, examples: int = EXAMPLES, **options):
    """(dataset, model, optimizer, sampler, handle) in two levels."""
    dataset, model = problem(examples)
    sampler = heeler.Sampler(dataset, batch_size=BATCH, order=heeler.two_levels(BLOCK, table), **options)
    return dataset, model, torch.optim.SGD(model.parameters(), lr=0.02), sampler, heeler.attach(model, sampler)


def train(made, epochs: int, stop: int | None = None, start: tuple[int, int] = (0, 0), **loader_options):
    """Train to the end, or to a step: (epoch, steps, orders of the epochs from the first one on)."""
    dataset, model, optimizer, sampler, _ = made
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, **loader_options)
    first, steps = start
    orders = []
    for epoch in range(first, epochs):
        for inputs, targets in loader:
            if len(orders) == epoch - first:
                orders.append(np.array(sampler.indices))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if steps == stop:
                return steps // STEPS, steps, orders  # a state of after the last batch starts the next epoch
    return epochs, steps, orders


@pytest.mark.parametrize("in_file", [False, True])
def test_every_epoch_has_every_example_once_in_a_new_order(in_file, tmp_path):
    made = job(tmp_path / "table" if in_file else None)
    _, _, orders = train(made, 4)
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(EXAMPLES))
    assert len({order.tobytes() for order in orders}) == 4
    assert made[4].metrics()["examples_with_sketch"] == 1
    assert isinstance(made[3].session.rule, BlockHerd)


def test_sketches_are_filed_right():
    made = job()
    dataset, model, _, sampler, handle = made
    for inputs, targets in DataLoader(dataset, batch_size=BATCH, sampler=sampler):
        nn.functional.mse_loss(model(inputs), targets).backward()
    check_filed(handle, dataset, model)
    loss = nn.MSELoss()
    found = handle.verify(lambda i: loss(model(dataset[i][0][None]), dataset[i][1][None]))
    assert found.filed_right == 1
    assert heeler.diversity.of(handle) is not None
    assert len(heeler.select(handle, 20).indices) == 20


@pytest.fixture(scope="module")
def undisturbed():
    made = job()
    train(made, 4)
    return made


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("stop", [1, 26, 27, 60, 90])
def test_a_run_that_resumes_is_the_run_that_does_not(in_file, stop, undisturbed, tmp_path):
    """In the middle of a stretch, at an epoch's end, in epochs with and without sketches."""
    path = tmp_path / "table" if in_file else None
    killed = job(path)
    place = train(killed, 4, stop)[:2]
    heeler.save(killed[4], tmp_path / "state")
    weights = [p.detach().clone() for p in killed[1].parameters()]
    train(killed, 4, stop + 9, place)  # goes on, and is killed: nothing of that is in the state

    resumed = job(path, seed=0)
    with torch.no_grad():
        for own, saved in zip(resumed[1].parameters(), weights, strict=True):
            own.copy_(saved)
    heeler.load(resumed[4], tmp_path / "state")
    train(resumed, 4, start=place)
    for mine, theirs in zip(resumed[1].parameters(), undisturbed[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert np.array_equal(np.array(resumed[3].indices), np.array(undisturbed[3].indices))


def test_in_a_file_as_in_memory_and_with_a_loader_that_looks_ahead(tmp_path):
    runs = [job(), job(tmp_path / "table"), job()]
    orders = [train(made, 3, **options)[2] for made, options in zip(runs, ({}, {}, {"num_workers": 2}), strict=True)]
    for other in orders[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(orders[0], other, strict=True))


def test_of_a_subset():
    chosen = np.arange(0, EXAMPLES, 2)
    made = job(subset=chosen)
    _, _, orders = train(made, 2)
    for order in orders:
        assert np.array_equal(np.sort(order), chosen)


def test_workers_with_examples_of_their_own(tmp_path):
    """Each has its own table; nobody shuffles alike."""
    orders = []
    for rank in range(2):
        made = job(tmp_path / "table", num_replicas=2, rank=rank, shards="local")
        orders += train(made, 2)[2]
    assert (tmp_path / "table.0").exists()
    assert (tmp_path / "table.1").exists()
    assert len({order.tobytes() for order in orders}) == 4


def test_above_a_size_one_level_warns_and_names_two(monkeypatch):
    monkeypatch.setattr("heeler.ordering.sampler.ONE_LEVEL", 100)
    heeler.Sampler(100, batch_size=4)
    monkeypatch.setattr("heeler.ordering.sampler.ONE_LEVEL", 99)
    with pytest.warns(HeelerWarning, match=r"order=heeler.two_levels\(\)"):
        heeler.Sampler(100, batch_size=4)
    for order in ("random", "pair", heeler.two_levels()):
        heeler.Sampler(100, batch_size=4, order=order)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strata": [0, 1] * 50}, "BlockHerd makes no use"),
        ({"num_replicas": 2, "rank": 0}, "shards='local'"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(ValueError, match=message):
        heeler.Sampler(100, batch_size=4, order=heeler.two_levels(10), **options)


def test_a_block_has_at_least_one_example():
    with pytest.raises(ValueError, match="block_size must be a whole number of at least 1"):
        heeler.two_levels(0)


def test_states_that_do_not_fit(tmp_path):
    made = job()
    train(made, 1, 5)
    state = made[4].state_dict()
    one_level = problem(EXAMPLES)
    plain = heeler.attach(one_level[1], heeler.Sampler(one_level[0], batch_size=BATCH))
    with pytest.raises(ValueError, match=r"rule 'BlockHerd'.*order=heeler.two_levels"):
        plain.load_state_dict(state)
    with pytest.raises(ValueError, match="order='herd'"):
        made[4].load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="in memory, this one's in a file"):
        job(tmp_path / "table")[4].load_state_dict(state)
    with pytest.raises(ValueError, match="cannot grow"):
        heeler.grow(state, EXAMPLES + 1)
    with pytest.raises(ValueError, match="lies in blocks"):
        heeler.select(state, 10)
    torch.save(state, tmp_path / "run.pt")
    made[4].load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True))


def test_a_changed_coverage_forgets_all():
    made = job()
    train(made, 1)
    assert made[4].metrics()["examples_with_sketch"] == 1  # files what the last backward left
    made[3].session.coverage_changed()
    assert made[4].table.share_seen == 0


def killable(folder: Path, epochs: int) -> None:
    """A training script as users write it, with the table in a file."""
    torch.set_num_threads(1)
    dataset, model, optimizer, sampler, handle = job(folder / "table", refresh=1)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    start, steps = 0, 0
    if (folder / "run.pt").exists():
        saved = torch.load(folder / "run.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        handle.load_state_dict(saved["heeler"])
        start, steps = saved["epoch"], saved["steps"]
    for epoch in range(start, epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            steps += 1
            if steps % 5 == 0:
                whole = {"model": model.state_dict(), "epoch": epoch, "steps": steps}
                torch.save({**whole, "heeler": handle.state_dict()}, folder / "run.part")
                os.replace(folder / "run.part", folder / "run.pt")
    result = {"weights": [p.detach() for p in model.parameters()], "order": torch.from_numpy(np.array(sampler.indices))}
    rows = torch.from_numpy(handle.table.sketches(np.arange(EXAMPLES)))
    torch.save({**result, "steps": steps, "rows": rows}, folder / "result.part")
    os.replace(folder / "result.part", folder / "result.pt")


@pytest.mark.filterwarnings("ignore:the table's file:heeler.HeelerWarning")
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_a_run_ends_as_an_undisturbed_one(kills, tmp_path):
    epochs = 3 if kills == 3 else 30
    context = multiprocessing.get_context("fork")
    results = {}
    duration = 0.0
    for name in ("first", "undisturbed", "killed"):  # the first is slower than any later one
        folder = tmp_path / name
        folder.mkdir()
        rng, done = random.Random(0), 0
        while not (folder / "result.pt").exists():
            run = context.Process(target=killable, args=(folder, epochs))
            begun = time.perf_counter()
            run.start()
            if name == "killed" and done < kills:
                run.join(timeout=rng.uniform(0.0, 0.8) * duration / kills)
                if run.is_alive():
                    os.kill(run.pid, signal.SIGKILL)
                    done += 1
            run.join()
            duration = time.perf_counter() - begun if name != "killed" else duration
            assert run.exitcode in (0, -signal.SIGKILL)
        results[name] = torch.load(folder / "result.pt", weights_only=True)
    assert done == kills
    undisturbed, killed = results["undisturbed"], results["killed"]
    assert killed["steps"] == undisturbed["steps"]
    assert torch.equal(killed["order"], undisturbed["order"])
    assert torch.equal(killed["rows"], undisturbed["rows"])
    for mine, theirs in zip(killed["weights"], undisturbed["weights"], strict=True):
        assert torch.equal(mine, theirs)


def test_rows_under_wrong_examples_end_in_a_warning_and_random_orders(caplog):
    test_own.check_gives_up(test_own.Run(permute=True, order=heeler.two_levels(block_size=256)), caplog)
