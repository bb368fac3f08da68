"""The ordering rules by name, behind one small base class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heeler.herding.rules.baselines import BlockReversal, FlipFlop, Incremental, Once, Random, Stratified
from heeler.herding.rules.herd import Herd
from heeler.herding.rules.online import Grab, Recursive
from heeler.herding.rules.pairs import CdGrab, KernelHalving, Pair, Walk
from heeler.herding.rules.protocol import OrderingRule

RULES: dict[str, type[OrderingRule]] = {
    "herd": Herd,
    "random": Random,
    "stratified": Stratified,
    "once": Once,
    "flipflop": FlipFlop,
    "block-reversal": BlockReversal,
    "incremental": Incremental,
    "grab": Grab,
    "pair": Pair,
    "walk": Walk,
    "kh": KernelHalving,
    "recursive": Recursive,
    "cd-grab": CdGrab,
}
"""Name → class, `herd`, the default, first. Rules of your own may be added, if they take what `make_rule` gives."""
ALIASES = {"id-grab": "pair", "id-grab-mean": "grab"}
"""With shards, pair balance on each worker is ID-GraB, and GraB on each worker its mean variant."""
REMOVED = {
    "sweeps": "the rule 'sweeps' of 0.2 is no longer part of the library: use 'herd', which also balances steps",
    "greedy": "the rule 'greedy' of 0.2 is no longer part of the library, since it trains worse than random at large "
    "learning rates: use 'herd'",
}


def rule_names() -> list[str]:
    """All names that `make_rule` knows."""
    return [*RULES, *ALIASES]


def rule_class(name: str) -> type[OrderingRule]:
    """The class behind a name, which says what the rule needs and can do."""
    known = ALIASES.get(name, name)
    if known not in RULES:
        missing = f"there is no rule {name!r}: choose one of {', '.join(rule_names())}"
        raise ValueError(REMOVED.get(name, missing))
    return RULES[known]


def check_uses_strata(name: str) -> None:
    """Raise if strata make no difference to the rule."""
    if not rule_class(name).uses_strata:
        able = " and ".join(repr(other) for other in RULES if RULES[other].uses_strata)
        raise ValueError(f"the rule {name!r} makes no use of strata: leave them out, or use one that does, {able}")


def make_rule(
    name: str,
    examples: int,
    dim: int | None = None,
    *,
    seed: int = 0,
    batch_size: int = 1,
    shard_sizes: Sequence[int] | None = None,
    strata: Any = None,
    **options: Any,
) -> OrderingRule:
    """An ordering rule by name.

    Args:
        name: one of `rule_names()`.
        examples: N, over all workers.
        dim: K, the length of the vectors; not needed by rules without vectors.
        seed: of the first order and all other random numbers.
        batch_size: examples per worker in a batch.
        shard_sizes: examples of each worker, adding up to N; None for one worker. Worker j owns a stretch of numbers.
        strata: (N,) integers or strings, the examples' classes, sources or the like, for rules that use them.
        options: the rule's own, as its class documents them: `c` of `walk`, `depth` of `recursive`, and so on.
    """
    make: Callable[..., OrderingRule] = rule_class(name)
    if strata is not None:  # not given to rules that know nothing of them
        check_uses_strata(name)
        options["strata"] = strata
    return make(examples, dim, seed=seed, batch_size=batch_size, shard_sizes=shard_sizes, **options)
