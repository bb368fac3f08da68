"""Rows are known by all their bits, wherever they went; what cannot be known is not guessed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.ordering import matching
from heeler.ordering.fingerprint import PIECES, PLACES, PRINT, fingerprint, hash_of, keys_in, keys_of
from heeler.ordering.matching import AMBIGUOUS, HandedOut, Look, same_memory, same_rows

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]


def look(x: torch.Tensor) -> Look:
    return Look(fingerprint(x).numpy(), x[0].numel(), x.dtype)


def batch(data: object, first: int = 0, size: int = 8) -> HandedOut:
    return HandedOut(np.arange(first, first + size), data, first, size)


def found(x: torch.Tensor, *batches: HandedOut) -> list[int] | None:
    known = same_rows(look(x), list(batches))
    return None if known is None else known.indices.tolist()


# Hashes


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("size", [1, 3, 8, 33, 1000])
def test_a_fingerprint_holds_the_hash_exactly(dtype: torch.dtype, size: int) -> None:
    x = (torch.randn(5, size) * 50).to(dtype)
    prints = fingerprint(x).numpy()
    assert prints.shape == (5, PRINT)
    assert np.array_equal(keys_in(prints), keys_of(x))
    assert np.array_equal(keys_of(x), keys_of(torch.cat([x[:1], x])[1:]))  # wherever it lies in memory
    assert np.array_equal(keys_of(x), keys_of(torch.cat([x, x], 1)[:, size:]))


@given(st.integers(0, 99), st.integers(0, 6), st.integers(1, 7))
@settings(deadline=None, max_examples=60)
def test_one_small_number_more_is_another_hash(place: int, value: int, more: int) -> None:
    """Small whole numbers differ in the upper bits of floats alone."""
    for dtype in TYPES[:-1]:
        x = torch.full((2, 100), value).to(dtype)
        x[1, place] += more
        first, second = keys_of(x).tolist()
        assert first != second


def test_large_tensors_are_hashed_in_groups() -> None:
    x = torch.randn(5, 1 << 16)
    assert torch.equal(hash_of(x), torch.cat([hash_of(row[None]) for row in x]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("kind", ["binary", "small", "pairs", "one hot"])
def test_hashes_do_not_collide(dtype: torch.dtype, kind: str) -> None:
    """Among 20,000 rows of the kinds that hashes are bad at: few values, in few bits, in pairs that are alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5 if kind == "small" else 2, (20000, 40), generator=generator)
    if kind == "pairs":
        x = x[:, :20].repeat_interleave(2, 1)
    elif kind == "one hot":
        x = torch.nn.functional.one_hot(torch.arange(2000), 2000)
    x = x.to(dtype)
    distinct = len(np.unique(x.float().numpy(), axis=0))
    assert len(np.unique(keys_of(x))) == distinct
    assert len(np.unique(fingerprint(x)[:, -PIECES:].numpy(), axis=0)) == distinct


# Content


def test_equal_beginnings_and_paddings_are_not_equal_rows() -> None:
    """As a prompt before every text: 2,000 tokens alike, then one that is not."""
    ids = torch.ones(8, 2048, dtype=torch.int64)
    ids[:, 2000] = torch.arange(8)
    handed = batch(ids)
    order = torch.randperm(8)
    assert found(ids[order], handed) == order.tolist()
    other = ids.clone()
    other[3, 2000] = 99
    assert found(other, handed) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_a_cast_copy(dtype: torch.dtype) -> None:
    x = torch.randn(8, 3, 5, 5)
    assert found(x.to(dtype)[[5, 1]], batch(x)) == [5, 1]
    assert found(x.to(dtype).flatten(1)[[5, 1]], batch(x)) == [5, 1]


def test_whole_numbers_as_floats_and_never_the_other_way() -> None:
    x = torch.randint(0, 255, (8, 12), dtype=torch.uint8)
    assert found(x.float()[2:], batch(x)) == list(range(2, 8))
    assert found(x, batch(x.float())) is None


@pytest.mark.parametrize("window", [slice(0, -1), slice(1, None), slice(5, 13), slice(24, 32), slice(3, 11)])
@pytest.mark.parametrize("length", [33, 32])
def test_windows_of_rows(window: slice, length: int) -> None:
    x = torch.randint(0, 20, (8, length))
    x[:4, 5:] = 0  # padding
    order = torch.randperm(8)
    known = found(x[:, window][order], batch(x))
    assert known is not None
    right = [(a, b) for a, b in zip(known, order.tolist(), strict=True) if a != AMBIGUOUS]
    assert all(a == b for a, b in right)
    assert len(right) >= 4


def test_windows_of_sequences_of_vectors() -> None:
    x = torch.randn(8, 7, 4)
    for start in range(5):
        assert found(x[:, start : start + 3].clone(), batch(x), batch(torch.randn(8, 7, 4), 8)) == list(range(8))


def test_a_window_of_other_rows_is_not_known() -> None:
    x = torch.randint(0, 20, (8, 33))
    other = x[:, 5:13].clone()
    other[2, 7] += 1
    assert found(other, batch(x)) is None


@pytest.mark.parametrize("kind", ["reshape", "windows first", "one view", "bags", "shuffled"])
def test_rows_cut_into_pieces(kind: str) -> None:
    x = torch.randn(8, 4, 10)
    if kind == "windows first":
        cut, owner = x.transpose(0, 1).reshape(32, 10), torch.arange(8).repeat(4)
    elif kind == "one view":
        cut, owner = x[:, 2], torch.arange(8)
    else:
        cut, owner = x.reshape(32, 10), torch.arange(8).repeat_interleave(4)
    if kind == "shuffled":
        order = torch.randperm(32)
        cut, owner = cut[order], owner[order]
    handed = batch(x if kind == "bags" else x.flatten(1))
    assert found(cut.clone(), handed, batch(torch.randn(8, 40), 8)) == owner.tolist()


