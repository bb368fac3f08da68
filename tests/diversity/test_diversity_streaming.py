"""The streaming form: equal to the table's, mergeable, resumable, cheap."""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.diversity import StreamingDiversity, batch_size_bound, gradient_diversity
from heeler.diversity.sketching import Layout


def batches(seed=0, count=160, size=2, dim=16, mean=0.3):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(size, dim)) + mean).astype(np.float32) for _ in range(count)]


def feed(stream, parts):
    for part in parts:
        stream.update(part)
    return stream


@pytest.mark.parametrize("sketch", ["kronecker", (Layout(3, 5, 0.0, 0.2), Layout(4, 4, 0.2, 0.25))])
def test_an_epoch_gives_what_the_table_gives(sketch):
    parts = batches()
    stream = feed(StreamingDiversity(16, sketch=sketch), parts)
    table = np.concatenate(parts)
    assert float(stream.diversity()) == pytest.approx(float(gradient_diversity(table, sketch=sketch)))
    expected = batch_size_bound(table, sketch=sketch)
    found = stream.bound()
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))
    assert found.low < found.value < found.high
    merged = feed(StreamingDiversity(16, sketch=sketch), parts[:9]).merge(
        feed(StreamingDiversity(16, sketch=sketch), parts[9:])
    )
    assert merged.bound().high == pytest.approx(expected.high)
    assert float(stream.noise_scale()) == pytest.approx(expected.value - 1)
    assert found.weights == "moving"
    assert StreamingDiversity(16, weights="fixed").bound().weights == "fixed"


def test_large_batches_estimate_the_sketch_error_from_some_rows():
    parts = batches(size=100)
    found = feed(StreamingDiversity(16, sketch="kronecker"), parts).bound()
    expected = batch_size_bound(np.concatenate(parts), sketch="kronecker")
    assert found.value == pytest.approx(expected.value, rel=1e-3)
    assert found.low == pytest.approx(expected.low, rel=0.05)
    assert found.low != expected.low


def test_a_sample_without_decay_gives_what_the_table_gives():
    parts = batches()
    found = feed(StreamingDiversity(16), parts).bound(of="sample")
    expected = batch_size_bound(np.concatenate(parts), of="sample")
    assert found.value == pytest.approx(expected.value)
    # Two jackknives, one by groups and one by examples.
    assert 1 / found.low - 1 / found.high == pytest.approx(1 / expected.low - 1 / expected.high, rel=0.6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from([None, "kronecker"]), st.booleans())
def test_workers_partial_sums_give_the_gathered_result_in_any_grouping(owners, sketch, exponential):
    """Worker j sees batch t if owners say so; all have the same steps' worth of decay, or none."""
    parts = batches(seed=len(owners), count=len(owners))
    half_life = 1e12 if exponential else None
    streams = [StreamingDiversity(16, half_life=half_life, sketch=sketch) for _ in range(4)]
    for owner, part in zip(owners, parts, strict=True):
        streams[owner].update(part)
    left = reduce(lambda a, b: a.merge(b), streams)
    right = streams[0].merge(streams[1]).merge(streams[3].merge(streams[2]))
    gathered = feed(StreamingDiversity(16, half_life=half_life, sketch=sketch), parts)
    for other in (left, right):
        assert other.diversity().value == pytest.approx(gathered.diversity().value)
        assert other.bound(of="dataset").low == pytest.approx(gathered.bound(of="dataset").low)
        assert other.bound(of="sample").value == pytest.approx(gathered.bound(of="sample").value)


def test_merging_in_lockstep_with_decay_weighs_steps_alike():
    first, second = batches(1), batches(2)
    workers = [feed(StreamingDiversity(16, half_life=50), parts) for parts in (first, second)]
    both = [np.concatenate(pair) for pair in zip(first, second, strict=True)]
    gathered = feed(StreamingDiversity(16, half_life=100), both)  # twice the examples a step
    merged = workers[0].merge(workers[1])
    assert merged.bound().value == pytest.approx(gathered.bound().value)


def test_an_exponential_window_follows_and_does_not_count_its_own_noise():
    """B jumps from 2 to 26. A window of about 170 examples has noise of its own, which must not enter."""
    rng = np.random.default_rng(0)
    stream = StreamingDiversity(25, half_life=60)
    feed(stream, (rng.normal(size=(16, 25)) + 1.0 for _ in range(300)))
    assert stream.bound().value == pytest.approx(2, rel=0.2)
    found, naive = [], []
    for _ in range(4000):
        stream.update(rng.normal(size=(16, 25)) + 0.2)
        found.append(1 / stream.bound().value)
        naive.append(1 / stream.bound(of="dataset").value)
    assert np.mean(found[500:]) == pytest.approx(1 / 26, rel=0.07)
    assert np.mean(naive[500:]) > 1.1 / 26


def test_the_intervals_of_exponential_windows_cover():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        found = feed(StreamingDiversity(25, half_life=400), rng.normal(size=(100, 16, 25)) + 0.3).bound()
        covered += found.low <= 1 + 1 / 0.09 <= found.high
    assert 0.90 <= covered / 200 <= 0.995


@pytest.mark.parametrize("half_life", [None, 30.0])
def test_a_saved_state_goes_on_exactly(half_life):
    parts = batches()
    whole = feed(StreamingDiversity(16, half_life=half_life, sketch="kronecker"), parts)
    begun = feed(StreamingDiversity(16, half_life=half_life, sketch="kronecker"), parts[:17])
    state = begun.state_dict()
    assert all(isinstance(value, (np.ndarray, int, float)) for value in state.values())
    begun.update(parts[0])  # the state is a copy
    resumed = StreamingDiversity(16, half_life=half_life, sketch="kronecker")
    resumed.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    feed(resumed, parts[17:])
    assert resumed.bound() == whole.bound()
    assert resumed.bound(of="sample") == whole.bound(of="sample")


def test_misuse_is_refused_and_changes_nothing():
    stream = feed(StreamingDiversity(16), batches())
    before = stream.bound()
    with pytest.raises(ValueError, match=r"\(b, 16\)"):
        stream.update(np.ones((2, 15)))
    with pytest.raises(ValueError, match="same dim and sketch"):
        stream.load_state_dict(StreamingDiversity(9).state_dict())
    with pytest.raises(ValueError, match="can be merged"):
        stream.merge(StreamingDiversity(16, half_life=3))
    with pytest.raises(ValueError, match="half_life"):
        StreamingDiversity(16, half_life=0)
    with pytest.raises(ValueError, match="moving"):
        StreamingDiversity(16, weights="drifting")
    stream.update(np.full((2, 16), np.nan))  # a step that a gradient scaler skips
    assert stream.bound() == before


def test_edges():
    stream = StreamingDiversity(4, sketch="kronecker")
    assert "no batch" in stream.bound().reason
    stream.update(np.zeros((3, 4)))
    assert "all gradients are zero" in stream.bound().reason
    assert "all gradients are zero" in stream.bound(of="sample").reason
    stream.reset()
    stream.update(torch.ones(1, 4))
    assert stream.bound().value == 1
    assert "one example" in stream.bound(of="sample").reason
    stream.update(-np.ones((1, 4), np.float16))
    assert math.isinf(stream.bound().value)
    assert math.isnan(float(StreamingDiversity(4).bound()))


def test_memory_is_a_small_multiple_of_dim():
    state = feed(StreamingDiversity(256, sketch="kronecker"), batches(dim=256)).state_dict()
    assert sum(np.size(value) for value in state.values()) < 20 * 256
