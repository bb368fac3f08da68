"""What `Herd` makes of vectors that stay, that are new in every epoch, and that vanish."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from heeler.herding import herding_bound, make_rule
from heeler.herding.realized import evenness, realized_balance, row_squares
from heeler.herding.rules.herd import Herd

N, K, BATCH = 512, 48, 16


def herd(examples: int = N, **options: Any) -> Herd:
    rule = make_rule("herd", examples, K, batch_size=BATCH, **options)
    assert isinstance(rule, Herd)
    return rule


def walk(rule: Herd, vectors_of: Callable[[int], np.ndarray], epochs: int) -> None:
    """Epochs that see every example's vector once, in the order of the rule."""
    for _ in range(epochs):
        order = rule.order.copy()
        vectors = vectors_of(rule.epoch)
        for at in range(0, order.size, BATCH):
            rule.observe(order[at : at + BATCH], vectors[order[at : at + BATCH]])
        rule.next_order()


def drawn(seed: int, examples: int = N) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((examples, K)).astype(np.float32)


def check_random(rule: Herd) -> None:
    """The next order is the rule `random`'s: nothing of it is left to vectors."""
    assert rule.last_solution is None
    assert not rule.judgement.ordered
    np.testing.assert_array_equal(np.sort(rule.order), np.arange(rule.examples))
    rows = rule.table.rows
    shape: dict[str, Any] = {"batch_size": BATCH, "shards": rule.offsets, "seen": rule.table.seen}
    assert min(realized_balance(rows, rule.order, **shape)) > 0.6


def test_vectors_that_stay_are_balanced() -> None:
    rule = herd()
    walk(rule, lambda epoch: drawn(0), 1)
    assert rule.judgement.looks[0].balance is None  # the first order was not made from vectors
    assert rule.judgement.verdict.helps is None
    walk(rule, lambda epoch: drawn(0), 4)
    assert [look.epoch for look in rule.judgement.looks] == [3, 4]
    assert rule.judgement.ordered
    assert rule.last_solution is not None
    steps, prefixes = rule.judgement.balance
    assert steps < 0.5
    assert prefixes < 0.1
    assert rule.judgement.verdict.helps is True
    assert rule.judgement.loss_of_evenness == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("sizes", [None, [300, 212]])
def test_the_realized_balance_is_that_of_the_order_that_was_used(sizes: list[int] | None) -> None:
    rule = herd(shard_sizes=sizes)
    walk(rule, lambda epoch: drawn(0), 1)
    order, vectors = rule.order.copy(), drawn(0) + 0.5 * drawn(1)
    walk(rule, lambda epoch: vectors, 1)
    rows = (vectors * rule.table.scale).astype(np.float16)
    shape: dict[str, Any] = {"batch_size": BATCH, "shards": rule.offsets, "seen": np.ones(N, np.bool_)}
    assert rule.judgement.balance == realized_balance(rows, order, **shape)
    assert rule.judgement.looks[-1].evenness == evenness(row_squares(rows))


def test_vectors_that_are_new_in_every_epoch_end_it_after_two_refreshes() -> None:
    rule = herd()
    walk(rule, drawn, 2)
    assert rule.judgement.ordered
    assert not rule.useless
    walk(rule, drawn, 1)
    assert rule.useless
    check_random(rule)
    assert "No more sketches" in rule.judgement.verdict.why
    judgement, orders = rule.judgement, []
    for _ in range(3):
        rule.next_order()  # without vectors from now on
        orders.append(tuple(rule.order.tolist()))
        assert rule.judgement == judgement
        check_random(rule)
    assert len(set(orders)) == 3


LENGTHS = np.random.default_rng(9).lognormal(0, 0.5, (N, 1)).astype(np.float32)
STRATA = np.arange(N) % 4


