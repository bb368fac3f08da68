"""What `install` was asked for, checked."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from heeler.robust.arrays import check_f
from heeler.robust.gram import VECTOR_RULES

COORDINATE_RULES = ("median", "trimmed-mean")
RULES = (*VECTOR_RULES, *COORDINATE_RULES)


@dataclass(frozen=True)
class Settings:
    """`install` explains them."""

    rule: str
    f: int
    momentum: float
    distances: str
    parameters: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"there is no rule {self.rule!r}; there are {', '.join(RULES)}")
        if self.distances not in ("sketch", "exact"):
            raise ValueError(f'distances is "sketch" or "exact", not {self.distances!r}')
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is at least 0 and below 1, not {self.momentum!r}")
        known = [] if self.by_coordinate else list(inspect.signature(VECTOR_RULES[self.rule]).parameters)[2:]
        wrong = sorted(set(self.parameters) - set(known))
        if wrong:
            takes = ", ".join(known) or "no parameters"
            raise TypeError(f"{self.rule} has no {', '.join(wrong)}; it takes {takes}")
        if self.has_center and not self.parameters.get("tau", 0) > 0:
            raise ValueError(
                "centered-clipping needs tau > 0: how far from the last result a rank's vector may be without being "
                "clipped. It has the scale of a gradient; 10 / (1 − momentum) was used for small networks on MNIST"
            )

    @property
    def by_coordinate(self) -> bool:
        return self.rule in COORDINATE_RULES

    @property
    def has_center(self) -> bool:
        return self.rule == "centered-clipping"

    @property
    def uses_slices(self) -> bool:
        return self.by_coordinate or self.distances == "exact"

    def check(self, ranks: int) -> None:
        """ValueError if so many ranks do not bear f bad ones."""
        check_f(self.rule, ranks, self.f)
        m = self.parameters.get("m")
        if m is not None and not 1 <= m <= ranks - self.f:
            raise ValueError(f"m is 1 to n − f = {ranks - self.f}, not {m!r}")
