"""A rule to be: its class and options, made when a sampler knows the rest (how many examples, workers, the seed)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from heeler.herding.rules.protocol import OrderingRule
from heeler.herding.subset import Subset


@dataclass(frozen=True, eq=False)
class Recipe:
    """What `heeler.order_by` returns; `Sampler(order=...)` takes it."""

    kind: type[OrderingRule]
    """The rule's class, which takes what `make_rule` gives, `portions` and `options`."""
    options: Mapping[str, Any]

    def make(self, examples: int, dim: int | None, **common: Any) -> OrderingRule:
        """The rule; arguments as in `make_rule`."""
        kind: Any = self.kind
        return kind(examples, dim, **common, **self.options)

    def within(self, subset: Subset) -> Recipe:
        """The same for the chosen examples of a dataset."""
        return self

    @property
    def digest(self) -> str:
        """A short text that differs where arrays and numbers among the options do."""
        found = hashlib.sha256(self.kind.__name__.encode())
        for name, value in sorted(self.options.items()):
            plain = np.ascontiguousarray(value).tobytes() if isinstance(value, np.ndarray) else None
            if plain is None:
                plain = repr(value).encode() if isinstance(value, int | float | str | bool) else b""
            found.update(name.encode() + plain)
        return f"{self.kind.__name__} {found.hexdigest()[:16]}"
