"""Weights from inner products give what the rules on vectors give; the sketch keeps inner products."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler import robust
from heeler.robust.aggregator_settings import Settings
from heeler.robust.exclusions import LONG, Exclusions, far_off, left_out
from heeler.robust.gradient_sketch import GradientSketch
from heeler.robust.gram_weights import TooManyLost, gram_of
from tests.robust.test_rules import problems

RULES = {
    "krum": (lambda v, f: robust.krum(v, f), {}),
    "multi-krum": (lambda v, f: robust.multi_krum(v, f), {}),
    "geometric-median": (lambda v, f: robust.geometric_median(v), {}),
    "centered-clipping": (
        lambda v, f: robust.centered_clipping(v, np.zeros(v.shape[1]), 1.0, 3),
        {"tau": 1.0, "iterations": 3},
    ),
}


@pytest.mark.parametrize("rule", RULES)
@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_weights_give_the_rule(rule, problem):
    v, f, _ = problem
    on_vectors, parameters = RULES[rule]
    weights = robust.weights(rule, v @ v.T, f, **parameters)
    np.testing.assert_allclose(weights @ v, on_vectors(v, f), atol=1e-6)
    if rule != "centered-clipping":
        assert weights.sum() == pytest.approx(1.0)


def test_the_gram_matrix_of_sketches_is_summed_in_one_order():
    v = np.random.default_rng(0).standard_normal((5, 300)).astype(np.float32)
    expected = np.zeros((5, 5))
    for column in v.T.astype(np.float64):
        expected += np.outer(column, column)
    np.testing.assert_array_equal(gram_of(v), expected)


def test_a_vector_that_is_not_finite_has_no_weight():
    v = np.random.default_rng(0).standard_normal((7, 4))
    v[2] = np.nan
    weights = robust.weights("multi-krum", v @ v.T, 2)
    assert weights[2] == 0.0
    np.testing.assert_allclose(np.delete(weights, 2) @ np.delete(v, 2, axis=0), robust.multi_krum(v, 2))
    v[:3] = np.inf
    with np.errstate(invalid="ignore"), pytest.raises(TooManyLost, match="3 of 7 vectors"):
        robust.weights("multi-krum", v @ v.T, 2)


@pytest.mark.parametrize("rule", RULES)
def test_who_is_left_out(rule):
    v = np.random.default_rng(0).standard_normal((9, 40))
    v[4] *= 30
    v[7] = np.nan
    with np.errstate(invalid="ignore"):
        gram = v @ v.T
    chosen = robust.weights(rule, gram, 2, **RULES[rule][1])
    assert np.flatnonzero(left_out(Settings(rule, 2, 0.9, "sketch", RULES[rule][1]), gram, chosen)).tolist() == [4, 7]


def test_who_is_far_off():
    assert far_off(np.array([1.0, 1.2, 0.9, 4.9, np.nan])) == [False, False, False, True, True]


def test_a_rank_that_is_left_out_for_long_is_named_once(caplog):
    exclusions = Exclusions(0, 4)
    for _ in range(LONG - 1):
        exclusions.note([False, False, True, False])
    with pytest.warns(UserWarning, match=r"rank 2 has been left out of the gradient for 100 steps"):
        exclusions.note([False, False, True, False])
    for step in range(2 * LONG):
        exclusions.note([step % 2 == 0, False, True, False])
    assert not caplog.records  # it is not said again
    assert exclusions.now == [2]
    assert exclusions.metrics()["left_out_share_rank_2"] == 1.0
    assert exclusions.metrics()["left_out_share_rank_0"] == pytest.approx(1 / 3)
    quiet = Exclusions(1, 4)
    for _ in range(LONG + 1):
        quiet.note([False, False, True, False])
    assert not caplog.records


# The sketch


def sketch(vector, cuts=(), dim=16, seed=0, row=None):
    sketcher = GradientSketch(vector.numel(), dim, seed)
    sketcher.row = row or sketcher.row
    cells, at = torch.zeros(dim), 0
    for part in vector.tensor_split(list(cuts)):
        at = sketcher.add(cells, part, at)
    return cells


def test_short_gradients_keep_everything():
    x, y = torch.randn(2, 13)
    assert sketch(x, [4, 9]) @ sketch(y, [4, 9]) == pytest.approx(float(x @ y), rel=1e-5)


@pytest.mark.parametrize("d", [100, 5000])
def test_inner_products_are_kept_on_average(d):
    torch.manual_seed(0)
    x, y = torch.randn(2, d)
    y = x + 0.5 * y
    found = np.array([float(sketch(x, [d // 3], seed=s) @ sketch(y, [d // 3], seed=s)) for s in range(120)])
    error = found.std() / np.sqrt(len(found))
    assert abs(found.mean() - float(x @ y)) < 4 * error
    assert found.std() < 2 * float(x.norm() * y.norm()) / np.sqrt(16)


def test_a_sketch_chooses_nearly_whom_the_gradients_choose():
    """n = 25, f = 5, d = 20,000: workers with more and less noise. (Where all are alike, the choice is by chance.)"""
    shared = 0
    for seed in range(12):
        v = (
            torch.randn(25, 20_000, generator=torch.Generator().manual_seed(seed))
            * torch.linspace(0.5, 1.5, 25)[:, None]
        )
        sketches = torch.stack([sketch(row, dim=256, seed=seed) for row in v]).numpy()
        chosen = [robust.weights("multi-krum", g, 5) > 0 for g in (gram_of(sketches), (v @ v.T).numpy())]
        shared += int((chosen[0] & chosen[1]).sum())
    assert shared / (12 * 20) > 0.95  # by chance 0.8
    v[3] *= -3.0
    v[7] *= 1000.0
    spoilt = torch.stack([sketch(row, dim=256) for row in v]).numpy()
    assert not robust.weights("multi-krum", gram_of(spoilt), 5)[[3, 7]].any()


def test_signs_are_used_again_without_meeting_in_a_cell():
    """Rows of one number and four cells: 16 rows share four signs, and then others come."""
    ones = torch.ones(32)
    found = np.array([float(sketch(ones, dim=4, seed=s, row=1).square().sum()) for s in range(150)])
    assert abs(found.mean() - 32.0) < 4 * found.std() / np.sqrt(150)
    apart = torch.zeros(32)
    apart[[0, 4]] = 1.0  # the same sign
    assert sketch(apart, dim=4, row=1).square().sum() == 2.0


@given(st.integers(1, 400), st.integers(0, 399), st.floats(-5, 5), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=40, deadline=None)
def test_a_sketch_is_linear_and_shows_what_is_not_finite(d, place, factor, dtype):
    x = torch.randn(d, generator=torch.Generator().manual_seed(d)).to(dtype)
    torch.testing.assert_close(
        sketch(x.float() * factor + 1), factor * sketch(x.float()) + sketch(torch.ones(d)), atol=1e-3, rtol=1e-4
    )
    for bad in (torch.nan, torch.inf):
        x[place % d] = bad
        assert not torch.isfinite(sketch(x)).all()
