"""Do all ranks take part? Asked before the ranks form again after a fault, and before they bring things together.

A rank that is gone must cost next to nothing: it answers no roll call, so nobody waits for it.
"""

from __future__ import annotations

from heeler.ordering.distributed.store import Notices, Stopped, StoreLost
from heeler.ordering.distributed.transport import Transport


class RollCall:
    """After a fault: at each epoch's end the ranks say that they are there, and an epoch later, if all were, they meet.

    Ranks meet under the number of an epoch, so those that are in different epochs do not. Whoever does not come says
    so, and nobody waits for it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def answer(self, number: int) -> None:
        """Say that this rank has ended epoch `number` without the others."""
        self._transport.roll.post("here", number)

    def all_meet(self, number: int, *, able: bool) -> bool:
        """Whether all ranks end epoch `number` now and will form a new group: one answer for all that reach the store.

        able: whether this rank can. Waits only if all answered an epoch ago: up to the timeout, and a member, who waits
        for the leader, up to twice that.
        """
        roll, key, timeout = self._transport.roll, f"meet/{number}", self._transport.timeout
        try:
            # Else one is gone, or behind, or was through with this epoch.
            if not able or set(roll.numbers("here")) != {number - 1}:
                return roll.decide(key, "off") == "go"
            roll.post("meet", number)
            if roll.rank == 0:
                word = "off" if roll.behind("meet", number, range(1, roll.size), timeout, key) else "go"
            else:
                word = roll.decided(key, 2.0 * timeout) or "off"
            return roll.decide(key, word) == "go"
        except (StoreLost, Stopped):
            return False


class Gathering:
    """Before a consolidation, which a user may call on some ranks only: all are at the same step, or none begins."""

    def __init__(self) -> None:
        self._number = 0

    def absent(self, notices: Notices, step: int, wait: float) -> list[int]:
        """The ranks that did not come to this `step`, in the ranks' count of stages, within `wait` seconds.

        Ends early where a rank has gone past the step.
        """
        while notices.decided(self._key) is not None:  # ranks that came alone have used up these numbers
            self._number += 1
        key, mine = self._key, (self._number << 64) + step
        notices.post("gather", mine)

        def over() -> bool:
            if notices.decided(key) is not None:
                return True
            if notices.rank == 0 and all(number == mine for number in notices.numbers("gather")):
                notices.decide(key, "go")
                return True
            return max(notices.numbers("begun")) > step

        notices.wait_for(over, wait)
        word = notices.decide(key, "off")
        self._number += 1
        if word == "go":
            return []
        numbers = notices.numbers("gather")
        return [rank for rank in range(notices.size) if numbers[rank] != mine] or [0]

    @property
    def _key(self) -> str:
        return f"gather/{self._number}"
