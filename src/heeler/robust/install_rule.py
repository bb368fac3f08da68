"""`install`: put a robust rule into a model that trains on several ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from heeler.robust.aggregator_settings import Settings
from heeler.robust.ddp_aggregator import Aggregator
from heeler.robust.fsdp_aggregator import ShardedAggregator, is_sharded


def install(
    model: nn.Module,
    rule: str = "multi-krum",
    f: int = 1,
    momentum: float = 0.9,
    distances: str = "sketch",
    **parameters: Any,
) -> Aggregator | ShardedAggregator:
    """Make `backward()` give a robust mean of the ranks' gradients. Call it once, on every rank, before the first step.

    Args:
        model: a `DistributedDataParallel`; or, for "median" and "trimmed-mean", a model of FSDP2's `fully_shard`.
        rule: "krum", "multi-krum", "geometric-median", "centered-clipping", "median" or "trimmed-mean".
        f: how many ranks may be bad. Krum and Multi-Krum need n > 2f + 2 ranks, the others n > 2f.
        momentum: β of each rank's momentum m ← βm + g; the rule aggregates m. Take momentum out of the optimizer and
            keep the learning rate. Without it the rules tolerate much less. 0: none.
        distances: of vector rules. "sketch": from sketches of 256 numbers, which protects from faults. "exact": from
            what was really sent, which also protects from ranks that lie about their gradients.
        parameters: `m` of "multi-krum", `nu` and `iterations` of "geometric-median", `tau` and `iterations` of
            "centered-clipping".

    Returns:
        The aggregator, which keeps the state: `metrics()`, `left_out`, `state_dict()`, `load_state_dict()`.
    """
    settings = Settings(rule, f, momentum, distances, parameters)
    if is_sharded(model):
        return ShardedAggregator(settings, model)
    return Aggregator(settings).attach(model)
