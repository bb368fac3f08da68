"""`benchmarks.clock`: its arithmetic on curves whose answers are known, and small runs through real processes."""

import argparse
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.airbench import crop, network
from benchmarks.clock import Results, Runner, orders_of
from benchmarks.clock_data import tasks
from benchmarks.clock_figures import bootstrap, cost, cost_table, median_interval
from benchmarks.race_figures import (
    FLOOR,
    Point,
    complete,
    curve,
    gain_table,
    grid_of,
    loss_at,
    race,
    race_table,
    seconds_to,
    with_costs,
)


def points(*found):
    """(seconds, loss) of one length after the other."""
    return [Point(float(n), seconds, math.log(loss), 0.1) for n, (seconds, loss) in enumerate(found, 1)]


def test_median_and_its_interval():
    found = median_interval([5.0, 1.0, 3.0])
    assert found == (3.0, 1.0, 5.0, pytest.approx(0.75))  # all below or all above the median: 2 · 1/8
    found = median_interval([float(n) for n in range(1, 10)])
    assert found[:3] == (5.0, 2.0, 8.0)
    assert found.confidence == pytest.approx(1 - 2 * (1 + 9) / 2**9)  # at most one head in nine, or at most one tail
    assert median_interval([1.0])[:3] == (1.0, 1.0, 1.0)


def test_the_medians_interval_holds_the_median_as_often_as_it_says():
    import numpy as np

    draws = np.random.default_rng(0).exponential(size=(4000, 9))
    intervals = [median_interval(list(row)) for row in draws]
    held = np.mean([found.low <= math.log(2) <= found.high for found in intervals])
    assert held == pytest.approx(intervals[0].confidence, abs=0.01)


def test_bootstrap():
    assert bootstrap([4, 4, 4], lambda seeds: sum(seeds) / len(seeds)) == (4, 4, 4, 0.95)
    found = bootstrap(list(range(100)), lambda seeds: sum(seeds) / len(seeds))
    error = math.sqrt((100**2 - 1) / 12 / 100)
    assert found.value == 49.5
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert bootstrap([0, 1], lambda seeds: math.inf if seeds[0] else 1.0).high == math.inf


def test_seconds_to_a_loss_are_interpolated_in_its_logarithm():
    three = points((1.0, 1.0), (2.0, 0.1), (4.0, 0.001))
    assert seconds_to(math.log(0.1), three) == pytest.approx(2.0)
    assert seconds_to(math.log(0.01), three) == pytest.approx(3.0)  # half of the two powers of ten from 0.1 to 0.001
    assert seconds_to(math.log(10**-0.5), three) == pytest.approx(1.5)
    assert seconds_to(math.log(2.0), three) == 1.0  # the shortest is there already
    assert seconds_to(math.log(1e-4), three) == math.inf
    assert seconds_to(math.log(0.1), points((1.0, 1.0), (2.0, 0.1), (3.0, 0.5))) == pytest.approx(2.0)  # the first time
    diverged = [Point(1.0, 1.0, math.inf, 0.1), *points((2.0, 0.1))]
    assert seconds_to(math.log(0.2), diverged) == 2.0


def test_loss_at_seconds():
    two = points((1.0, 1.0), (3.0, 0.01))
    assert loss_at(2.0, two) == pytest.approx(math.log(0.1))
    assert loss_at(3.0, two) == pytest.approx(math.log(0.01))
    assert math.isnan(loss_at(3.1, two))


def run(order, seed, epochs, rate, seconds, loss):
    return {
        "task": "t",
        "full": 10,
        "order": order,
        "seed": seed,
        "epochs": epochs,
        "rate": rate,
        "seconds": seconds,
        "loss": loss,
    }


def test_a_race_whose_outcome_is_known():
    """Heeler's loss falls twice as fast by epochs, and an epoch takes 1.2 times as long; seeds differ by a factor."""
    runs = []
    for seed in range(4):
        for epochs in range(4, 14):
            for rate, worse in ((0.1, 2.0), (0.2, 1.0), (0.4, 3.0)):
                runs.append(run("random", seed, epochs, rate, epochs, worse * (1 + seed) * math.exp(-epochs)))
                if epochs <= 10:
                    runs.append(
                        run("heeler", seed, epochs, rate, 1.2 * epochs, worse * (1 + seed) * math.exp(-2 * epochs))
                    )
    found = race(runs, "t", "heeler")
    assert found["seeds"] == 4
    assert found["seconds"][:3] == pytest.approx((0.6, 0.6, 0.6))
    assert found["epochs"] == pytest.approx(0.5)
    assert found["loss"][:3] == pytest.approx((math.exp(-8),) * 3)  # e⁻²⁰ against e⁻¹² of random's 12 s
    assert not found["beyond"]
    assert not found["shortest"]
    assert found["edge"] == []
    assert race(runs, "t", "random")["seconds"].value == pytest.approx(1.0)
    assert "| t | heeler | 4 | 0.600 (0.600 to 0.600) | 0.500 |" in race_table(runs)
    assert complete(grid_of(runs[:-1], "t", "random")) == [0, 1, 2]  # the last seed lacks a run
    only = [each for each in runs if each["rate"] != 0.4]
    assert race(only, "t", "heeler")["edge"] == list(range(4, 11))
    assert "edge of the grid" in race_table(only)


