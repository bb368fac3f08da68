"""Threads and files are let go of, and taken again when they are needed."""

import os
import threading

import numpy as np
import pytest

from heeler.levels import BlockHerd


def expanding() -> int:
    return sum(thread.name.startswith("heeler-expand") for thread in threading.enumerate())


@pytest.mark.parametrize("in_file", [False, True])
def test_a_closed_rule_holds_nothing_and_goes_on(in_file, tmp_path):
    vectors = np.random.default_rng(0).standard_normal((200, 4)).astype(np.float32)
    before = expanding()
    files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    orders = []
    for closes in (False, True):
        path = tmp_path / f"table-{closes}" if in_file else None
        rule = BlockHerd(200, 4, block_size=40, batch_size=4, table=path)
        for _ in range(3):
            rule.observe(rule.order[:120], vectors[rule.order[:120]])
            if closes:
                rule.close()
                assert expanding() == before
                if files:
                    assert len(os.listdir("/proc/self/fd")) == files
            rule.next_order()
        orders.append(np.asarray(rule.order))
        assert expanding() == before + 1
        rule.close()
        del rule
    np.testing.assert_array_equal(*orders)
    assert expanding() == before
