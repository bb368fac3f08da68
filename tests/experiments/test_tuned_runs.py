"""A tuned plan from the runner to the table: stages, one file that a kill leaves whole, best against best."""

import json
import math
import os

import pytest

from experiments import packed, rate_tables, results, tuned_tables
from experiments import run as runner
from experiments.records import Result, carry_out, read_results
from experiments.run import Place, run_plan
from experiments.tasks import get_task, settings

PLAN = [
    {
        "task": "digits-mlp",
        "rules": ["random", "herd"],
        "seeds": 2,
        "tune": 1,
        "lrs": [0.1, 0.4],
        "epochs": 3,
        "shorter": [2],
        "schedule": "cosine",
        "ema": 0.9,
    }
]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    """A plan that was carried out: its folder, with runs.bundle in it."""
    out = tmp_path_factory.mktemp("tuned")
    (out / "plan.json").write_text(json.dumps(PLAN))
    arguments = ["--plan", str(out / "plan.json"), "--out", str(out / "runs"), "--data", str(tiny.path)]
    assert runner.main([*arguments, "--bundle", str(out / "runs.bundle")]) == 0
    return out


def test_a_grid_is_followed_by_what_it_leads_to(finished):
    made = {(r.run.name, r.run.lr, r.run.seed, r.run.epochs) for r in read_results(finished / "runs")}
    best = {name: {lr for n, lr, seed, _ in made if n == name and seed == 1} for name in ("random", "herd")}
    assert [len(rates) for rates in best.values()] == [1, 1]
    (random,), (herd,) = best["random"], best["herd"]
    assert made == {
        *((name, lr, 0, 3) for name in ("random", "herd") for lr in (0.1, 0.4)),
        *{("random", random, 1, 3), ("herd", herd, 1, 3), ("herd", herd, 0, 2), ("herd", herd, 1, 2)},
    }


def test_a_bundle_has_every_run_and_bears_a_broken_line(finished, tmp_path):
    path = tmp_path / "cut.bundle"
    path.write_bytes((finished / "runs.bundle").read_bytes() + b'{"run": {"task"')
    found = {r.run.key: r for r in packed.read_bundle(path)}
    originals = read_results(finished / "runs")
    assert found.keys() == {r.run.key for r in originals}
    for original in originals:
        for key in ("train_loss", "test_loss", "test_accuracy", "ema_train_loss", "ema_test_accuracy"):
            assert found[original.run.key].series(key) == pytest.approx(original.series(key), rel=1e-5)
    assert packed.read_all(path)[0].start["versions"]["torch"]


def test_runs_of_a_bundle_are_not_repeated(finished, tiny, tmp_path, capsys):
    copy = tmp_path / "runs.bundle"
    copy.write_bytes((finished / "runs.bundle").read_bytes())
    arguments = ["--plan", str(finished / "plan.json"), "--out", str(tmp_path / "new"), "--data", str(tiny.path)]
    assert runner.main([*arguments, "--bundle", str(copy)]) == 0
    assert not list((tmp_path / "new").glob("*.jsonl"))
    assert "4 finished before" in capsys.readouterr().err


def test_a_packed_file_fills_the_tuned_table(finished, tmp_path):
    target, page = tmp_path / "experiments-15.json", tmp_path / "page.md"
    about = ["--command", "c", "--machine", "m", "--commit", "abc", "--extra", "tuned"]
    assert results.main(["pack", str(finished / "runs.bundle"), "--to", str(target), *about]) == 0
    page.write_text("<!-- table tuned:15:digits-mlp -->\n<!-- end -->\n")
    assert results.main(["fill", str(page), str(target)]) == 0
    text = page.read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == ["| random (D-RR)", "| Heeler"]
    assert sum("average of weights" in cell for cell in rows[0]) == 3
    assert "cosine rate" in text
    assert "rates tried: 0.1, 0.4" in text
    assert tuned_tables.table(packed.read_source(target).results) in text


class Dies(Place):
    """Its first run takes the process with it."""

    def attempt(self, run, say):
        if run.seed == 0:
            os._exit(3)
        super().attempt(run, say)


@pytest.mark.slow
def test_a_process_that_dies_takes_only_its_run_with_it(tiny, tmp_path):
    runs = [settings(get_task("digits"), "random", seed, epochs=1) for seed in range(4)]
    assert run_plan(runs, Dies(tiny.path, tmp_path), jobs=2, say=print) == 1
    assert sorted(r.run.seed for r in read_results(tmp_path)) == [1, 2, 3]