def test_one_row_that_is_unknown_makes_the_pass_unknown() -> None:
    x = torch.randn(8, 5)
    assert found(torch.cat([x[:7], torch.randn(1, 5)]), batch(x)) is None


def test_rows_that_several_examples_have_are_left_out_unless_their_places_decide() -> None:
    x = torch.randn(8, 5)
    x[6] = x[2]
    assert found(x, batch(x)) == list(range(8))
    assert found(x[1:4], batch(x)) == [1, 2, 3]
    assert found(x[[2, 1, 0]], batch(x)) == [AMBIGUOUS, 1, 0]
    twice = x[:2].repeat(4, 1)
    assert found(twice, batch(twice), batch(twice.clone(), 8)) == [AMBIGUOUS] * 8
    assert found(twice, batch(twice), batch(twice.clone(), 0)) == list(range(8))  # the same examples once more


def test_single_numbers_tell_nothing_out_of_order() -> None:
    labels = torch.tensor([3, 1, 0, 2, 7, 5, 4, 6])
    order = torch.tensor([1, 0, 2, 3, 4, 5, 6, 7])
    for x in (labels, labels[:, None], labels.float()):
        assert found(x, batch(x)) == list(range(8))
        assert found(x[order], batch(x)) is None
        assert found(x[2:4], batch(x)) is None  # two classes in a row are alike by chance
    assert found(torch.arange(8), batch(torch.arange(32).reshape(8, 4))) is None  # a row's numbers are no rows


# Tensors that the loop writes to


@pytest.mark.parametrize("numbers", [6, 20000])
def test_a_batch_permuted_in_place(numbers: int) -> None:
    x = torch.randn(8, numbers)
    assert (x.numel() > matching.SMALL) == (numbers > 6)
    handed = batch(x)
    order = torch.randperm(8)
    x.copy_(x[order])
    assert same_memory(x, [handed]) is None
    assert found(x, handed) == order.tolist()
    x.mul_(2)
    assert found(x, handed) is None


def test_large_rows_that_look_alike_are_not_known_once_they_were_written_to() -> None:
    x = torch.zeros(8, 20000)
    x[:, 9000] = torch.arange(8)
    handed = batch(x)
    assert found(x[[3, 1]], handed) == [3, 1]
    handed = batch(x)
    x[:] = x[torch.randperm(8)]
    assert found(x, handed) is None


@pytest.mark.parametrize("how", ["numpy", "data", "out"])
def test_writes_that_leave_no_version_behind(how: str) -> None:
    x = torch.randn(8, 5)
    handed = batch(x)
    assert same_memory(x, [handed]) is not None
    permuted = x[[1, 0, 2, 3, 4, 5, 6, 7]]
    if how == "numpy":
        x.numpy()[:] = permuted.numpy()
    elif how == "data":
        x.data.copy_(permuted)
    else:
        torch.mul(permuted, 1, out=x)
    assert same_memory(x, [handed]) is None
    assert found(x, handed) == [1, 0, 2, 3, 4, 5, 6, 7]


def test_views_of_a_batch() -> None:
    x = torch.randn(8, 6, 4)
    handed = batch(x)

    def seen(view: torch.Tensor) -> list[int] | None:
        known = same_memory(view, [handed])
        return None if known is None else known.tolist()

    assert seen(x) == seen(x[:, 2:4]) == seen(x[:, :, 1]) == seen(x.transpose(1, 2)) == list(range(8))
    assert seen(x[2:5]) == [2, 3, 4]
    assert seen(x.reshape(16, 12)) is None  # rows of another length
    assert seen(x.as_strided((7, 24), (24, 1), 12)) is None  # each begins in one row and ends in the next
    assert seen(x.clone()) is None


def test_a_batch_made_under_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.randn(8, 5)
    handed = batch(x)
    assert same_memory(x, [handed]) is not None


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("columns", [slice(2, 3), slice(0, None, 6), slice(1, 4)])
def test_columns_of_a_wider_tensor(rows: int, columns: slice) -> None:
    handed = batch(torch.randn(rows, 6)[:, columns], size=rows)
    assert handed.held[0].unchanged
    assert found(handed.held[0].tensor.clone(), handed) == list(range(rows))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("kind", ["sparse", "complex", "quantized", "empty", "negative"])
def test_tensors_that_cannot_be_read_do_no_harm(kind: str) -> None:
    x = {
        "sparse": lambda: torch.eye(8).to_sparse(),
        "complex": lambda: torch.randn(8, 3, dtype=torch.complex64),
        "quantized": lambda: torch.quantize_per_tensor(torch.randn(8, 3), 0.1, 0, torch.qint8),
        "empty": lambda: torch.zeros(8, 0),
        "negative": lambda: torch.randn(8, 3, dtype=torch.complex64).conj().imag,
    }[kind]()
    handed = batch([x, torch.randn(8, 5)])
    assert found(handed.held[-1].tensor.clone(), handed) == list(range(8))


def test_a_batch_that_is_evaluated_on_is_not_read() -> None:
    with torch.no_grad():
        handed = batch(torch.randn(8, 5))
    assert [held.tensor for held in handed.held] == [None]
    assert handed.held[0].is_read is False


def test_places_are_few() -> None:
    handed = batch(torch.randn(8, 3, 64, 64))
    assert handed.held[0].is_read
    assert handed.held[0].places.shape == (8, PLACES)
