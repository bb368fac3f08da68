"""Should the next epoch be balanced? What a run has seen of itself decides.

*Where examples are being fitted one after another, balance costs.* Over an epoch, random steps of rate η also lower
η/4 · Σ‖batch gradient‖² (Smith et al., 2021). Where every example can be fitted, that points the same way as the loss,
and balance takes it away. The sign to go by is how even the lengths of the gradients are (`realized.evenness`): where
examples are fitted, most gradients vanish and a few are left, and evenness falls. Language models and noisy problems
keep it.

*Where a classifier is still at its symmetric start, class noise helps it away.* There all gradients are about equally
long. A stratified or balanced batch has no class noise, and some networks then stay for long (`benchmarks.plateaus`).
With strata such epochs are random.

*Where an order balances nothing, it cannot help.* Realized balance says so (`realized.realized_balance`): two refreshes
at what random orders have, and sketches are not worth their cost any more.

docs/will-it-help.md has the measurements; `benchmarks.verdicts` makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from heeler.herding.realized import Balance

FITTED = 0.25
"""A loss of evenness per epoch from which examples count as being fitted."""
FITTED_WITHIN = 0.2
"""The same for the first epoch, which has no earlier one to be compared with: from its third quarter to its last."""
START = -0.1
"""Evenness of a classifier from which it has not begun to tell examples apart: all gradients are about equally long."""
NOTHING = 0.9
"""Realized balance, of steps and of prefixes, from which an order has balanced nothing."""
SOMETHING = 0.8
"""Realized balance, of steps or of prefixes, up to which it has."""
ENOUGH = 256
"""Examples below which nothing is judged: a few of them would decide."""
LASTS = 8
"""Epochs for which a look is believed that has left others to chance; later ones may not be affordable."""
_KEPT = 2


class Look(NamedTuple):
    """What was seen at the end of an epoch that brought new sketches."""

    epoch: int
    """Its number, from 0."""
    evenness: float
    fall: float
    """By how much the evenness of its last quarter is below that of its third; 0 after the first look."""
    balance: Balance | None
    """Of the epoch's order; None where that was not made from sketches."""


class Verdict(NamedTuple):
    """Does ordering help this run?"""

    helps: bool | None
    """None where that is not known yet."""
    why: str

    def __str__(self) -> str:
        return {True: "Ordering helps: ", False: "Ordering does not help: ", None: "Not known yet: "}[self.helps] + (
            self.why
        )


@dataclass(frozen=True)
class Judgement:
    """A value: what the last looks showed."""

    looks: tuple[Look, ...] = ()
    ordered: bool = False
    """Whether the order of the epoch that goes on was made from sketches."""

    def after(self, look: Look) -> Judgement:
        return Judgement((*self.looks, look)[-_KEPT:], self.ordered)

    @property
    def loss_of_evenness(self) -> float:
        """Per epoch, at the last look; 0 before there was one."""
        if not self.looks:
            return 0.0
        last = self.looks[-1]
        if len(self.looks) == 1:
            return last.fall
        before = self.looks[-2]
        return (before.evenness - last.evenness) / max(1, last.epoch - before.epoch)

    @property
    def balance(self) -> Balance | None:
        """What the last order did that was made from sketches and looked at."""
        return next((look.balance for look in reversed(self.looks) if look.balance is not None), None)

    @property
    def fits(self) -> bool:
        """Examples are being fitted one after another."""
        return self.loss_of_evenness > (FITTED_WITHIN if len(self.looks) == 1 else FITTED)

    @property
    def at_start(self) -> bool:
        """A classifier may be on the plateau where it began, which it needs class noise to leave."""
        return bool(self.looks) and self.looks[-1].evenness > START

    @property
    def useless(self) -> bool:
        """Two refreshes in a row have shown that the order balances nothing."""
        shown = [look.balance for look in self.looks if look.balance is not None]
        return len(shown) == _KEPT and all(min(balance) >= NOTHING for balance in shown)

    def is_old(self, epoch: int) -> bool:
        """Whether the last look was too long before this epoch to go by."""
        return bool(self.looks) and epoch - self.looks[-1].epoch > LASTS

    def balances(self, epoch: int) -> bool:
        """Whether the order after this epoch is to be made from sketches."""
        return not self.useless and (not self.fits or self.is_old(epoch))

    @property
    def verdict(self) -> Verdict:
        """In a sentence."""
        if not self.looks:
            return Verdict(None, "no epoch with sketches is over.")
        balance = self.looks[-1].balance
        if self.useless and balance is not None:
            return Verdict(
                False,
                "gradients change so much from one epoch to the next that orders made from them balance nothing "
                f"(steps {balance.steps:.2f}, prefixes {balance.prefixes:.2f} of what random orders have). No more "
                "sketches are taken.",
            )
        if self.fits:
            return Verdict(
                False,
                "examples are being fitted one after another (the evenness of their gradients falls by "
                f"{self.loss_of_evenness:.2f} per epoch), where balanced orders are no better than random ones or "
                "worse. Orders are random until that slows down.",
            )
        if balance is None:
            return Verdict(None, "no order made from sketches has been followed by new sketches.")
        shown = f"the last order left {balance.steps:.2f} of the imbalance of random orders in its steps and "
        shown += f"{balance.prefixes:.2f} in its prefixes"
        if min(balance) <= SOMETHING:
            return Verdict(True, f"{shown}, and examples are not being fitted one after another.")
        return Verdict(False, f"{shown}, which is hardly less than random orders have.")

    # State

    def as_array(self) -> NDArray[np.float64]:
        """(1 + looks kept, 5) for a state; -1 stands for what is not there."""
        out = np.full((1 + _KEPT, 5), -1.0)
        out[0, 0] = self.ordered
        for row, look in zip(out[1:], self.looks, strict=False):
            row[:] = [*look[:3], *(look.balance or (-1.0, -1.0))]
        return out

    @classmethod
    def from_array(cls, array: NDArray[np.float64]) -> Judgement:
        """A ValueError for one that `as_array` does not make."""
        there = array[1:][array[1:, 0] >= 0].tolist()
        looks = tuple(
            Look(int(epoch), evenness, fall, None if steps < 0 else Balance(steps, prefixes))
            for epoch, evenness, fall, steps, prefixes in there
        )
        made = cls(looks, bool(array[0, 0]))
        epochs = [look.epoch for look in looks]
        fine = np.array_equal(made.as_array(), array) and np.isfinite(array).all() and epochs == sorted(set(epochs))
        if not fine or any(look.evenness > 0 or min(look.balance or (0,)) < 0 for look in looks):
            raise ValueError("the state's judgement is out of range: it is damaged")
        return made


SHAPE = Judgement().as_array().shape
