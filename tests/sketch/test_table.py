"""The table and the courier."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.sketch import Courier, SketchTable
from heeler.sketch.courier import PARCEL


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_newest_row_of_every_example_is_kept(data: st.DataObject) -> None:
    """Against a dictionary; sizes over forty powers of ten, non-finite rows, repeated indices."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    level = 10.0 ** data.draw(st.integers(-20, 20))
    table, truth, dropped = SketchTable(7, 3), {}, 0
    for _ in range(data.draw(st.integers(1, 6))):
        where = rng.integers(0, 7, size=4)
        rows = (rng.normal(size=(4, 3)) * level).astype(np.float32)
        if rng.random() < 0.3:
            rows[rng.integers(4), rng.integers(3)] = rng.choice([np.nan, np.inf, -np.inf])
        table.put(where, torch.from_numpy(rows) if rng.random() < 0.5 else rows)
        for i, row in zip(where, rows, strict=True):
            if np.isfinite(row).all():
                truth[i] = row
            else:
                dropped += 1
    table.flush()
    assert table.dropped == dropped
    assert set(np.flatnonzero(table.seen)) == set(truth)
    assert np.isfinite(table.rows).all()
    for i, row in truth.items():
        # Half precision has eleven bits of every number, relative to the row's size for the small ones.
        assert np.abs(table.sketches([i])[0] - row).max() <= 2.0**-10 * np.abs(row).max() + 2.0**-20 * level
    assert np.log2(table.scale) == round(np.log2(table.scale))


def test_scale_follows_a_drift_and_keeps_older_rows() -> None:
    table = SketchTable(4, 2)
    table.put([0], np.array([[1.0, 0.5]]))
    first = table.scale
    table.put([1], np.array([[3e4, 1e4]]))
    assert table.scale < first
    np.testing.assert_allclose(table.sketches([0, 1]), [[1.0, 0.5], [3e4, 1e4]], rtol=2e-2)


def test_outlier_is_clipped_not_infinite_and_moves_nothing() -> None:
    table = SketchTable(6, 1)
    rows = np.ones((6, 1), np.float32)
    rows[3] = 1e30
    table.put(np.arange(6), rows)
    assert table.scale == 1.0
    assert np.isfinite(table.rows).all()
    assert table.rows[3, 0] == np.float16(65504)


def test_single_precision_is_exact() -> None:
    table, rows = SketchTable(3, 4, np.float32), np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    table.put([2, 0, 1], rows * 1e-30)
    assert np.array_equal(table.rows[[2, 0, 1]], rows * np.float32(1e-30))
    assert table.scale == 1.0


def test_state_round_trip() -> None:
    table, rng = SketchTable(5, 4), np.random.default_rng(0)
    table.put([1, 3], rng.normal(size=(2, 4)) * 1e-5)
    state = {name: value.copy() for name, value in table.state_dict().items()}
    assert all(isinstance(value, np.ndarray) for value in state.values())
    other = SketchTable(5, 4)
    other.load_state_dict(state)
    for t in (table, other):
        t.put([2], np.full((1, 4), 3e-5))
    assert np.array_equal(table.rows, other.rows)
    assert np.array_equal(table.seen, other.seen)
    assert table.scale == other.scale
    with pytest.raises(ValueError, match="same dataset"):
        SketchTable(6, 4).load_state_dict(state)


def test_bad_input_says_what_to_do() -> None:
    table = SketchTable(5, 4)
    with pytest.raises(IndexError, match=r"0\.\.4"):
        table.put([5], np.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"\(b, 4\)"):
        table.put([1], np.zeros((1, 3)))
    with pytest.raises(ValueError, match="needs its index"):
        table.put([1], np.zeros((2, 4)))
    with pytest.raises(ValueError, match="float16 or float32"):
        SketchTable(5, 4, np.float64)


def test_large_table_touches_no_memory_until_written() -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    table = SketchTable(10_000_000, 64)
    table.put(np.arange(1000), np.ones((1000, 64)))
    table.put(np.arange(1000), np.full((1000, 64), 1e6))  # rescales in place
    table.state_dict()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024  # kilobytes on Linux
    assert grown < 200  # of 1280 MB


def test_courier_delivers_in_order_and_copies_indices() -> None:
    courier, indices = Courier(), np.array([4, 5])
    courier.send(indices, torch.zeros(2, 3))
    indices += 1
    courier.send(indices, np.full((2, 3), 7.0))
    assert len(courier) == 2
    assert list(courier.receive()) == []  # not yet a parcel
    ((where, rows),) = courier.receive(wait=True)
    assert where.tolist() == [4, 5, 5, 6]
    assert rows.dtype == np.float32
    assert (rows == [[0], [0], [7], [7]]).all()
    assert len(courier) == 0


def test_courier_packs_parcels_of_a_bounded_size() -> None:
    courier, sizes = Courier(), []
    for i in range(100):
        courier.send(np.full(64, i), torch.full((64, 256), float(i)))
        sizes += [rows.size for _, rows in courier.receive()]
    assert sizes == [PARCEL] * (100 * 64 * 256 // PARCEL)
    courier.send(np.zeros(PARCEL // 128), np.ones((PARCEL // 128, 256)))  # a large one comes at once
    assert [len(where) for where, _ in courier.receive()] == [4 * 64 + PARCEL // 128]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_courier_from_a_gpu() -> None:
    courier = Courier()
    sent = [torch.randn(64, 256, device="cuda") for _ in range(50)]
    for i, rows in enumerate(sent):
        courier.send(np.full(64, i), rows * 2)
    got = list(courier.receive(wait=True))
    assert np.array_equal(np.concatenate([where for where, _ in got]), np.repeat(np.arange(50), 64))
    assert np.array_equal(np.concatenate([rows for _, rows in got]), (2 * torch.cat(sent)).cpu().numpy())
