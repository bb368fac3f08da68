"""Errors fall with k as the theory says, and the benchmark and the experiment that report them work."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from benchmarks.select import bench_select, digits_table, mixture, slopes
from experiments.__main__ import app as experiments
from experiments.subsets import endless, parted, table_of


def test_on_a_mixture():
    found = slopes(mixture(4096, 8, "float32", 1)[0], ("random", "halve"), range(2, 7), 3)
    assert -0.8 < found["random"]["error"]["slope"] < -0.35
    assert found["halve"]["error"]["slope"] < -0.85  # 1/k: a random subset has 1/√k
    for k in range(5):
        assert found["halve"]["error"]["values"][k] < found["random"]["error"]["values"][k] / 2
    found = slopes(mixture(1024, 8, "float32", 1)[0], ("random", "kernel-thin"), range(2, 6), 2)
    assert found["kernel-thin"]["mmd"]["slope"] < -0.6
    for k in range(4):
        assert found["kernel-thin"]["mmd"]["values"][k] < found["random"]["mmd"]["values"][k] / 2


def test_on_the_digits_table():
    """There k is below K, so the slope is not yet −1; the errors are below chance all the same."""
    found = slopes(digits_table(epochs=1), ("random", "halve"), range(1, 4), 1)
    assert found["halve"]["error"]["slope"] < -0.6
    assert np.all(np.array(found["halve"]["error"]["values"]) < np.array(found["random"]["error"]["values"]) / 2)


def test_the_benchmark_measures():
    found = bench_select(examples=4096, dim=8, methods=("halve", "match", "facility"))
    for row in found["methods"].values():
        assert row["seconds"] > 0
        assert row["peak_memory_ratio"] >= 1
    assert found["methods"]["halve"]["error"] < found["methods"]["halve"]["random_error"]["mean"]
    words = ["select", "--examples", "512", "--dim", "4", "--methods", "random"]
    assert "one read" in CliRunner().invoke(benchmarks, words).output
    assert CliRunner().invoke(benchmarks, [*words[:-1], "craig"]).exit_code == 2


def test_training_on_subsets(tmp_path):
    words = ["subsets", "digits", "--seeds", "1", "--steps", "30", "--warm-up", "1", "--fractions", "0.1"]
    words += ["--methods", "random,stratified,halve,glister", "--out", str(tmp_path / "found.json")]
    found = CliRunner().invoke(experiments, words)
    assert found.exit_code == 0, found.output
    written = json.loads((tmp_path / "found.json").read_text())
    assert [record["method"] for record in written["records"]] == ["all", "random", "stratified", "halve", "glister"]
    assert all(0.1 < record["test_accuracy"] <= 1 for record in written["records"])
    assert found.stdout.strip() == table_of(written["records"])


def test_the_table_marks_what_beats_stratified():
    records = [
        {"method": method, "fraction": 0.1, "seed": seed, "test_accuracy": value}
        for method, values in {"stratified": (0.8, 0.9), "halve": (0.85, 0.94), "norm": (0.95, 0.8)}.items()
        for seed, value in enumerate(values)
    ]
    lines = table_of(records).splitlines()
    assert lines[3] == "| `halve` | **89.5 ± 6.4** |"
    assert "**" not in lines[2] + lines[4]


def test_parts_of_the_experiment():
    pool, held = parted(100, 0)
    assert sorted([*pool, *held]) == list(range(100))
    assert len(held) == 10
    batches = endless(5, 3, 0)
    seen = np.concatenate([next(batches).numpy() for _ in range(5)])
    assert np.bincount(seen).tolist() == [3] * 5


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_mixture_has_its_type(dtype):
    assert mixture(10, 3, dtype, 0)[0].dtype == dtype
