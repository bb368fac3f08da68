"""The published picture, small, and the commands around it."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from benchmarks.commands.solver import solver
from benchmarks.solver import bench_solver, gather_sum
from experiments.commands.herding import herding
from experiments.simulation import simulate, unit_vectors

app = typer.Typer()
app.command("herding")(herding)
app.command("solver")(solver)


def test_vectors_are_of_unit_length_and_centred():
    z = unit_vectors(3, 4000, 5).reshape(3, 4000, 5)
    assert np.abs(z.mean(axis=1)).max() < 1e-6
    assert np.linalg.norm(z, axis=2) == pytest.approx(1, abs=0.1)
    assert not np.allclose(z[0], z[1])


def test_the_published_picture():
    seen = []
    names = ["cd-grab", "id-grab", "id-grab-mean", "random", "sweeps", "herd"]
    traces = simulate(names, workers=20, examples=1000, rounds=10, progress=lambda *step: seen.append(step))
    bound = {name: trace.bound for name, trace in traces.items()}
    assert list(bound) == names
    assert all(len(b) == 10 and trace.seconds > 0 for b, trace in zip(bound.values(), traces.values(), strict=True))
    assert seen[0] == ("cd-grab", 1, bound["cd-grab"][0])
    assert len(seen) == 60
    assert bound["cd-grab"][1] < 0.6 * bound["cd-grab"][0]
    assert bound["cd-grab"][-1] <= 2.8
    assert bound["id-grab"][-1] > 3 * bound["cd-grab"][-1]
    assert bound["id-grab-mean"][-1] > 2 * bound["cd-grab"][-1]
    assert bound["random"][-1] > 10 * bound["cd-grab"][-1]
    assert bound["sweeps"][0] < 1.3 * bound["cd-grab"][-1]
    assert bound["herd"][0] < 1.8 * bound["cd-grab"][-1]  # longer prefixes are the price of a quiet end


def test_bad_arguments():
    with pytest.raises(ValueError, match="unknown rules"):
        simulate(["nonsense"])
    with pytest.raises(ValueError, match="at least 1"):
        simulate(workers=0)


SMALL = ["herding", "--workers", "2", "--examples", "20", "--dim", "3", "--rounds", "2", "--rules", "cd-grab, herd"]


def test_json_alone_on_standard_output():
    done = CliRunner().invoke(app, [*SMALL, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert list(result) == ["rules"]
    assert list(result["rules"]) == ["cd-grab", "herd"]
    assert [len(rule["bound"]) for rule in result["rules"].values()] == [2, 2]
    assert all(set(rule) == {"bound", "seconds"} for rule in result["rules"].values())


def test_table_and_picture(tmp_path):
    done = CliRunner().invoke(app, [*SMALL, "--plot", str(tmp_path / "bounds.png")])
    assert done.exit_code == 0, done.output
    assert "cd-grab" in done.stdout
    assert (tmp_path / "bounds.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_rule_is_named():
    done = CliRunner().invoke(app, [*SMALL[:-1], "nonsense"])
    assert done.exit_code == 2
    assert "nonsense" in done.output


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bench_solver(dtype):
    done = CliRunner().invoke(app, ["solver", "--examples", "500", "--dim", "8", "--dtype", dtype, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert {"pass_seconds", "gather_sum_seconds", "ratio", "solve_seconds"} <= set(result)
    assert result["batches_ratio"] == pytest.approx(result["batches_seconds"] / result["gather_sum_seconds"])
    assert result["batches_left"] < 0.2
    assert result["batches_peak_memory_ratio"] >= result["peak_memory_ratio"] >= 1
    assert result["ratio"] == pytest.approx(result["pass_seconds"] / result["gather_sum_seconds"])
    assert CliRunner().invoke(app, ["solver", "--examples", "500", "--dim", "8"]).exit_code == 0


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_floor_reads_every_row_once(dtype):
    table = np.random.default_rng(0).integers(-9, 9, (300, 33)).astype(dtype)
    order = np.random.default_rng(1).permutation(300)
    assert gather_sum(table, order[:200]).tolist() == table[order[:200]].sum(0, np.float32).tolist()


def test_bench_refuses_other_types():
    with pytest.raises(ValueError, match="float16, float32"):
        bench_solver(examples=4, dim=2, dtype="float64")
