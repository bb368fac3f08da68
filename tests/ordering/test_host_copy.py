"""Sketches on their way to the host: in order, in large chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from heeler.ordering.host_copy import CHUNK, HostCopy


def test_what_is_sent_arrives_in_order_under_the_indices_it_was_sent_with() -> None:
    copy, indices = HostCopy(), np.array([4, 5])
    copy.send(indices, torch.zeros(2, 3))
    indices += 1
    copy.send(indices, np.full((2, 3), 7.0))
    assert len(copy) == 2
    assert list(copy.receive()) == []  # not yet a chunk
    ((where, rows),) = copy.receive(wait=True)
    assert where.tolist() == [4, 5, 5, 6]
    assert rows.dtype == np.float32
    assert (rows == [[0], [0], [7], [7]]).all()
    assert len(copy) == 0


def test_chunks_are_of_a_bounded_size() -> None:
    copy, sizes = HostCopy(), []
    for i in range(100):
        copy.send(np.full(64, i), torch.full((64, 256), float(i)))
        sizes += [rows.size for _, rows in copy.receive()]
    assert sizes == [CHUNK] * (100 * 64 * 256 // CHUNK)
    copy.send(np.zeros(CHUNK // 128), np.ones((CHUNK // 128, 256)))  # a large one comes at once
    assert [len(where) for where, _ in copy.receive()] == [4 * 64 + CHUNK // 128]


def test_every_sketch_needs_its_index() -> None:
    for indices, sketches in (([1], np.zeros((2, 4))), ([1], np.zeros(4)), ([[1]], np.zeros((1, 4)))):
        with pytest.raises(ValueError, match="needs its index"):
            HostCopy().send(indices, sketches)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_from_a_gpu() -> None:
    copy = HostCopy()
    sent = [torch.randn(64, 256, device="cuda") for _ in range(50)]
    for i, rows in enumerate(sent):
        copy.send(np.full(64, i), rows * 2)
    got = list(copy.receive(wait=True))
    assert np.array_equal(np.concatenate([where for where, _ in got]), np.repeat(np.arange(50), 64))
    assert np.array_equal(np.concatenate([rows for _, rows in got]), (2 * torch.cat(sent)).cpu().numpy())
