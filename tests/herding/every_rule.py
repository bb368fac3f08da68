"""What it takes to make any named rule: strata, for those that need them."""

from typing import Any

import numpy as np

from heeler.herding import OrderingRule, make_rule, rule_class


def needed(order: Any, examples: int) -> dict[str, Any]:
    """Options without which the named rule cannot be made; none for one that is made already."""
    needs = isinstance(order, str) and rule_class(order).needs_strata
    return {"strata": np.arange(examples) % 3} if needs else {}


def make_any(name: str, examples: int, dim: int | None = None, **options: Any) -> OrderingRule:
    return make_rule(name, examples, dim, **needed(name, examples), **options)
