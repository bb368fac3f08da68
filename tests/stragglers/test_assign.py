"""Codes: every batch is held, and any set of workers that should suffice does, exactly."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.stragglers import assign_bcc, assign_fractional, code_of, cyclic_code, decode


def spans_by_rank(code: np.ndarray, arrived: list[int]) -> bool:
    """The plain twin of `decode(...) is not None`: does 1 lie in the span of the rows?"""
    rows = code[arrived]
    rank = np.linalg.matrix_rank(rows, tol=1e-8) if arrived else 0
    return rank == np.linalg.matrix_rank(np.vstack([rows, np.ones(code.shape[1])]), tol=1e-8)


@given(workers=st.integers(1, 40), share=st.floats(0.05, 0.35), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_bcc_covers_every_batch_whatever_the_draw(workers: int, share: float, seed: int) -> None:
    batches = max(1, int(workers * share))
    assignment = assign_bcc(workers, batches, seed)
    assert assignment.shape == (workers,)
    assert set(assignment.tolist()) == set(range(batches))
    assert np.array_equal(assignment, assign_bcc(workers, batches, seed))


def test_bcc_is_uniform_among_the_draws_that_cover() -> None:
    """3 workers, 2 batches: six draws cover both, each as often as the others."""
    drawn = [tuple(assign_bcc(3, 2, seed).tolist()) for seed in range(3000)]
    counts = [drawn.count(draw) for draw in itertools.product(range(2), repeat=3)]
    assert counts[0] == counts[-1] == 0
    assert all(abs(count - 500) < 100 for count in counts[1:-1])  # 4.9 standard deviations


def test_a_single_draw_often_misses_a_batch() -> None:
    """What `assign_bcc` redraws for: 8 workers and 4 batches, 38%."""
    rng = np.random.default_rng(0)
    missed = np.mean([len(np.unique(rng.integers(0, 4, 8))) < 4 for _ in range(4000)])
    assert missed == pytest.approx(0.377, abs=0.03)


def test_bcc_that_cannot_cover_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="cannot cover 5 batches"):
        assign_bcc(4, 5)
    with pytest.raises(ValueError, match="assign_fractional"):
        assign_bcc(40, 40)


@given(groups=st.integers(1, 8), stragglers=st.integers(0, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_fractional_repetition_survives_any_stragglers(groups: int, stragglers: int, data: st.DataObject) -> None:
    workers = groups * (stragglers + 1)
    code = code_of(assign_fractional(workers, stragglers))
    assert code.shape == (workers, groups)
    assert (code.sum(axis=0) == stragglers + 1).all()
    order = data.draw(st.permutations(range(workers)))
    weights = decode(code, order[: workers - stragglers])
    assert weights is not None
    assert set(weights.tolist()) <= {0.0, 1.0}


def test_fractional_repetition_needs_even_groups() -> None:
    with pytest.raises(ValueError, match="cyclic_code"):
        assign_fractional(7, 2)
    with pytest.raises(ValueError, match="0 to 3 can be missing, not 4"):
        assign_fractional(4, 4)


@given(workers=st.integers(1, 24), data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_cyclic_codes_are_decoded_exactly_from_any_n_minus_s(workers: int, data: st.DataObject, seed: int) -> None:
    stragglers = data.draw(st.integers(0, workers - 1))
    code = cyclic_code(workers, stragglers, seed)
    for i in range(workers):
        held = {(i + k) % workers for k in range(stragglers + 1)}
        assert set(np.flatnonzero(code[i]).tolist()) == held
    arrived = data.draw(st.permutations(range(workers)))[: workers - stragglers]
    weights = decode(code, arrived)
    assert weights is not None
    gradients = np.random.default_rng(seed).standard_normal((workers, 5))
    messages = code @ gradients
    assert np.allclose(weights @ messages[arrived], gradients.sum(axis=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("workers", "stragglers"), [(5, 1), (5, 2), (6, 3), (7, 4)])
def test_cyclic_codes_from_every_set_of_workers(workers: int, stragglers: int) -> None:
    """Every set of n − s suffices, and none of n − s − 1 does."""
    code = cyclic_code(workers, stragglers)
    for arrived in itertools.combinations(range(workers), workers - stragglers):
        weights = decode(code, arrived)
        assert weights is not None
        assert np.abs(weights @ code[list(arrived)] - 1).max() < 1e-9
    for arrived in itertools.combinations(range(workers), workers - stragglers - 1):
        assert decode(code, arrived) is None


def test_a_hundred_sets_of_fifty_workers() -> None:
    code = cyclic_code(50, 9)
    for seed in range(100):
        arrived = np.random.default_rng(seed).permutation(50)[:41]
        weights = decode(code, arrived)
        assert weights is not None
        assert np.abs(weights @ code[arrived] - 1).max() < 1e-8


@given(data=st.data(), workers=st.integers(1, 7), batches=st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_decode_of_any_code_agrees_with_its_twin(data: st.DataObject, workers: int, batches: int) -> None:
    numbers = st.integers(-2, 2)
    code = np.array(data.draw(st.lists(st.lists(numbers, min_size=batches, max_size=batches), min_size=workers,
                                       max_size=workers)), dtype=float)  # fmt: skip
    arrived = data.draw(st.permutations(range(workers)))[: data.draw(st.integers(0, workers))]
    weights = decode(code, arrived)
    assert (weights is not None) == spans_by_rank(code, list(arrived))
    if weights is not None:
        assert np.allclose(weights @ code[list(arrived)], 1, atol=1e-6)


def test_the_first_of_equal_messages_counts() -> None:
    code = code_of([0, 1, 0, 1, 1])
    weights = decode(code, [3, 4, 2, 0])
    assert weights is not None
    assert weights.tolist() == [1, 0, 1, 0]
    assert decode(code, [3, 4, 1]) is None
    assert decode(code, []) is None


def test_input_that_is_no_code() -> None:
    with pytest.raises(ValueError, match="code_of"):
        decode(np.array([0, 1, 0]), [0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0\.\.1"):
        decode(np.eye(2), [2])
    with pytest.raises(ValueError, match="no worker has batch 1"):
        code_of([0, 2])
    with pytest.raises(ValueError, match="one per worker"):
        code_of([])
