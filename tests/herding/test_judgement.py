"""When is an epoch balanced? The rules, in numbers made up. `test_judged_herd` has what `Herd` makes of vectors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heeler.herding.judgement import FITTED, FITTED_WITHIN, LASTS, NOTHING, SHAPE, SOMETHING, Judgement, Look
from heeler.herding.realized import Balance

EVEN, GOOD, BAD = -0.5, Balance(0.3, 0.1), Balance(0.95, 1.2)


def judged(*looks: Look) -> Judgement:
    judgement = Judgement()
    for look in looks:
        judgement = judgement.after(look)
    return judgement


# Rules


@pytest.mark.parametrize("gap", [1, 2, 8])
def test_examples_are_being_fitted_from_a_loss_of_evenness_per_epoch_on(gap: int) -> None:
    for loss, fits in ((FITTED + 1e-6, True), (FITTED - 1e-6, False), (-1.0, False)):
        judgement = judged(Look(3, EVEN, 5.0, None), Look(3 + gap, EVEN - loss * gap, 0.0, GOOD))
        assert judgement.loss_of_evenness == pytest.approx(loss)
        assert judgement.fits is fits
        assert judgement.balances(judgement.looks[-1].epoch) is not fits
        assert judgement.balances(judgement.looks[-1].epoch + LASTS) is not fits
        assert judgement.balances(judgement.looks[-1].epoch + LASTS + 1)


def test_the_first_look_goes_by_its_own_quarters() -> None:
    for fall, fits in ((FITTED_WITHIN + 1e-6, True), (FITTED_WITHIN, False), (-1.0, False)):
        judgement = judged(Look(0, -3.0, fall, None))
        assert (judgement.loss_of_evenness, judgement.fits) == (fall, fits)
    assert FITTED_WITHIN < FITTED
    assert (Judgement().loss_of_evenness, Judgement().fits, Judgement().balances(0)) == (0.0, False, True)


@pytest.mark.parametrize(
    ("before", "last", "useless"),
    [
        (BAD, BAD, True),
        (Balance(NOTHING, NOTHING), Balance(NOTHING, 3.0), True),
        (Balance(NOTHING - 1e-9, 2.0), BAD, False),
        (BAD, Balance(2.0, NOTHING - 1e-9), False),
        (None, BAD, False),
        (BAD, None, False),
        (GOOD, BAD, False),
    ],
)
def test_useless_takes_two_refreshes_in_a_row(before: Balance | None, last: Balance | None, useless: bool) -> None:
    judgement = judged(Look(0, EVEN, 0.0, before), Look(1, EVEN, 0.0, last))
    assert judgement.useless is useless
    assert judgement.balances(100) is not useless
    assert not judged(Look(1, EVEN, 0.0, BAD)).useless
    older = judged(Look(0, EVEN, 0.0, BAD), Look(1, EVEN, 0.0, before), Look(2, EVEN, 0.0, last))
    assert older.useless is useless  # what was before the last two is forgotten
    assert len(older.looks) == 2


def test_the_balance_is_that_of_the_last_order_looked_at() -> None:
    assert Judgement().balance is None
    assert judged(Look(0, EVEN, 0.0, GOOD), Look(1, EVEN, 0.0, None)).balance == GOOD
    assert judged(Look(0, EVEN, 0.0, GOOD), Look(1, EVEN, 0.0, BAD)).balance == BAD


@pytest.mark.parametrize(
    ("looks", "helps", "words"),
    [
        ([], None, ["no epoch with sketches is over"]),
        ([Look(0, EVEN, 0.0, None)], None, ["no order made from sketches has been followed by new sketches"]),
        ([Look(0, EVEN, 0.3, None)], False, ["fitted one after another", "falls by 0.30", "random until"]),
        (
            [Look(0, EVEN, 0.0, None), Look(2, EVEN - 1.0, 0.0, GOOD)],
            False,
            ["fitted one after another", "falls by 0.50 per epoch"],
        ),
        (
            [Look(0, EVEN, 0.0, None), Look(1, EVEN, 0.0, GOOD)],
            True,
            ["left 0.30", "steps", "0.10 in its prefixes", "not being fitted"],
        ),
        ([Look(0, EVEN, 0.0, None), Look(1, EVEN, 0.0, Balance(0.9, SOMETHING))], True, ["0.90", "0.80"]),
        ([Look(0, EVEN, 0.0, None), Look(1, EVEN, 0.0, BAD)], False, ["0.95", "1.20", "hardly less than random"]),
        (
            [Look(0, EVEN, 0.0, BAD), Look(1, EVEN, 0.0, BAD)],
            False,
            ["steps 0.95, prefixes 1.20", "balance nothing", "No more sketches"],
        ),
        # Useless counts more than fitted: that ends, this does not.
        ([Look(0, EVEN, 0.0, BAD), Look(1, EVEN - 1, 0.0, BAD)], False, ["No more sketches"]),
    ],
)
def test_verdicts(looks: list[Look], helps: bool | None, words: list[str]) -> None:
    verdict = judged(*looks).verdict
    assert verdict.helps is helps
    assert all(word in verdict.why for word in words)
    assert str(verdict).endswith(verdict.why)
    beginnings = {True: "Ordering helps: ", False: "Ordering does not help: ", None: "Not known yet: "}
    assert str(verdict) == beginnings[helps] + verdict.why


# State

balances = st.none() | st.builds(Balance, st.floats(0, 1e6), st.floats(0, 1e6))
looks = st.builds(Look, st.integers(0, 2**40), st.floats(-30, 0), st.floats(-30, 30), balances)


@settings(max_examples=60, deadline=None)
@given(st.lists(looks, max_size=3), st.booleans())
def test_to_an_array_and_back(given_looks: list[Look], ordered: bool) -> None:
    apart = {look.epoch: look for look in given_looks}  # no epoch is looked at twice
    judgement = Judgement(tuple(apart[epoch] for epoch in sorted(apart)[-2:]), ordered)
    array = judgement.as_array()
    assert (array.shape, array.dtype) == (SHAPE, np.float64)
    assert Judgement.from_array(array) == judgement


GOOD_ARRAY = judged(Look(3, -0.5, 0.1, GOOD), Look(4, -0.7, 0.0, BAD)).as_array()


@pytest.mark.parametrize(("place", "value"), [((1, 1), 0.1), ((2, 1), 5.0), ((1, 0), 3.5), ((2, 1), -np.inf)])
def test_damaged_arrays_are_refused(place: tuple[int, int], value: float) -> None:
    array = GOOD_ARRAY.copy()
    array[place] = value
    with pytest.raises(ValueError, match="judgement is out of range: it is damaged"):
        Judgement.from_array(array)


@pytest.mark.parametrize(("place", "value"), [((1, 4), -1.0), ((2, 4), -0.5), ((0, 0), 0.5), ((2, 0), 2.0)])
def test_arrays_that_no_judgement_makes_are_refused(place: tuple[int, int], value: float) -> None:
    """Prefixes below 0 beside steps that are there; neither ordered nor not; a last look of before the first."""
    array = GOOD_ARRAY.copy()
    array[place] = value
    with pytest.raises(ValueError, match="judgement is out of range: it is damaged"):
        Judgement.from_array(array)
