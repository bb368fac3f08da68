"""The table in blocks: as the plain one, with versions that do not change, and states that stay right."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding import SketchTable
from heeler.herding.persistence import bins_of
from heeler.levels.block_table import BlockTable
from heeler.levels.halves import Blocks
from heeler.levels.scatter import Scatter
from heeler.notices import HeelerWarning
from tests.herding import test_own_check as own

EXAMPLES, DIM, BLOCK = 57, 3, 10


def table(path=None, examples: int = EXAMPLES) -> BlockTable:
    return BlockTable(Blocks(examples, BLOCK), DIM, Scatter(examples, 7), path)


def some(rng: np.random.Generator, count: int, size: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    return rng.permutation(EXAMPLES)[:count], size * rng.standard_normal((count, DIM)).astype(np.float32)


def contents(of: BlockTable) -> tuple[np.ndarray, np.ndarray]:
    return of.sketches(np.arange(EXAMPLES)), of.seen


def read_version(of: BlockTable) -> np.ndarray:
    """All rows that orders are expanded from, block by block."""
    return np.concatenate([of.snapshot.centred(block, np.zeros(DIM)) for block in range(of.shape.count)])


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32), st.booleans())
def test_holds_what_the_plain_table_holds(tmp_path_factory, seed, in_file):
    rng = np.random.default_rng(seed)
    mine = table(tmp_path_factory.mktemp("t") / "table" if in_file else None)
    plain = SketchTable(EXAMPLES, DIM)
    for _ in range(12):
        what = rng.integers(5)
        if what < 3:
            examples, vectors = some(rng, int(rng.integers(0, EXAMPLES)), float(2.0 ** rng.integers(-6, 7)))
            vectors[rng.random(len(vectors)) < 0.1] = np.inf
            for each in (mine, plain):
                each.put(examples, vectors)
        elif what == 3:
            gone = rng.integers(0, EXAMPLES, 9)
            mine.forget(gone)
            plain.forget(gone)
        else:
            mine.close_epoch()
            plain.close_epoch()
        rows, seen = contents(mine)
        assert np.array_equal(seen, plain.seen)
        assert mine.share_seen == pytest.approx(plain.share_seen)
        assert (mine.scale, mine.dropped) == (plain.scale, plain.dropped)
        expected = plain.sketches(np.arange(EXAMPLES)) * plain.seen[:, None]
        # A row that another scale was too coarse for may be rounded once more, or less.
        np.testing.assert_allclose(rows, expected, rtol=2e-3, atol=1e-4 / mine.scale)
        assert mine.rows.shape == (EXAMPLES, DIM)


def test_agreement_is_the_plain_tables():
    rng = np.random.default_rng(0)
    mine, plain = table(), SketchTable(EXAMPLES, DIM)
    for _ in range(3):
        vectors = rng.standard_normal((EXAMPLES, DIM)).astype(np.float32)
        for each in (mine, plain):
            each.put(np.arange(EXAMPLES), vectors)
            each.close_epoch()
    assert plain.persistence.agreement is not None
    assert mine.persistence.agreement == pytest.approx(plain.persistence.agreement)


def test_of_two_rows_with_one_number_the_later_counts():
    mine = table()
    mine.put([4, 5, 4], np.array([[1, 1, 1], [2, 2, 2], [3, 3, 3]], np.float32))
    assert mine.sketches([4, 5]).tolist() == [[3, 3, 3], [2, 2, 2]]
    assert mine.share_seen == pytest.approx(2 / EXAMPLES)


@pytest.mark.parametrize("in_file", [False, True])
def test_what_orders_are_read_from_stays_until_the_epoch_ends(in_file, tmp_path):
    rng = np.random.default_rng(0)
    mine = table(tmp_path / "table" if in_file else None)
    assert not read_version(mine).any()
    mine.put(*some(rng, EXAMPLES))
    assert not read_version(mine).any()
    mine.close_epoch()
    before = read_version(mine)
    assert before.any()
    for size in (1, 2**12, 2**-12):  # each of them brings another scale
        mine.put(*some(rng, 30, size))
        mine.forget(rng.permutation(EXAMPLES)[:5])
        assert np.array_equal(read_version(mine), before)
    newest = contents(mine)[0]
    mine.close_epoch()
    assert not np.array_equal(read_version(mine), before)
    placed = mine.placement.examples(np.arange(EXAMPLES))
    by_bin = mine.persistence.closed_weights
    assert by_bin is not None  # rows of so many sizes are weighed: `test_block_weights`
    weights = by_bin[bins_of(np.square(newest.astype(np.float64)).sum(axis=1))]
    np.testing.assert_array_equal(read_version(mine), (newest * weights[:, None])[placed])


def written(mine: BlockTable, rng: np.random.Generator) -> None:
    mine.put(*some(rng, 23, float(2.0 ** rng.integers(-12, 12))))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**32))
def test_the_last_two_states_stay_right_whatever_is_written(tmp_path_factory, seed):
    """Saved at any moment, and loaded after anything that a killed run may have done since."""
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("t") / "table"
    mine, saved = table(path), []
    for _ in range(10):
        what = rng.integers(4)
        if what < 2:
            written(mine, rng)
        elif what == 2:
            mine.close_epoch()
        else:
            saved.append((mine.state_dict(), contents(mine), read_version(mine)))
    for state, (rows, seen), before in saved[-2:]:
        resumed = table(path)
        resumed.load_state_dict(state)
        assert np.array_equal(contents(resumed)[0], rows)
        assert np.array_equal(contents(resumed)[1], seen)
        assert np.array_equal(read_version(resumed), before)


def test_a_loaded_state_stays_right_while_the_run_goes_on(tmp_path):
    rng = np.random.default_rng(0)
    mine = table(tmp_path / "table")
    written(mine, rng)
    mine.close_epoch()
    written(mine, rng)
    state, expected = mine.state_dict(), contents(mine)[0]
    for _ in range(3):  # killed three times, at some point
        mine = table(tmp_path / "table")
        mine.load_state_dict(state)
        assert np.array_equal(contents(mine)[0], expected)
        for _ in range(4):
            written(mine, rng)
            mine.close_epoch()
    room = (tmp_path / "table").stat().st_size // (1 << 16)
    assert room <= 4 * 6  # read, write and two states of six blocks, at most: free slots are used again


def test_a_state_that_is_too_old_is_found_out(tmp_path):
    rng = np.random.default_rng(0)
    mine = table(tmp_path / "table")
    states = []
    for _ in range(6):
        written(mine, rng)
        states.append(mine.state_dict())
        mine.close_epoch()
    table(tmp_path / "table").load_state_dict(states[-2])
    with pytest.raises(ValueError, match="keeps what the last two saved states need"):
        table(tmp_path / "table").load_state_dict(states[0])


def test_asking_twice_costs_nothing(tmp_path):
    mine = table(tmp_path / "table")
    written(mine, np.random.default_rng(0))
    first = mine.state_dict()
    written(mine, np.random.default_rng(1))
    for _ in range(5):
        mine.state_dict()
    table(tmp_path / "table").load_state_dict(first)


def test_files_that_are_not_the_states(tmp_path):
    mine = table(tmp_path / "table")
    written(mine, np.random.default_rng(0))
    state = mine.state_dict()
    with pytest.raises(ValueError, match="there is no table"):
        table(tmp_path / "other").load_state_dict(state)
    with pytest.raises(ValueError, match="in a file, this one's in memory"):
        table().load_state_dict(state)
    with pytest.raises(ValueError, match="in memory, this one's in a file"):
        table(tmp_path / "table").load_state_dict(table().state_dict())
    (tmp_path / "cut").write_bytes((tmp_path / "table").read_bytes()[: 1 << 16])
    with pytest.raises(ValueError, match="it was cut off"):
        table(tmp_path / "cut").load_state_dict(state)
    damaged = bytearray((tmp_path / "table").read_bytes())
    damaged[(1 << 16) - 1] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ValueError, match="no longer those"):
        table(tmp_path / "damaged").load_state_dict(state)


def test_a_new_run_puts_an_old_runs_file_away(tmp_path):
    mine = table(tmp_path / "table")
    written(mine, np.random.default_rng(0))
    state, expected = mine.state_dict(), contents(mine)[0]
    new = table(tmp_path / "table")
    with pytest.warns(HeelerWarning, match="of an earlier run"):
        written(new, np.random.default_rng(1))
    kept = table(tmp_path / "table.old")
    kept.load_state_dict(state)
    assert np.array_equal(contents(kept)[0], expected)


def test_a_state_of_before_the_first_row_goes_on_in_the_same_file(tmp_path):
    state = table(tmp_path / "table").state_dict()
    killed = table(tmp_path / "table")
    written(killed, np.random.default_rng(0))
    resumed = table(tmp_path / "table")
    resumed.load_state_dict(state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(resumed, np.random.default_rng(1))
    assert not (tmp_path / "table.old").exists()


def test_a_full_disk_is_said(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="make room, and go on from the last checkpoint"):
        written(table(tmp_path / "table"), np.random.default_rng(0))


def test_too_large_a_copy_is_refused(monkeypatch):
    monkeypatch.setattr("heeler.levels.block_table.LARGEST_COPY", 100)
    with pytest.raises(ValueError, match=r"table\.sketches\(indices\)"):
        table().rows  # noqa: B018


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_only_what_is_in_use_is_mapped(tmp_path):
    """A process that has been through all blocks holds a few of them."""
    mine = BlockTable(Blocks(40_000, 1000), 256, Scatter(40_000, 0), tmp_path / "table")
    for start in range(0, 40_000, 1000):
        examples = Scatter(40_000, 0).examples(np.arange(start, start + 1000))
        mine.put(examples, np.ones((1000, 256), np.float32))
    mapped = sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert 1 <= mapped <= 8


@pytest.mark.parametrize(("misfiled", "expected"), [(0.0, 0.85), (1.0, 0.5)])
def test_it_tells_whether_rows_know_their_own_examples(misfiled, expected):
    rng = np.random.default_rng(0)
    mine, rows = BlockTable(Blocks(own.N, 100), own.K, Scatter(own.N, 0)), own.sketched(rng)
    for _ in range(8):
        own.epoch(mine, rows(), rng, misfiled)
    assert mine.own.share.value == pytest.approx(expected, abs=0.07)
    assert mine.own.at_chance == (misfiled == 1.0)