def test_nothing_starts_after_the_deadline(tiny, tmp_path):
    runs = [settings(get_task("digits"), "random", seed, epochs=1) for seed in range(2)]
    assert run_plan(runs, Place(tiny.path, tmp_path), minutes=1e-9, say=print) == 2


# The table's numbers


def made(rule, lr, seed, epochs, train, test, accuracy=0.5):
    run = settings(get_task("digits-mlp"), rule, seed, lr=lr, epochs=epochs, schedule="cosine")
    start = {"train_loss": 9.0, "test_loss": 9.0, "test_accuracy": 0.1}
    end = {"train_loss": train, "test_loss": test, "test_accuracy": accuracy}
    return Result(run, {"examples": 4}, [start, end], {"diverged": not math.isfinite(train)})


def cells(results):
    lines = [line[2:-2].split(" | ") for line in tuned_tables.table(results).splitlines()]
    head = lines[0]
    rules = {"random (D-RR)": "random", "Heeler": "herd"}
    return {rules[line[0]]: dict(zip(head, line, strict=True)) for line in lines[2:]}


def test_each_rule_is_shown_at_its_own_best_rate():
    results = [made("random", lr, s, 8, 2.0 + s + (lr != 0.2), 3.0) for lr in (0.1, 0.2, 0.4) for s in (0, 1)]
    results += [made("herd", 0.1, s, 8, math.inf if s else 0.1, 0.1) for s in (0, 1)]
    results += [made("herd", lr, s, 8, 1.0 + s, 2.0, 0.75) for lr in (0.4,) for s in (0, 1)]
    results += [made("herd", 0.4, s, 4, 4.0 + s, 4.0) for s in (0, 1)]
    table = cells(results)
    assert table["random"]["rate"] == "0.2"
    assert table["herd"]["rate"] == "0.4*", "0.1 diverged with a seed; 0.4 is the end of the grid"
    assert table["random"]["training loss"] == "2.5000 ± 0.7"
    assert table["herd"]["training loss"] == "1.5000 ± 0.7"
    assert table["herd"]["less random's"] == "−1 ± 0"
    assert table["herd"]["test accuracy"] == "75.00 ± 0.00%"
    share = (4 + 4 * math.log(4.5 / 2.5) / math.log(4.5 / 1.5)) / 8
    assert table["herd"]["epochs to random's last ÷ random's: training"] == f"{share:.2f}"
    assert table["herd"]["test"] == f"{(4 + 4 * math.log(4 / 3) / math.log(4 / 2)) / 8:.2f}"


def test_all_rates_and_lengths_of_an_uneven_grid_are_shown():
    runs = [made("random", 0.2, s, 8, 2.0 + s, 3.0) for s in (0, 1)] + [made("random", 0.4, 0, 8, 1.0, 3.0)]
    runs += [made("herd", 0.2, s, 4, 1.5, 3.0, 0.75) for s in (0, 1)]
    assert rate_tables.table(runs).splitlines() == [
        "| order | rate 0.2 | rate 0.4 | rate 0.2, 4 epochs |",
        "| --- | ---: | ---: | ---: |",
        "| random (D-RR) | 2.5000 ± 0.7 / 50.00 ± 0.00% (2) | 1.0000 / 50.00% (1) |  |",
        "| Heeler |  |  | 1.5000 ± 0 / 75.00 ± 0.00% (2) |",
    ]


def test_at_a_constant_rate_the_curve_tells_the_epochs():
    def curve(rule, losses):
        run = settings(get_task("digits-mlp"), rule, epochs=4)
        records = [{"train_loss": loss, "test_loss": loss, "test_accuracy": 0.5} for loss in losses]
        return Result(run, {"examples": 4}, records, {"diverged": False})

    table = cells([curve("random", [16, 8, 4, 2, 1]), curve("herd", [16, 2, 0.5, 0.4, 0.3])])
    assert table["herd"]["epochs to random's last ÷ random's: training"] == "0.38"  # 1.5 of 4


def test_problems_that_differ_in_more_than_the_order_have_tables_of_their_own(tiny, tmp_path):
    runs = [settings(get_task("digits-mlp"), rule, epochs=1) for rule in ("random", "herd")]
    runs += [run.but(schedule="cosine") for run in runs]
    found = tuned_tables.problems([carry_out(run, tiny, tmp_path) for run in runs])
    assert {name: len(results) for name, results in found.items()} == {
        "digits-mlp-schedule=constant": 2,
        "digits-mlp-schedule=cosine": 2,
    }