def is_stratified(order: np.ndarray) -> bool:
    return all(
        np.bincount(batch, minlength=4).tolist() == [BATCH // 4] * 4 for batch in STRATA[order].reshape(-1, BATCH)
    )


def test_with_strata_orders_are_stratified_then() -> None:
    rule = herd(strata=STRATA)
    walk(rule, lambda epoch: drawn(epoch) * LENGTHS, 3)
    assert rule.useless
    for _ in range(2):
        assert is_stratified(rule.order)
        rule.next_order()


def test_with_strata_a_start_at_which_all_are_equally_long_is_random() -> None:
    """The plateau of a classifier that does not tell examples apart yet; without strata there is no such thing."""
    rule, plain = herd(strata=STRATA), herd()
    for each in (rule, plain):
        walk(each, lambda epoch: drawn(0), 2)
        assert each.judgement.at_start
    check_random(rule)
    assert not is_stratified(rule.order)
    assert plain.judgement.ordered
    walk(rule, lambda epoch: drawn(0) * LENGTHS, 2)
    assert not rule.judgement.at_start
    assert rule.judgement.ordered


def vanishing(epoch: int) -> np.ndarray:
    """Half of the vectors shrink to a tenth in each of the first epochs."""
    rng = np.random.default_rng(0)
    sizes = np.cumprod([np.ones((N, 1)), *(np.where(rng.random((N, 1)) < 0.5, 0.1, 1.0) for _ in range(4))], axis=0)
    return (drawn(0) * sizes[min(epoch, 4)]).astype(np.float32)


def test_while_examples_are_fitted_orders_are_random_with_strata_too() -> None:
    strata = np.arange(N) % 4
    rule = herd(strata=strata)
    walk(rule, vanishing, 2)
    assert rule.judgement.fits
    counts = np.array([np.bincount(strata[batch], minlength=4) for batch in np.split(rule.order, N // BATCH)])
    assert (counts != BATCH // 4).any(axis=1).mean() > 0.5


def test_while_examples_are_fitted_orders_are_random_and_then_balanced_again() -> None:
    rule = herd()
    walk(rule, vanishing, 1)
    assert rule.judgement.ordered  # one epoch has not shown it
    for _ in range(2):
        walk(rule, vanishing, 1)
        assert rule.judgement.fits
        assert rule.judgement.loss_of_evenness > 0.5
        assert "one after another" in rule.judgement.verdict.why
        check_random(rule)
    walk(rule, vanishing, 4)
    assert not rule.judgement.fits
    assert rule.judgement.ordered
    assert rule.judgement.verdict.helps is True


@pytest.mark.parametrize("sizes", [None, [300, 212], [512, 0]])
@pytest.mark.parametrize("where", ["last", "third", "none"])
def test_the_first_epoch_is_judged_by_its_last_two_quarters(sizes: list[int] | None, where: str) -> None:
    rule = herd(shard_sizes=sizes)
    vectors, parts = drawn(0), {"third": [], "last": []}
    for a, b in zip(rule.offsets, rule.offsets[1:], strict=False):
        own = rule.order[a:b].tolist()
        parts["third"] += own[2 * len(own) // 4 : 3 * len(own) // 4]
        parts["last"] += own[3 * len(own) // 4 :]
    if where != "none":
        vectors[parts[where][::2]] *= 0.1  # half of them vanish
    squares = row_squares((vectors * 1).astype(np.float16))
    walk(rule, lambda epoch: vectors, 1)
    fall = evenness(squares[parts["third"]]) - evenness(squares[parts["last"]])
    assert rule.judgement.looks[0].fall == pytest.approx(fall, abs=1e-3)
    assert rule.judgement.fits is (where == "last")
    if where == "last":
        check_random(rule)
    else:
        assert rule.judgement.ordered


def test_few_examples_are_never_judged() -> None:
    for examples, looked_at in ((255, 0), (256, 2)):
        rule = herd(examples)
        walk(rule, lambda epoch: drawn(epoch, examples), 6)  # noqa: B023
        assert len(rule.judgement.looks) == looked_at
        assert looked_at or rule.judgement.ordered


def test_a_few_rows_are_no_look() -> None:
    rule = herd()
    walk(rule, lambda epoch: drawn(0), 2)
    before = rule.judgement
    rule.observe(np.arange(N // 2 - 1), drawn(9)[: N // 2 - 1])
    rule.next_order()
    assert rule.judgement.looks == before.looks
    rule.observe(np.arange(N // 2), drawn(9)[: N // 2])
    rule.next_order()
    assert rule.judgement.looks != before.looks


def test_a_rule_that_does_not_judge_goes_on() -> None:
    class Steadfast(Herd):
        judges = False

    rule = Steadfast(N, K, batch_size=BATCH)
    walk(rule, drawn, 5)
    assert not rule.judgement.looks
    assert rule.judgement.ordered
    assert not rule.useless


def test_solve_changes_nothing() -> None:
    rule = herd()
    walk(rule, lambda epoch: drawn(0), 2)
    rule.observe(rule.order, drawn(5)[rule.order])
    before = rule.judgement
    one, two = rule.solve(), rule.solve()
    assert rule.judgement == before != one.judgement
    assert one.judgement == two.judgement
    np.testing.assert_array_equal(one.solution.order, two.solution.order)


@pytest.mark.parametrize("after", [0, 200, N])
def test_judgement_goes_with_the_state(after: int) -> None:
    rule, other = herd(seed=1), herd(seed=2)
    walk(rule, lambda epoch: drawn(0) + drawn(epoch + 1), 3)
    rule.observe(rule.order[:after], drawn(4)[rule.order[:after]])
    other.load_state_dict(rule.state_dict())
    assert other.judgement == rule.judgement
    for each in (rule, other):
        each.observe(each.order[after:], drawn(4)[each.order[after:]])
        for _ in range(2):
            each.next_order()
            walk(each, drawn, 1)
    assert other.judgement == rule.judgement
    np.testing.assert_array_equal(other.order, rule.order)


def test_other_rules_are_not_judged() -> None:
    rule = make_rule("pair", 300, K)
    assert rule.judgement is None
    assert not rule.useless


def test_what_was_seen_is_forgotten_with_the_last_vector() -> None:
    rule = herd()
    walk(rule, lambda epoch: drawn(0), 3)
    before = rule.judgement
    rule.forget(np.arange(N - 1))
    assert rule.judgement == before
    rule.forget(np.array([N - 1]))
    assert rule.judgement.looks == ()
    assert rule.judgement.ordered is before.ordered is True
    walk(rule, lambda epoch: drawn(1), 3)
    assert rule.judgement.verdict.helps is True


def test_bounds_are_in_the_gradients_own_units() -> None:
    """Long rows become half as long in the second epoch, short ones stay, so that rows are weighed."""
    rule, long, found = herd(), np.arange(N)[:, None] % 2, []
    for factor in (3.0, 1.5):
        rows = drawn(0) * np.where(long, factor, 1.0).astype(np.float32)
        walk(rule, lambda epoch: rows, 1)  # noqa: B023
        shuffled = np.random.default_rng(0).permutation(N)
        found.append(rule.last_solution.bound_random / herding_bound(rows, shuffled, batch_size=BATCH).rms)
    assert rule.table.persistence.closed_weights is not None
    assert found[0] == pytest.approx(1.0, abs=0.4)
    assert found[1] > 0.5  # what rows predict is between half of them and all
