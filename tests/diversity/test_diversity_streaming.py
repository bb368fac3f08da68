"""The streaming form: equal to the table's, mergeable, resumable, cheap."""

import math
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.diversity import StreamingDiversity, batch_size_bound, gradient_diversity
from heeler.diversity.sketch_error import Layout

SQUARE = (Layout(4, 4, 1 / 4, 1 / 4),)


def batches(seed=0, count=160, size=2, dim=16, mean=0.3):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(size, dim)) + mean).astype(np.float32) for _ in range(count)]


def feed(stream, parts):
    for part in parts:
        stream.update(part)
    return stream


@pytest.mark.parametrize("sketch", [SQUARE, (Layout(3, 5, 0.0, 0.2), Layout(4, 4, 0.2, 0.25))])
def test_an_epoch_gives_what_the_table_gives(sketch):
    parts = batches()
    stream = feed(StreamingDiversity(16, sketch=sketch), parts)
    table = np.concatenate(parts)
    assert float(stream.measured().diversity) == pytest.approx(float(gradient_diversity(table, sketch=sketch)))
    expected = batch_size_bound(table, sketch=sketch)
    found = stream.measured().bound
    assert (found.value, found.low, found.high) == pytest.approx((expected.value, expected.low, expected.high))
    assert found.low < found.value < found.high
    merged = feed(StreamingDiversity(16, sketch=sketch), parts[:9]).merge(
        feed(StreamingDiversity(16, sketch=sketch), parts[9:])
    )
    assert merged.measured().bound.high == pytest.approx(expected.high)
    assert float(stream.measured().noise_scale) == pytest.approx(expected.value - 1)
    assert found.moving


def test_large_batches_estimate_the_sketch_error_from_some_rows():
    parts = batches(size=100)
    found = feed(StreamingDiversity(16, sketch=SQUARE), parts).measured().bound
    expected = batch_size_bound(np.concatenate(parts), sketch=SQUARE)
    assert found.value == pytest.approx(expected.value, rel=1e-3)
    assert found.low == pytest.approx(expected.low, rel=0.05)
    assert found.low != expected.low


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.sampled_from([None, SQUARE]))
def test_workers_partial_sums_give_the_gathered_result_in_any_grouping(owners, sketch):
    """Worker j sees batch t if owners say so."""
    parts = batches(seed=len(owners), count=len(owners))
    streams = [StreamingDiversity(16, sketch=sketch) for _ in range(4)]
    for owner, part in zip(owners, parts, strict=True):
        streams[owner].update(part)
    left = reduce(lambda a, b: a.merge(b), streams)
    right = streams[0].merge(streams[1]).merge(streams[3].merge(streams[2]))
    gathered = feed(StreamingDiversity(16, sketch=sketch), parts).measured()
    for other in (left.measured(), right.measured()):
        assert other.diversity.value == pytest.approx(gathered.diversity.value)
        assert other.bound.low == pytest.approx(gathered.bound.low)


def test_a_saved_state_goes_on_exactly():
    parts = batches()
    whole = feed(StreamingDiversity(16, sketch=SQUARE), parts)
    begun = feed(StreamingDiversity(16, sketch=SQUARE), parts[:17])
    state = begun.state_dict()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    begun.update(parts[0])  # the state is a copy
    resumed = StreamingDiversity(16, sketch=SQUARE)
    resumed.load_state_dict({name: torch.as_tensor(value) for name, value in state.items()})
    feed(resumed, parts[17:])
    assert resumed.measured() == whole.measured()


def test_misuse_is_refused_and_changes_nothing():
    stream = feed(StreamingDiversity(16), batches())
    before = stream.measured()
    with pytest.raises(ValueError, match=r"\(b, 16\)"):
        stream.update(np.ones((2, 15)))
    with pytest.raises(ValueError, match="same dim and sketch"):
        stream.load_state_dict(StreamingDiversity(9).state_dict())
    with pytest.raises(ValueError, match="can be merged"):
        stream.merge(StreamingDiversity(16, sketch=SQUARE))
    stream.update(np.full((2, 16), np.nan))  # a step that a gradient scaler skips
    assert stream.measured() == before


def test_edges():
    stream = StreamingDiversity(16, sketch=SQUARE)
    assert "no batch" in stream.measured().bound.reason
    stream.update(np.zeros((3, 16)))
    assert "all gradients are zero" in stream.measured().bound.reason
    stream.reset()
    stream.update(torch.ones(1, 16))
    assert stream.measured().bound.value == 1
    stream.update(-np.ones((1, 16), np.float16))
    assert math.isinf(stream.measured().bound.value)


def test_memory_is_a_small_multiple_of_dim():
    state = feed(StreamingDiversity(256, sketch=(Layout(16, 16, 1 / 16, 1 / 16),)), batches(dim=256)).state_dict()
    assert sum(np.size(value) for value in state.values()) < 20 * 256
