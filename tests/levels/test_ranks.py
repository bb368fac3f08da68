"""Two levels on two ranks with examples of their own: orders, files and states apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import heeler
from tests.distributed.ranks import problem, run_ranks, set_up, walk

SIZES = (50, 43)


def own(rank: int, folder: Path) -> Any:
    """Two epochs and a state; a new sampler goes on from it. Orders of both, and the next one of each."""
    dataset, model = problem(SIZES[rank], seed=rank)
    options = {"shards": "local", "order": heeler.two_levels(16, folder / "table")}
    sampler, handle, loader = set_up(dataset, model, **options)
    orders = walk(model, sampler, loader, 2)
    state = handle.state_dict()
    following = walk(model, sampler, loader, 1)
    handle.detach()
    resumed, again, loader = set_up(dataset, model, **options)
    again.load_state_dict(state)
    return orders, following, walk(model, resumed, loader, 1), handle.table.share_seen


def test_ranks_order_their_own_examples(tmp_path: Path) -> None:
    for rank, (orders, following, resumed, seen) in enumerate(run_ranks(2, own, tmp_path)):
        for order in (*orders, *following):
            assert np.array_equal(np.sort(order), np.arange(SIZES[rank]))
        assert orders[0] != orders[1] != following[0]
        assert resumed == following
        assert seen == 1
        assert (tmp_path / f"table.{rank}").exists()


def refused(rank: int) -> str:
    dataset, model = problem(40)
    with pytest.raises(ValueError, match="shards='local'") as caught:
        set_up(dataset, model, order=heeler.two_levels(16))
    return str(caught.value)


def test_a_dealt_order_is_refused_with_what_to_do() -> None:
    for message in run_ranks(2, refused):
        assert "Subset(dataset, range(rank, len(dataset), workers))" in message
