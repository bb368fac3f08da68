"""Orders in two levels go by what rows predict: rows times weights, by the plain table's, in blocks of any scale."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from heeler.herding import SketchTable
from heeler.levels.block_table import BlockTable
from heeler.levels.halves import Blocks
from heeler.levels.rule import BlockHerd
from heeler.levels.scatter import Scatter
from tests.herding.test_persistence import K, N, weights_of, whole_numbers

BLOCK = 90


def tables(path: Any = None) -> tuple[BlockTable, SketchTable]:
    return BlockTable(Blocks(N, BLOCK), K, Scatter(N, 7), path), SketchTable(N, K)


def refreshed(path: Any = None, level: float = 1.0, part: int = 50) -> tuple[BlockTable, SketchTable]:
    """Both after two epochs, with the same rows, which have different weights."""
    mine, plain = tables(path)
    order = np.random.default_rng(0).permutation(N)
    for rows in whole_numbers(np.random.default_rng(3)):
        for each in (mine, plain):
            for at in range(0, N, part):
                each.put(order[at : at + part], rows[order[at : at + part]] * np.float32(level))
            each.close_epoch()
    assert len(set(weights_of(plain).tolist())) > 2
    return mine, plain


def check_snapshot(mine: BlockTable, sketches: np.ndarray, weights: np.ndarray, level: float = 1.0) -> None:
    """Its blocks hold sketches (N, K) times weights (N,); whole numbers, so that nothing is rounded."""
    mean = level * np.arange(K, dtype=np.float64)
    for block in range(mine.shape.count):
        begin = block * mine.shape.size
        examples = mine.placement.examples(np.arange(begin, begin + mine.shape.length(block)))
        expected = sketches[examples].astype(np.float64) * weights[examples, None]
        np.testing.assert_array_equal(mine.snapshot.sum_of(block), expected.sum(axis=0))
        np.testing.assert_array_equal(mine.snapshot.centred(block, mean), expected - mean)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("level", [1.0, 2.0**-40, 2.0**20])
def test_sums_and_centred_rows_are_rows_times_weights(level: float, in_file: bool, tmp_path: Any) -> None:
    mine, plain = refreshed(tmp_path / "table" if in_file else None, level)
    np.testing.assert_array_equal(mine.persistence.closed_weights, plain.persistence.closed_weights)
    check_snapshot(mine, plain.sketches(np.arange(N)), weights_of(plain), level)


def test_rows_come_in_parts_of_any_size() -> None:
    for part in (1, 7, N):
        mine, plain = refreshed(part=part)
        check_snapshot(mine, plain.sketches(np.arange(N)), weights_of(plain))


def test_the_unseen_count_for_nothing() -> None:
    mine, plain = refreshed()
    gone = np.arange(0, N, 3)
    mine.forget(gone)
    mine.close_epoch()
    sketches = plain.sketches(np.arange(N))
    sketches[gone] = 0
    for block in range(mine.shape.count):
        begin = block * mine.shape.size
        examples = mine.placement.examples(np.arange(begin, begin + mine.shape.length(block)))
        expected = sketches[examples].astype(np.float64) * weights_of(plain)[examples, None]
        np.testing.assert_array_equal(mine.snapshot.sum_of(block), expected.sum(axis=0))
        unseen = np.isin(examples, gone)
        assert not mine.snapshot.centred(block, np.ones(K))[unseen].any()
        np.testing.assert_array_equal(mine.snapshot.centred(block, np.ones(K))[~unseen], expected[~unseen] - 1)


def test_what_an_order_is_read_from_does_not_change_while_new_rows_come() -> None:
    mine, plain = refreshed()
    sketches, weights = plain.sketches(np.arange(N)), weights_of(plain)
    old, _ = whole_numbers(np.random.default_rng(4))
    for at in range(0, N, 50):
        for each in (mine, plain):
            each.put(np.arange(at, at + 50), old[at : at + 50])
        check_snapshot(mine, sketches, weights)
    for each in (mine, plain):
        each.close_epoch()
    assert not np.array_equal(weights_of(plain, np.square(sketches).sum(axis=1)), weights)
    check_snapshot(mine, plain.sketches(np.arange(N)), weights_of(plain))


@pytest.mark.parametrize("in_file", [False, True])
def test_weights_go_with_the_state(in_file: bool, tmp_path: Any) -> None:
    path = tmp_path / "table" if in_file else None
    mine, plain = refreshed(path)
    mine.put(np.arange(100), np.ones((100, K)))
    other, _ = tables(path)
    other.load_state_dict(mine.state_dict())
    check_snapshot(other, plain.sketches(np.arange(N)), weights_of(plain))


def test_a_rule_in_two_levels_goes_by_them_and_resumes_exactly() -> None:
    rows = whole_numbers(np.random.default_rng(3))
    rule, plain = (BlockHerd(N, K, block_size=BLOCK, batch_size=10, seed=seed) for seed in (1, 1))
    for epoch, vectors in enumerate(rows):
        for each in (rule, plain):
            order = np.asarray(each.order).copy()
            each.observe(order, vectors[order])
            if each is plain and epoch == 1:  # as if old rows had said nothing about new ones
                each.table.persistence.restore({})
            each.next_order()
    table = SketchTable(N, K)
    for vectors in rows:
        table.put(np.arange(N), vectors)
        table.close_epoch()
    mean = (rows[1].astype(np.float64) * weights_of(table)[:, None]).mean(axis=0)
    np.testing.assert_allclose(rule._mean, mean, rtol=1e-12)
    np.testing.assert_allclose(plain._mean, rows[1].astype(np.float64).mean(axis=0), rtol=1e-12)
    assert not np.array_equal(np.asarray(rule.order), np.asarray(plain.order))
    other = BlockHerd(N, K, block_size=BLOCK, batch_size=10, seed=2)
    other.load_state_dict(rule.state_dict())
    np.testing.assert_array_equal(np.asarray(other.order), np.asarray(rule.order))
    for each in (rule, other):
        each.observe(np.arange(N), rows[0])
        each.next_order()
    np.testing.assert_array_equal(np.asarray(other.order), np.asarray(rule.order))
    for each in (rule, plain, other):
        each.close()
