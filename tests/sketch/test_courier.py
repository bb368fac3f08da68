"""The courier."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heeler.sketch.courier import PARCEL

from heeler.sketch import Courier


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
