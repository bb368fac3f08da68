"""The bench itself, as small as it gets; and what it found to be worth a short cut."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks import coordination as bench
from heeler.ordering.distributed.wire import pack


@pytest.mark.parametrize("shards", ["global", "local"])
def test_what_is_measured(shards: str) -> None:
    result = bench.measure_coordination(
        [2, 3], examples=96, dim=8, parameters=100, step_ms=1.0, batch_size=4, shards=shards
    )
    assert [row["workers"] for row in result["workers"]] == [2, 3]
    for row in result["workers"]:
        ours, alike, published = row["heeler"], row["all_ranks_alike"], row["published_cd_grab"]
        workers = row["workers"]
        # An epoch's sketches and numbers of examples of all but the host, one header each, and everyone's order back,
        # with a byte that says that all have theirs, and a number that says whether sketches are given up.
        assert ours["bytes_total"] == (workers - 1) * (96 / workers * (8 * 2 + 4 + 4) + 5 * 8 + 1 + 4)
        assert ours["bytes_of_host"] == ours["bytes_total"]
        assert alike["bytes_total"] == workers * (workers - 1) * 96 / workers * (8 * 2 + 4)
        assert published["bytes_per_example"] == (workers - 1) * 4 * 100 / 4
        assert ours["exchange_and_solve_share"] > 0
        assert len(ours["wait_seconds_each"]) == len(ours["epoch_ratio_each"]) == 1 + bench.STEADY_EPOCHS
    assert json.loads(json.dumps(result)) == result


def test_a_rank_that_fails_is_named() -> None:
    def fails(rank: int) -> int:
        if rank == 1:
            raise ValueError("no such thing")
        return rank

    with pytest.raises(RuntimeError, match=r"rank 1 of 2[^$]*no such thing"):
        bench.run_ranks(2, fails, timeout=20.0)


def test_command() -> None:
    import typer

    from benchmarks.commands.coordination import coordination

    app = typer.Typer()
    app.command()(coordination)
    arguments = ["--workers=2", "--examples=64", "--dim=4", "--parameters=10", "--step-ms=1", "--batch=4"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "2 workers" in shown.stdout
    printed = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(printed.stdout)["workers"][0]["workers"] == 2


def test_sketches_keep_what_half_precision_can_hold() -> None:
    vectors = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32) * np.float32(1e-9)
    values, exponent = pack(vectors, torch.float16)
    np.testing.assert_allclose(np.ldexp(values.float().numpy(), -exponent), vectors, rtol=1e-3, atol=1e-14)
    vectors[0, 0], vectors[1, 1], vectors[2, 2] = np.inf, np.nan, 1.0  # infinite, no number, too large for the others
    values, exponent = pack(vectors, torch.float16)
    assert torch.isinf(values[0, 0])
    assert torch.isnan(values[1, 1])
    assert values[2, 2] == torch.finfo(torch.float16).max
    assert values[3:].isfinite().all()
