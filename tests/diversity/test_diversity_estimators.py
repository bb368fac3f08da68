"""Diversity, bound and noise scale of vectors: hand-made cases, identities, invariances, edges, sampling."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.diversity import (
    Measured,
    batch_size_bound,
    differential_diversity,
    gradient_diversity,
    noise_scale,
    sentence,
)
from heeler.diversity import estimators as module
from heeler.diversity.sketch_error import Layout

seeds = st.integers(0, 2**32 - 1)
SQUARE = (Layout(4, 4, 1 / 4, 1 / 4),)  # independent signs on either side of a weight


def make(seed: int, mean: float = 0.5) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(int(rng.integers(2, 40)), int(rng.integers(1, 20)))) + mean


def test_orthogonal_gradients_have_diversity_one():
    vectors = 3.0 * np.eye(7, 12)
    assert float(gradient_diversity(vectors)) == pytest.approx(1)
    assert float(batch_size_bound(vectors)) == pytest.approx(7)


def test_identical_gradients_have_diversity_one_over_n():
    vectors = np.tile(np.array([1.0, -2.0, 0.5]), (8, 1))
    assert float(gradient_diversity(vectors)) == pytest.approx(1 / 8)
    assert float(batch_size_bound(vectors)) == pytest.approx(1)
    assert float(noise_scale(vectors)) == pytest.approx(0, abs=1e-12)


def test_a_case_by_hand():
    # Σ‖g‖² = 1 + 4 + 1 = 6; Σ g = (1, 2): 5.
    vectors = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    assert float(gradient_diversity(vectors)) == pytest.approx(7 / 5)
    assert float(batch_size_bound(vectors)) == pytest.approx(7)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_noise_scale_is_trace_over_square_and_the_bound_less_one(seed):
    vectors = make(seed)
    mean = vectors.mean(axis=0)
    direct = float(np.sum((vectors - mean) ** 2) / len(vectors) / (mean @ mean))
    scale = noise_scale(vectors)
    assert float(scale) == pytest.approx(direct, rel=1e-9)
    assert float(scale) == pytest.approx(float(batch_size_bound(vectors)) - 1, rel=1e-9, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_the_second_moment_of_a_batch_is_what_the_bound_says(seed):
    """E‖Σ_batch g‖² = b·M²(1 + (b − 1)/B), here for b = 2 over all pairs drawn with replacement."""
    vectors = make(seed)
    pairs = vectors[:, None] + vectors[None]
    second = float(np.mean(np.sum(pairs**2, axis=-1)))
    mean_square = float(np.mean(np.sum(vectors**2, axis=1)))
    assert second == pytest.approx(2 * mean_square * (1 + 1 / float(batch_size_bound(vectors))), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(seeds)
def test_rotation_scale_and_order_do_not_matter(seed):
    vectors = make(seed)
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(vectors.shape[1],) * 2))[0]
    expected = batch_size_bound(vectors)
    for same in (vectors @ rotation, vectors * 1e-3, rng.permutation(vectors)):
        found = batch_size_bound(same)
        for name in ("value", "low", "high"):
            assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(seeds)
def test_the_bound_is_at_least_one_and_lies_in_its_interval(seed):
    vectors = make(seed, mean=2.0)
    dim = vectors.shape[1]
    for sketch in (None, (Layout(1, dim, 0.0, 1 / dim),), (Layout(dim, 1, 1 / dim, 0.0),)):
        found = batch_size_bound(vectors, sketch=sketch)
        assert 1 <= found.low <= found.value * (1 + 1e-12)
        assert found.value <= found.high * (1 + 1e-12)


@pytest.mark.parametrize("kind", ["float16", "float32", "torch16", "torchb16", "torch32"])
def test_types_and_chunks_make_no_difference(kind, monkeypatch):
    rng = np.random.default_rng(0)
    vectors = rng.integers(-8, 9, size=(50, 16)).astype(np.float32)  # exact in every type
    expected = batch_size_bound(vectors, sketch=SQUARE)
    monkeypatch.setattr(module, "_CHUNK", 7 * 16)
    types = {"torch16": torch.float16, "torchb16": torch.bfloat16, "torch32": torch.float32}
    given = torch.from_numpy(vectors).to(types[kind]) if kind in types else vectors.astype(kind)
    found = batch_size_bound(given, sketch=SQUARE)
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))


def test_half_precision_sums_do_not_overflow():
    vectors = np.full((5000, 4), 200, np.float16)
    assert float(batch_size_bound(vectors)) == pytest.approx(1)


def test_the_table_is_read_in_chunks(monkeypatch):
    seen = []
    convert = module.to_floats
    monkeypatch.setattr(module, "_CHUNK", 64)
    monkeypatch.setattr(module, "to_floats", lambda part: seen.append(part.shape) or convert(part))
    batch_size_bound(np.ones((33, 8), np.float16))
    assert seen == [(8, 8)] * 4 + [(1, 8)]


def test_rows_are_chosen_by_mask_or_index():
    vectors = np.random.default_rng(0).normal(size=(20, 5)) + 1
    mask = np.arange(20) % 3 == 0
    expected = float(batch_size_bound(vectors[mask]))
    assert float(batch_size_bound(vectors, rows=mask)) == pytest.approx(expected)
    assert float(batch_size_bound(vectors, rows=np.flatnonzero(mask))) == pytest.approx(expected)
    with pytest.raises(ValueError, match="at least one row"):
        batch_size_bound(vectors, rows=np.zeros(20, bool))


def test_gradients_that_cancel_have_an_infinite_bound():
    half = np.random.default_rng(0).normal(size=(9, 4))
    vectors = np.concatenate([half, -half[::-1]])  # the sum is zero up to rounding
    for measure in (gradient_diversity, batch_size_bound, noise_scale):
        found = measure(vectors)
        assert math.isinf(found.value)
        assert "add up to zero" in found.reason


def test_one_example():
    assert float(gradient_diversity(np.ones((1, 3)))) == 1
    assert float(batch_size_bound(np.ones((1, 16)), sketch=SQUARE)) == 1
    assert float(noise_scale(np.ones((1, 3)))) == 0


def test_gradients_that_are_all_zero_have_no_bound():
    found = batch_size_bound(np.zeros((4, 16), np.float16), sketch=SQUARE)
    assert math.isnan(found.value)
    assert "all gradients are zero" in found.reason
    assert "not known: all gradients are zero" in sentence(found, 8)


@pytest.mark.parametrize(
    ("vectors", "options", "message"),
    [
        (np.ones(3), {}, "one row per example"),
        (np.ones((0, 3)), {}, "one row per example"),
        (np.array([[1.0, np.nan]]), {}, "isfinite"),
        (np.ones((2, 3)), {"sketch": SQUARE}, "vectors of 3 numbers"),
        (np.ones((2, 3)), {"sketch": "dense"}, "layouts_of"),
    ],
)
def test_errors_say_what_to_do(vectors, options, message):
    with pytest.raises(ValueError, match=message):
        batch_size_bound(vectors, **options)


def test_full_gradients_of_the_dataset_have_no_uncertainty():
    found = batch_size_bound(np.random.default_rng(0).normal(size=(30, 4)) + 1)
    assert found.low == pytest.approx(found.value)
    assert found.high == pytest.approx(found.value)


def test_differential_diversity_is_that_of_the_changes():
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=(20, 6)).astype(np.float32), rng.normal(size=(20, 6)).astype(np.float32)
    expected = gradient_diversity(after.astype(np.float64) - before)
    assert float(differential_diversity(before, torch.from_numpy(after))) == pytest.approx(float(expected))
    assert float(differential_diversity(before, before + 1)) == pytest.approx(1 / 20, rel=1e-4)
    assert math.isnan(float(differential_diversity(before, before)))
    with pytest.raises(ValueError, match="same examples"):
        differential_diversity(before, after[:-1])


def test_the_sentence():
    def said(bound, **options):
        return sentence(Measured(bound, bound, bound, "", **options), 64)

    assert said(1045.0) == "at this point batches up to about 210 train as well as single examples; you use 64"
    assert said(1045.0, moving=True).endswith("you use 64 (an upper end: the weights moved while this was measured)")
    assert "any size" in said(math.inf)
    assert said(math.nan, reason="it is late").endswith("not known: it is late")


def test_a_result_reads_well():
    text = str(Measured(210.4, 180, 250, "batch-size bound", moving=True))
    assert text == "210.4 (180 to 250 at 95%, over moving weights): batch-size bound"
