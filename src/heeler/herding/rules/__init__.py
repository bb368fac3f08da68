"""Every ordering rule of the field, by name, behind one small protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heeler.herding.rules.mean import Grab, Recursive
from heeler.herding.rules.pairs import CdGrab, KernelHalving, Pair, Walk
from heeler.herding.rules.protocol import Rule
from heeler.herding.rules.static import BlockReversal, FlipFlop, Incremental, Once, Random
from heeler.herding.rules.tabled import Greedy, Herd

RULES: dict[str, Callable[..., Rule]] = {
    "herd": Herd,
    "random": Random,
    "once": Once,
    "flipflop": FlipFlop,
    "block-reversal": BlockReversal,
    "incremental": Incremental,
    "grab": Grab,
    "pair": Pair,
    "walk": Walk,
    "kh": KernelHalving,
    "recursive": Recursive,
    "id-grab": Pair,  # with shards, pair balance on each worker is ID-GraB
    "id-grab-mean": Grab,  # and so is GraB, in its mean variant
    "cd-grab": CdGrab,
    "greedy": Greedy,
}
"""Name → what makes the rule, `herd`, the default, first. Rules of your own may be added."""


def rule_names() -> list[str]:
    """All names that `make_rule` knows."""
    return list(RULES)


def make_rule(
    name: str,
    examples: int,
    dim: int | None = None,
    *,
    seed: int = 0,
    batch_size: int = 1,
    shard_sizes: Sequence[int] | None = None,
    **options: Any,
) -> Rule:
    """An ordering rule by name.

    Args:
        name: one of `rule_names()`.
        examples: N, over all workers.
        dim: K, the length of the vectors; not needed by rules without vectors.
        seed: of the first order and all other random numbers.
        batch_size: examples of one worker in a batch.
        shard_sizes: examples of each worker, adding up to N; None for one worker. Worker j owns a stretch of numbers.
        options: the rule's own, as its class documents them: `passes` of `herd`, `c` of `walk`, and so on.
    """
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}: choose one of {', '.join(RULES)}")
    return RULES[name](examples, dim, seed=seed, batch_size=batch_size, shard_sizes=shard_sizes, **options)


__all__ = [
    "RULES",
    "BlockReversal",
    "CdGrab",
    "FlipFlop",
    "Grab",
    "Greedy",
    "Herd",
    "Incremental",
    "KernelHalving",
    "Once",
    "Pair",
    "Random",
    "Recursive",
    "Rule",
    "Walk",
    "make_rule",
    "rule_names",
]