def test_a_curve_takes_each_lengths_best_rate():
    runs = [run("a", 0, 5, 0.1, 1.0, 0.5), run("a", 0, 5, 0.2, 2.0, 0.4), run("a", 0, 6, 0.1, 3.0, 0.1)]
    runs += [run("a", 0, 6, 0.2, 4.0, math.nan), run("a", 0, 7, 0.1, 5.0, 0.0), run("a", 0, 7, 0.2, 5.0, 1.0)]
    found = curve(grid_of(runs, "t", "a"), [0])
    assert [(p.epochs, p.rate, p.seconds) for p in found] == [(5, 0.2, 2.0), (6, 0.1, 3.0), (7, 0.1, 5.0)]
    assert found[-1].log_loss == math.log(FLOOR)


def test_gain_is_the_geometric_mean_over_pairs():
    runs = [run("random", seed, 10, 0.1, 2.0, 1.0 + seed) for seed in range(2)]
    runs += [run("heeler, budget none", seed, 10, 0.1, 3.0, (1.0 + seed) / 4) for seed in range(2)]
    runs += [run("heeler, budget 0.02", seed, 10, 0.1, 2.1, (1.0 + seed) / 2) for seed in range(2)]
    table = gain_table(runs)
    assert "| heeler, budget none | 2 | 0.250 (0.250 to 0.250) | 100% | 1.500 |" in table
    assert "| heeler, budget 0.02 | 2 | 0.500 (0.500 to 0.500) | 50% | 1.050 |" in table


def timed(order, turn, epochs, sketched):
    return {
        "task": "t",
        "order": order,
        "seed": turn,
        "seconds": float(sum(epochs)),
        "epoch_seconds": epochs,
        "sketched": sketched,
        "steps": 10 * len(epochs),
        "steps_per_epoch": 10,
    }


def test_cost_is_of_pairs_of_one_turn():
    runs = [timed("random", 0, [3, 1, 1, 2], [False] * 4), timed("heeler", 0, [5, 4, 2, 3], [True, True, False, False])]
    runs += [timed("random", 1, [6, 2, 2, 2], [False] * 4), timed("heeler", 2, [9] * 4, [True] * 4)]
    found = cost(runs, "t", "heeler")
    assert (found["turns"], found["plain"], found["seconds"]) == (1, 7.0, 14.0)
    assert found["ratios"] == [2.0]
    assert found["unsketched"] == [2.5 / 1.5]  # epochs 3 and 4 of both
    assert cost(runs, "t", "random")["ratios"] == [1.0, 1.0]


def test_seconds_of_a_race_can_come_from_runs_that_were_alone():
    costs = [{**timed(order, 0, [each] * 4, [False] * 4), "epochs": 4} for order, each in (("random", 1), ("a", 2))]
    runs = [run("random", 0, 4, 0.1, 99.0, 1.0), run("a", 0, 2, 0.1, 99.0, 1.0)]
    assert [each["seconds"] for each in with_costs(runs, costs)] == [4.0, 2 + 4]
    with pytest.raises(ValueError, match="no runs of t, b"):
        with_costs([run("b", 0, 2, 0.1, 99.0, 1.0)], costs)


def test_which_orders_there_are():
    known = tasks()
    assert orders_of(known["GPT 2×32"], []) == ["random", "heeler"]
    assert orders_of(known["diabetes, least squares"], ["0.02", "none"]) == [
        *("random", "heeler, budget 0.02", "heeler, budget none"),
    ]
    assert orders_of(known["digits softmax"], []) == ["random", "stratified", "heeler", "heeler, strata"]
    assert sum(task.convex and task.workers == 1 for task in known.values()) == 4


def test_crops_are_cut_from_their_own_image():
    import torch

    images = torch.arange(3.0)[:, None, None, None].expand(3, 3, 36, 36).clone()
    images[:, 0] += 10 * torch.arange(36.0)[:, None]
    torch.manual_seed(0)
    found = crop(images)
    assert found.shape == (3, 3, 32, 32)
    torch.testing.assert_close(found[:, 1], torch.arange(3.0)[:, None, None].expand(3, 32, 32))
    down = (found[:, 0, 0, 0] - torch.arange(3.0)) / 10
    assert set(down.tolist()) <= {0.0, 1.0, 2.0, 3.0, 4.0}
    assert network(torch.randn(10, 3, 32, 32), 8)(torch.randn(2, 3, 32, 32)).shape == (2, 10)


def test_two_tasks_end_to_end(tmp_path):
    """Real processes: a plain one never meets Heeler, and Heeler's has it inside the clock."""
    given = argparse.Namespace(mode="cost", device="cpu", threads=1, jobs=1, data=None, out=tmp_path / "cost.json")
    runner, known, results = Runner(given, tmp_path), tasks(), Results(given)
    first, second = known["digits softmax"], known["tumours, logistic"]
    for task in (first, second):
        runner.prepare(task)
    plan = [
        (task, order, 0, task.rate, 3) for task, order in ((first, "random"), (first, "heeler"), (second, "heeler"))
    ]
    with ThreadPoolExecutor(2) as pool:  # not alone, as runs that count would be
        for found in pool.map(lambda each: runner.run(*each), plan):
            results.add(found)
    for found in results.runs:
        plain = found["order"] == "random"
        assert found["loaded_before_the_clock"] == []
        assert found["heeler_was_imported"] is not plain
        assert found["sketched"] == ([False] * 3 if plain else [True, True, False])
        assert sum(found["epoch_seconds"]) == pytest.approx(found["seconds"], rel=0.05)
        assert 0 < found["loss"] < 1
        assert ("metrics" in found) is not plain
    stored = json.loads(Path(given.out).read_text())
    assert stored["runs"] == results.runs
    assert stored["torch"]
    assert cost_table(stored["runs"]).count("| digits softmax | heeler | 1 |") == 1
