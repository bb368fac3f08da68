"""The checked arguments of `install`, which the aggregators for DDP and FSDP share."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from heeler.robust.gram_weights import VECTOR_RULES, check_f, check_m

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
        """ValueError if the rule does not tolerate f bad ones among so many ranks."""
        check_f(self.rule, ranks, self.f)
        if self.parameters.get("m") is not None:
            check_m(self.parameters["m"], ranks - self.f)
