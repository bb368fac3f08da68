"""Compact files of runs, and the tables made from them."""

import json

import numpy as np
import pytest

from experiments import packed as compact
from experiments import results
from experiments.folder import Folder
from experiments.pairs import quotients
from experiments.plans import comparison, sweep
from experiments.records import Result, carry_out, result_path
from experiments.setup import Run
from experiments.summary import Line

ABOUT = ["--command", "python -m experiments train digits", "--machine", "a machine", "--commit", "abc"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    for run in comparison("digits", ["random", "cd-grab", "herd"], 2, epochs=3):
        carry_out(run, Folder.at(out), out)
    return out


def packed(runs, path, *more):
    assert results.main(["pack", str(runs), "--to", str(path), *ABOUT, *more]) == 0
    return compact.read_source(path)


def test_a_packed_file_gives_the_same_numbers(runs, tmp_path):
    source = packed(runs, tmp_path / "experiments-x.json")
    assert len(source.results) == 6
    assert source.about["machine"] == "a machine"
    result = source.results[0]
    original = json.loads(result_path(runs, result.run).read_text().splitlines()[-2])
    assert result.epochs[-1]["suboptimality"] == pytest.approx(original["suboptimality"], rel=1e-5)


def test_new_runs_join_a_packed_file(runs, tmp_path):
    """Runs that were done again replace those of the file; the others stay."""
    before = packed(runs, tmp_path / "before.json")
    again = tmp_path / "again"
    run = before.results[0].run
    carry_out(run, Folder.at(again), again)
    together = compact.pack([tmp_path / "before.json", again], {})
    assert sorted(Run.from_json(r["run"]).key for r in together["runs"]) == sorted(r.run.key for r in before.results)
    assert together["date"]
    with pytest.raises(ValueError, match="from packed files"):
        compact.pack([tmp_path / "before.json"], {})


def test_pairs_have_the_same_seed(runs, tmp_path):
    found = packed(runs, tmp_path / "x.json").results
    ends = {(r.run.rule, r.run.seed): r.epochs[-1]["train_loss"] for r in found}
    expected = [ends["herd", seed] / ends["random", seed] for seed in (0, 1)]
    assert sorted(quotients(found, "herd", "random", "train_loss")) == pytest.approx(sorted(expected))
    assert quotients(found, "herd", "stratified", "train_loss") == []


def test_fill_replaces_tables_and_nothing_else(runs, tmp_path):
    packed(runs, tmp_path / "experiments-x.json")
    packed(runs, tmp_path / "experiments-t.json", "--extra", "timing")
    names = ("goals", "timing", "digits", "digits@t")
    page = tmp_path / "RESULTS.md"
    page.write_text("before\n" + "".join(f"<!-- table {n} -->\nold\n<!-- end -->\nkept\n" for n in names))
    files = [str(tmp_path / f"experiments-{n}.json") for n in "xt"]
    for _ in range(2):  # filling what is filled changes nothing
        assert results.main(["fill", str(page), *files, "--draw", str(tmp_path / "curves.png")]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- table goals -->\n| task |")
    assert text.count("kept") == 4
    assert "| Heeler |" in text
    assert "`python -m experiments train digits`, a machine, seeds 0, 1" in text
    assert (tmp_path / "curves.png").stat().st_size > 5_000


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    out = tmp_path_factory.mktemp("swept")
    for name, task in (("lr", "digits"), ("passes", "digits-mlp")):
        for run in sweep(name, task, 1, epochs=2):
            carry_out(run, Folder.at(out), out / name)
    return out


def test_sweeps_become_a_row_a_variant_and_a_picture(swept, tmp_path):
    for name in ("lr", "passes"):
        packed(swept / name, tmp_path / f"experiments-sweep-{name}.json", "--extra", "sweep")
    page = tmp_path / "RESULTS.md"
    page.write_text("".join(f"<!-- table sweep:{name} -->\n<!-- end -->\n" for name in ("lr", "passes")))
    files = [str(path) for path in sorted(tmp_path.glob("*.json"))]
    assert results.main(["fill", str(page), *files, "--draw-sweeps", str(tmp_path / "sweeps.png")]) == 0
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    assert [row[1] for row in rows] == [
        *("", "---", "lr=0.25", "lr=1", "lr=4"),
        *("", "---", "1 passes", "2 passes", "5 passes", "10 passes", "30 passes"),
    ]
    assert rows[0][2:] == ["random", "CD-GraB", "Heeler", "Heeler's epochs to random's last |"]
    assert len({row[2] for row in rows[7:]}) == 1, "all pass counts have one random line to compare with"
    assert (tmp_path / "sweeps.png").stat().st_size > 5_000


def test_goals_tell_both_shares_and_both_choices_of_layers(tmp_path):
    for run in comparison("digits", ["random", "herd"], 2, epochs=4):
        carry_out(run, Folder.at(tmp_path), tmp_path)
    for run in comparison("digits", ["herd"], 2, label="herd, all layers", epochs=4, layers="all"):
        carry_out(run, Folder.at(tmp_path), tmp_path)
    source = packed(tmp_path, tmp_path / "experiments-x.json")
    table = results.made_tables([source])["goals"].splitlines()
    assert [row.split(" | ")[0] for row in table[2:]] == [
        "| digits, softmax regression (convex)",
        "| digits, softmax regression (convex), all layers tapped",
    ]
    assert table[2].split(" | ")[4].strip("*") == f"{int(table[2].split(' | ')[3].split()[0]) / 4:.2f}"


def test_a_table_without_runs_is_named(runs, tmp_path):
    source = packed(runs, tmp_path / "experiments-x.json")
    with pytest.raises(ValueError, match="no runs for the table 'hmda'"):
        results.fill("<!-- table hmda -->\n<!-- end -->", [source])


def test_stopped_runs_count_where_all_rules_came_that_far(runs, tmp_path):
    out = tmp_path / "runs"
    out.mkdir()
    for path in runs.glob("*.jsonl"):
        lines = path.read_text().splitlines()
        run = Run.from_json(json.loads(lines[0])["run"])
        if run.rule == "herd" and run.seed == 1:  # stopped in the third epoch, in the middle of a line
            (out / path.name).with_suffix(".part").write_text("\n".join(lines[:4]) + '\n{"kind": "ep')
        else:
            (out / path.name).write_text(path.read_text())
    cut = packed(out, tmp_path / "a.json", "--until", "digits=2")
    assert {(r.run.rule, r.run.seed, len(r.epochs)) for r in cut.results} == {
        (rule, seed, 3) for rule in ("random", "cd-grab", "herd") for seed in (0, 1)
    }
    whole = packed(out, tmp_path / "b.json", "--until", "digits=3")
    assert {r.run.seed for r in whole.results} == {0}, "seed 1 is not whole for every rule"
    assert len(packed(out, tmp_path / "c.json").results) == 5


def test_nothing_to_pack(tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        compact.pack([tmp_path], {})


def test_epochs_with_and_without_sketches_are_timed_apart():
    """Ten seconds an epoch, five more with sketches, and one for the solve at the start of the epoch after those."""
    took = [99, 16, 11, 15, 11, 10, 10, 15]  # the first one warms up; sketches in 1, 2, 4 and 8
    seconds = np.cumsum([0.0, *took]).tolist()

    def line(rule, refresh):
        run = Run(task="digits", rule=rule, refresh=refresh)
        return Line(rule, [Result(run, {}, [{"train_seconds": s} for s in seconds], {})])

    herd = line("herd", None)
    assert herd.seconds_by_kind() == (15, 10)
    assert herd.seconds_of(8) == 15 + sum(took[1:])
    assert herd.seconds_of(16) == herd.seconds_of(8) + 11 + 6 * 10 + 15
    assert line("herd", 1).seconds_by_kind() == (11, 11)  # the median of all
    assert line("random", None).seconds_of(4) == 4 * 11
