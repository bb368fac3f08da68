"""Kernel thinning against its twin, and against what goodpoints chose with the same random bits."""

import json
from pathlib import Path

import numpy as np
import pytest

import heeler
from experiments.subset_methods import linear, select
from heeler.selection import thinning
from tests.selection import reference

CASES = json.loads((Path(__file__).parent / "goodpoints.json").read_text())["cases"]
KERNELS = {"gaussian": lambda a, b: thinning.gaussian(a, b, 1.0), "linear": linear}


def by_level(seed, n, halvings):
    """(m, n / 2) random bits where `split` looks for them, drawn in the order in which goodpoints takes them: as soon
    as a set of level j has two new points, its pair is decided."""
    rng = np.random.default_rng(seed)
    uniforms = np.empty((halvings, n // 2))
    for seen in range(1, n + 1):
        for j in range(halvings):
            if seen % 2 ** (j + 1):
                break
            for own in range(2**j):
                uniforms[j, own * (n // 2 ** (j + 1)) + seen // 2 ** (j + 1) - 1] = rng.random()
    return uniforms


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['kernel']} {c['n']} {c['halvings']}")
def test_chooses_what_goodpoints_chose(case):
    points = np.random.default_rng(100 + case["seed"]).standard_normal((case["n"], case["dim"]))
    kernel = KERNELS[case["kernel"]]
    sets = thinning.split(points, kernel, by_level(case["seed"], case["n"], case["halvings"]))
    # The first two have left halves for parents only. For right halves goodpoints 0.6.3 keeps the kernel sums over the
    # left half's points (kt.split_X), and its other routine, kt.split_K, has 4^j in the place of 2^j in the threshold.
    assert sets[:2].tolist() == case["sets"][:2]
    given = np.array(case["sets"])
    assert sorted(thinning.swap(points, given, kernel, case["n"])) == sorted(case["swapped"])


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("panel", [2, 5, 128])
def test_equals_its_twin(name, panel, monkeypatch):
    monkeypatch.setattr(thinning, "PANEL", panel)
    rng = np.random.default_rng(3)
    points, uniforms = rng.standard_normal((96, 3)), rng.uniform(size=(4, 48))
    sets = thinning.split(points, KERNELS[name], uniforms)
    gram = KERNELS[name](points, points)
    assert sets.tolist() == reference.kt_split(gram, uniforms)
    assert thinning.swap(points, sets, KERNELS[name], 96).tolist() == reference.kt_swap(gram, sets.tolist())


@pytest.mark.parametrize("method", ["kernel-thin", "kernel-thin-linear"])
@pytest.mark.parametrize("k", [1, 7, 50, 99, 100])
def test_any_k(method, k):
    rows = np.random.default_rng(0).standard_normal((100, 4))
    chosen = select(rows, k, method)
    assert len(set(chosen.indices.tolist())) == k
    assert np.allclose(chosen.weights, 100 / k)


def test_equal_rows_do_no_harm():
    chosen = heeler.select(np.ones((32, 2)), 4, "kernel-thin")
    assert chosen.error < 1e-12
    assert chosen.mmd < 1e-12


def test_too_many_are_refused_with_advice(monkeypatch):
    monkeypatch.setattr(thinning, "LARGEST", 50)
    with pytest.raises(ValueError, match="use method='halve'"):
        heeler.select(np.ones((51, 2)), 4, "kernel-thin")
