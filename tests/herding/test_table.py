"""The table of sketches."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import SketchTable
from heeler.native import loops


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
        finite = np.isfinite(rows).all(axis=1)
        dropped += int((~finite).sum())
        for i in where[~finite]:
            truth.pop(i, None)
        truth.update(zip(where[finite], rows[finite], strict=True))
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
    with pytest.raises(ValueError, match=r"0\.\.4"):
        table.put([5], np.zeros((1, 4)))
    with pytest.raises(ValueError, match=r"\(b, 4\)"):
        table.put([1], np.zeros((1, 3)))
    with pytest.raises(ValueError, match="needs its index"):
        table.put([1], np.zeros((2, 4)))
    with pytest.raises(ValueError, match="at least one example"):
        SketchTable(0, 4)


TOUCHED = """
import numpy as np
from heeler.herding import SketchTable
from heeler.native.build import library

library()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = resident()
table = SketchTable(10_000_000, 64)
table.put(np.arange(1000), np.ones((1000, 64)))
table.put(np.arange(1000), np.full((1000, 64), 1e6))  # rescales in place
table.state_dict()
assert table.scale < 1
print(resident() - before)
table.rows[:2_000_000] = 0
print(resident() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_table_touches_no_memory_until_written() -> None:
    """What is resident now, in a process of its own: a peak may be an older one."""
    done = subprocess.run([sys.executable, "-c", TOUCHED], capture_output=True, text=True, check=True)
    put, written = (int(line) for line in done.stdout.split())
    assert put < 150e6  # of 1280
    assert written > 250e6  # the measurement would show it


LIMITS = (0.0, -0.0, 65504, 65519, 65519.996, 65520, 1e9, 3e38)
SUBNORMAL = (2.0**-14, 2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 2.0**-26, 1e-45, 1e-38, 2.0**-15 * (1 + 2.0**-10))
TIES = (1.0, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-11 + 2.0**-20)
HARD = np.float32([*LIMITS, *SUBNORMAL, *TIES])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(-120, 120))
def test_the_loop_rounds_as_numpy_does(seed: int, power: int) -> None:
    """All sizes, subnormals, ties, zeros' signs and limits; repeated indices."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, (9, 70), dtype=np.uint32)
    bits[:4] = (bits[:4] & 0x8FFFFFFF) | 0x30000000  # most numbers near half precision's own
    bits[2] &= 0xFFFFF000  # ties
    values = bits.view(np.float32)
    values[5] = np.tile(np.concatenate([HARD, -HARD]), 2)[:70]
    values[~np.isfinite(values)] = 1.0
    where = rng.integers(0, 20, 9)
    scale, largest = np.float32(2.0**power), np.float32(65504)
    got, expected = np.zeros((2, 20, 70), np.uint16)
    loops.store_halves(got.view(np.float16), where, values, float(scale), float(largest))
    with np.errstate(over="ignore"):
        expected[where] = np.clip(values * scale, -largest, largest).astype(np.float16).view(np.uint16)
    assert np.array_equal(got, expected)


@pytest.mark.parametrize("level", [1.0, 1e-7, 3e9])
def test_large_and_small_puts_store_the_same_bits_as_torch(level: float) -> None:
    rng = np.random.default_rng(0)
    values = (rng.standard_normal((300, 256)) * level * 10.0 ** rng.integers(-1, 2, (300, 1))).astype(np.float32)
    values[7] *= 1e20
    where = rng.permutation(1000)[:300]
    large, small = SketchTable(1000, 256), SketchTable(1000, 256)
    large.put(where, values)
    small.scale, small._scaled = large.scale, True
    for at in range(0, 300, 4):
        small.put(where[at : at + 4], values[at : at + 4])
        assert small.scale == large.scale
    assert np.array_equal(large.rows.view(np.uint16), small.rows.view(np.uint16))
    assert np.array_equal(large.seen, small.seen)
    expected = (torch.from_numpy(values) * large.scale).clamp(-65504, 65504).half().numpy()
    assert np.array_equal(large.rows[where].view(np.uint16), expected.view(np.uint16))


def test_an_outlier_among_numbers_whose_squares_vanish_is_clipped() -> None:
    rows = np.full((6, 2), 1e-36, np.float32)
    rows[3] = 1e-30
    table = SketchTable(6, 2)
    table.put(np.arange(6), rows)
    assert np.isfinite(table.rows).all()
    assert table.rows[3, 0] == np.float16(65504)


def test_nothing_to_put() -> None:
    table = SketchTable(3, 2)
    table.put([], np.empty((0, 2)))
    table.put([1], np.array([[np.nan, 0.0]]))
    assert not table.seen.any()
    assert table.dropped == 1


def agreement_of(old: np.ndarray, new: np.ndarray) -> float:
    """The plain twin: the mean of the cosines, weighted by the product of the lengths."""
    pairs = [(a.astype(float), b.astype(float)) for a, b in zip(old, new, strict=True)]
    lengths = [float(np.sqrt(a @ a) * np.sqrt(b @ b)) for a, b in pairs]
    cosines = [a @ b / length if length else 0.0 for (a, b), length in zip(pairs, lengths, strict=True)]
    return float(np.average(cosines, weights=lengths))


@pytest.mark.parametrize("part", [50, 3])  # with 40 numbers per row: for the kernel, and too few for it
@pytest.mark.parametrize("level", [1.0, 1e-12])
def test_agreement_is_that_of_new_rows_with_those_that_they_replace(part: int, level: float) -> None:
    rng = np.random.default_rng(0)
    old = (rng.standard_normal((50, 40)) * 10.0 ** rng.integers(-1, 2, (50, 1)) * level).astype(np.float32)
    new = (0.5 * old + level * rng.standard_normal((50, 40))).astype(np.float32)
    old[3] = new[4] = 0.0
    table = SketchTable(50, 40)
    table.put(np.arange(50), old)
    table.close_epoch()
    assert table.persistence.agreement is None  # there was nothing to agree with
    order = rng.permutation(50)
    for at in range(0, 50, part):
        table.put(order[at : at + part], new[order[at : at + part]])
    assert table.persistence.agreement is None  # not before the epoch is over
    table.close_epoch()
    assert table.persistence.agreement == pytest.approx(agreement_of(old, new), abs=1e-3)


def test_agreement_counts_what_was_seen_and_survives_a_change_of_scale() -> None:
    rng = np.random.default_rng(1)
    old, new = rng.standard_normal((2, 40, 30)).astype(np.float32)
    table = SketchTable(40, 30)
    table.put(np.arange(40), old)
    table.seen[30:] = False  # forgotten: a new row replaces nothing
    new[20:] *= 1e4
    table.put(np.arange(20), new[:20])
    before = table.scale
    table.put(np.arange(20, 40), new[20:])
    assert table.scale < before
    table.close_epoch()
    assert table.persistence.agreement == pytest.approx(agreement_of(old[:30], new[:30]), abs=1e-3)


def test_agreement_stands_until_half_of_the_rows_are_replaced() -> None:
    rows = np.random.default_rng(2).standard_normal((40, 30)).astype(np.float32)
    table = SketchTable(40, 30)
    table.put(np.arange(40), rows)
    table.put(np.arange(40), rows)
    table.close_epoch()
    assert table.persistence.agreement == pytest.approx(1.0, abs=1e-5)
    table.put(np.arange(19), -rows[:19])  # what came late, or an epoch that was cut short
    table.close_epoch()
    assert table.persistence.agreement == pytest.approx(1.0, abs=1e-5)
    other = SketchTable(40, 30)
    other.load_state_dict({name: value.copy() for name, value in table.state_dict().items()})
    for one in (table, other):
        one.put(np.arange(19, 40), -rows[19:])
        one.close_epoch()
        assert one.persistence.agreement == pytest.approx(-1.0, abs=1e-5)
    assert table.persistence.agreement == other.persistence.agreement


def test_a_state_of_0_2_has_no_agreement_and_loads() -> None:
    table, rows = SketchTable(4, 2), np.ones((4, 2), np.float32)
    for _ in range(2):
        table.put(np.arange(4), rows)
    table.close_epoch()
    state = {name: value.copy() for name, value in table.state_dict().items() if name not in ("pairs", "stored")}
    table.load_state_dict(state)
    assert table.persistence.agreement is None
