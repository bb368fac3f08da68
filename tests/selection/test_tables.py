"""The page's tables are those of the kept results."""

import json
from pathlib import Path

import pytest

from experiments.subsets import table_of
from heeler.selection import METHODS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "select.md").read_text()


@pytest.mark.parametrize("task", ["digits", "digits-mlp", "hmda"])
def test_training_on_subsets(task):
    kept = json.loads((ROOT / "benchmarks" / "results" / f"subsets-{task}.json").read_text())
    assert kept["setting"]["task"] == task
    assert {record["seed"] for record in kept["records"]} == set(range(kept["setting"]["seeds"]))
    assert kept["setting"]["seeds"] >= 3
    assert table_of(kept["records"]) in PAGE


def test_slopes_and_costs():
    slopes = json.loads((ROOT / "benchmarks" / "results" / "select-slopes.json").read_text())
    for method in ("random", "halve"):
        row = " | ".join(f"{own[method]['error']['slope']:.2f}".replace("-", "−") for own in slopes.values())
        assert f"| `{method}`, error | {row} |" in PAGE
    costs = json.loads((ROOT / "benchmarks" / "results" / "select-1e6.json").read_text())
    for method, row in costs["methods"].items():
        assert f"| `{method}` | {row['seconds']:.1f} s | {row['cpu_seconds']:.1f} s |" in PAGE


def test_every_method_has_its_row():
    for method in METHODS:
        assert f"| `{method}`" in PAGE


def test_others_beside_ours():
    kept = json.loads((ROOT / "benchmarks" / "results" / "select-others.json").read_text())
    for method in ("facility", "match"):
        own = kept[method]["heeler"]
        for name, row in kept[method].items():
            text = f"{row['objective']:,.2f}" if method == "facility" else f"{row['objective']:.5f}"
            ratio = "" if name == "heeler" else f" | {row['cpu_ratio']:.1f}× |"
            label = f"`{method}`" if name == "heeler" else name
            assert f"| {label} | {text} | {row['chosen']} | {row['cpu_seconds']:.2f} s{ratio}" in PAGE
            better = (
                row["objective"] - own["objective"] if method == "facility" else own["objective"] - row["objective"]
            )
            assert better <= 1e-9 * abs(own["objective"])  # equal or worse than ours


def test_choosing_anew():
    kept = json.loads((ROOT / "benchmarks" / "results" / "reselecting.json").read_text())["tasks"]
    for how in kept["digits"]:
        cells = []
        for task in ("digits", "digits-mlp"):
            loss, accuracy = (kept[task][how][name] for name in ("train_loss", "test_accuracy"))
            cells += [f"{loss[0]:.4f} ± {loss[1]:.4f}", f"{100 * accuracy[0]:.1f} ± {100 * accuracy[1]:.1f}"]
        assert " | ".join(cells) in PAGE
