"""Rules: their plain twins, what the papers prove of them, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler import robust
from tests.robust import reference

RULES = {
    "krum": (lambda v, f: robust.krum(v, f), reference.krum),
    "multi-krum": (lambda v, f: robust.multi_krum(v, f), reference.multi_krum),
    "multi-krum, m = 2": (lambda v, f: robust.multi_krum(v, f, 2), lambda v, f: reference.multi_krum(v, f, 2)),
    "median": (lambda v, f: robust.median(v), lambda v, f: reference.median(v)),
    "trimmed mean": (lambda v, f: robust.trimmed_mean(v, f), reference.trimmed_mean),
    "geometric median": (lambda v, f: robust.geometric_median(v), lambda v, f: reference.geometric_median(v)),
    "clipping": (
        lambda v, f: robust.centered_clipping(v, v[0] ** 0, 1.5, 3),
        lambda v, f: reference.centered_clipping(v, np.ones(v.shape[1]), 1.5, 3),
    ),
}
EQUIVARIANT = [name for name in RULES if name != "clipping"]  # its centre would have to move as well


@st.composite
def problems(draw, largest_f=3):
    """n > 2f + 2 workers with normal vectors. Krum has two neighbours at least: with one, nearest pairs are tied."""
    f = draw(st.integers(0, largest_f))
    n = draw(st.integers(max(4, 2 * f + 3), 2 * f + 7))
    d = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return rng.standard_normal((n, d)), f, rng


@pytest.mark.parametrize("name", RULES)
@given(problem=problems())
@settings(max_examples=25, deadline=None)
def test_is_its_twin_in_numpy_and_torch(name, problem):
    v, f, _ = problem
    fast, plain = RULES[name]
    expected = plain(v, f)
    np.testing.assert_allclose(fast(v, f), expected, atol=1e-9)
    found = fast(torch.from_numpy(v).float(), f)
    assert isinstance(found, torch.Tensor)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-5)


@pytest.mark.parametrize("name", EQUIVARIANT)
@given(problem=problems())
@settings(max_examples=20, deadline=None)
def test_workers_have_no_order_and_space_no_origin(name, problem):
    v, f, rng = problem
    rule = RULES[name][0]
    expected = rule(v, f)
    np.testing.assert_allclose(rule(v[rng.permutation(len(v))], f), expected, atol=1e-9)
    moved = 100 * rng.standard_normal(v.shape[1])
    np.testing.assert_allclose(rule(v + moved, f), expected + moved, atol=1e-6)


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_is_the_mean_where_all_agree(name):
    v = np.tile(np.arange(4.0), (7, 1))
    np.testing.assert_allclose(RULES[name][0](v, 2), np.arange(4.0), rtol=1e-12)


@given(problem=problems(), huge=st.sampled_from([1.0, 1e3, 1e12, 1e30]))
@settings(max_examples=60, deadline=None)
def test_f_arbitrary_vectors_do_not_break_it(problem, huge):
    v, f, rng = problem
    n = len(v)
    good = v[f:]
    v[:f] = huge * rng.standard_normal((f, v.shape[1])) + huge * rng.standard_normal(v.shape[1])
    low, high = good.min(axis=0) - 1e-9, good.max(axis=0) + 1e-9
    for coordinatewise in (robust.median(v), robust.trimmed_mean(v, f)):
        assert (low <= coordinatewise).all()
        assert (coordinatewise <= high).all()
    # A chosen vector has a score of at most (n − f − 2) diameters², of which at least one distance is to a good one.
    reach = np.sqrt(n - f - 2) * reference.diameter(good) + 1e-9
    for chosen in (robust.krum(v, f), robust.multi_krum(v, f)):
        assert min(np.linalg.norm(chosen - x) for x in good) <= 2 * reach
    # Lemma 24 of Pillutla et al.: within 2 (n − f)/(n − 2f) of the good ones' largest distance from any point.
    near = robust.geometric_median(v, iterations=200)
    radius = max(np.linalg.norm(x - good.mean(axis=0)) for x in good)
    assert np.linalg.norm(near - good.mean(axis=0)) <= 2 * (n - f) / (n - 2 * f) * radius + 1e-6
    # One clipped step moves by at most τ, whoever sends what.
    assert np.linalg.norm(robust.centered_clipping(v, good.mean(axis=0), 0.5) - good.mean(axis=0)) <= 0.5 + 1e-9


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", RULES)
def test_nans_and_infinities_never_reach_the_result(name, bad):
    rng = np.random.default_rng(0)
    v = rng.standard_normal((9, 5))
    v[3, 2], v[6] = bad, bad
    rest = np.delete(v, [3, 6], axis=0)
    fast, plain = RULES[name]
    np.testing.assert_allclose(fast(v, 3), plain(rest, 1), atol=1e-9)  # two of the three bad ones are known
    v[:4] = bad
    with pytest.raises(ValueError, match="5 of 9 vectors have a NaN or an infinity"):
        fast(v, 3)


@pytest.mark.parametrize(
    ("call", "condition"),
    [
        (lambda v: robust.krum(v, 2), r"krum needs n > 2f \+ 2, but n = 6 and f = 2: .* at most f = 1"),
        (lambda v: robust.multi_krum(v, 2), r"multi-krum needs n > 2f \+ 2"),
        (lambda v: robust.multi_krum(v, 1, 6), r"m is 1 to n − f = 5, not 6"),
        (lambda v: robust.trimmed_mean(v, 3), r"trimmed-mean needs n > 2f, but n = 6 and f = 3"),
        (lambda v: robust.krum(v, -1), "f is a number of workers"),
        (lambda v: robust.krum(v, 1.0), "f is a number of workers"),
        (lambda v: robust.centered_clipping(v, v[0], 0.0), "tau is a length above 0"),
        (lambda v: robust.median(v[0]), r"the shape \(n, d\)"),
        (lambda v: robust.median(v.astype(int)), "of floats"),
    ],
)
def test_what_cannot_be_is_refused_with_its_condition(call, condition):
    with pytest.raises(ValueError, match=condition):
        call(np.random.default_rng(0).standard_normal((6, 3)))


def test_other_things_are_refused():
    with pytest.raises(TypeError, match="NumPy array or torch tensor, not a list"):
        robust.median([[1.0]])


def test_many_rows_are_sorted_otherwise():
    v = np.random.default_rng(0).standard_normal((71, 4))
    np.testing.assert_allclose(robust.median(v), np.median(v, axis=0))
    np.testing.assert_allclose(robust.trimmed_mean(v, 7), reference.trimmed_mean(v, 7))
