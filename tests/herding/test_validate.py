"""Bad input raises ValueErrors that say what to do."""

import numpy as np
import pytest
import torch

from heeler.herding import balance_sweep, herding_bound, make_rule, pair_sweep, solve

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)
ORDER = np.arange(4)
ONE = (balance_sweep, pair_sweep, herding_bound, solve)


@pytest.mark.parametrize("function", ONE)
@pytest.mark.parametrize(
    ("table", "order", "message"),
    [
        (TABLE[0], ORDER, "shape"),
        (TABLE.astype(int), ORDER, "float16, float32 or float64"),
        (TABLE[:0], ORDER[:0], "empty"),
        (TABLE[:, :0], ORDER, "empty"),
        (TABLE, ORDER[:3], "every row once"),
        (TABLE, np.array([0, 1, 2, 4]), "outside"),
        (TABLE, np.array([0, 1, 2, -1]), "outside"),
        (TABLE, np.array([0, 1, 2, 2]), "twice"),
        (TABLE, ORDER.astype(float), "integers"),
        (TABLE, ORDER[None], "dimension"),
        (torch.zeros(4, 3, dtype=torch.bfloat16), ORDER, "bfloat16"),
    ],
)
def test_bad_input_to_one_order(function, table, order, message):
    with pytest.raises(ValueError, match=message):
        function(table, order)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_nonfinite_rows_are_refused(bad, dtype):
    table = np.random.default_rng(0).integers(-3, 4, (12, 3)).astype(dtype)
    table[2, 1] = table[7, 0] = bad
    order = np.random.default_rng(1).permutation(12)
    for function in ONE:
        with pytest.raises(ValueError, match=r"2 vectors hold NaN or infinity, rows 2, 7.*subset=True"):
            function(table, order)
    for function in (pair_sweep, herding_bound, solve):
        with pytest.raises(ValueError, match="rows 2, 7"):
            function(table, np.arange(12), shard_sizes=[5, 7])
    np.testing.assert_array_equal(
        np.sort(balance_sweep(table, np.delete(order, np.argwhere(np.isin(order, [2, 7]))), subset=True)),
        [0, 1, 3, 4, 5, 6, 8, 9, 10, 11],
    )


def test_sums_beyond_float64_are_refused():
    with pytest.raises(ValueError, match="scale them down"):
        balance_sweep(np.full((4, 1), 1e308), ORDER)


@pytest.mark.parametrize("function", [pair_sweep, herding_bound, solve])
def test_bad_shards(function):
    with pytest.raises(ValueError, match="own rows"):
        function(TABLE, np.array([0, 2, 1, 3]), shard_sizes=[2, 2])
    for sizes in ([2, 3], [5, -1], [], [[2, 2]], [2.0, 2.0]):
        with pytest.raises(ValueError, match="shard_sizes"):
            function(TABLE, ORDER, shard_sizes=sizes)
    with pytest.raises(ValueError, match="batch_size"):
        solve(TABLE, ORDER, batch_size=0)
    with pytest.raises(ValueError, match="sweeps"):
        solve(TABLE, ORDER, sweeps=0)


def test_bad_rules_and_observations():
    with pytest.raises(ValueError, match="choose one of herd, random"):
        make_rule("shuffle", 4, 3)
    with pytest.raises(ValueError, match="dim"):
        make_rule("pair", 4)
    with pytest.raises(ValueError, match="examples"):
        make_rule("random", 0)
    for removed in ("greedy", "sweeps"):
        with pytest.raises(ValueError, match=f"{removed}.*use 'herd'"):
            make_rule(removed, 4, 3)
    for options in ({"depth": -1}, {"depth": 99}):
        with pytest.raises(ValueError, match="depth"):
            make_rule("recursive", 4, 3, **options)
    with pytest.raises(ValueError, match="c must"):
        make_rule("walk", 4, 3, c=-1.0)
    for name in ("pair", "herd", "random"):
        rule = make_rule(name, 4, 3)
        for index in (-1, 4):
            with pytest.raises(ValueError, match=r"0\.\.3"):
                rule.observe([index], TABLE[:1])
    for name in ("pair", "herd"):
        with pytest.raises(ValueError, match="shape"):
            make_rule(name, 4, 3).observe([0, 1], TABLE[:1])
