"""What is compared: the plain task, examples replicated, mechanisms that raise diversity, and Heeler's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.rules import rule_names
from experiments.setup import Run
from experiments.tasks import get_task, settings

MECHANISMS = ("none", "dropout", "langevin", "quantize")
DROPOUT = 0.5
PLAIN = "plain"
REPLACEMENT = "replacement"


@dataclass(frozen=True)
class Variant:
    """One line of the comparison."""

    name: str = PLAIN
    rule: str = "random"
    mechanism: str = "none"
    replication: int = 1
    replacement: bool = False
    """Every batch drawn from all examples, as the theory has it, not what an epoch has left."""

    def run(self, task: str, **changes: Any) -> Run:
        """A run of this variant: one worker, plain SGD at a constant rate, as in the paper."""
        options = dict(changes.pop("options", {}))
        if self.replication > 1:
            options["replication"] = self.replication
        if self.replacement:
            options["replacement"] = True
        if self.mechanism != "none":
            options["mechanism"] = self.mechanism
        plain: dict[str, Any] = {
            "workers": 1,
            "shards": "global",
            "optimizer": "sgd",
            "momentum": 0.0,
            "decay_every": 0,
            "clip": 0.0,
        }
        return settings(get_task(task), self.rule, label=self.name, options=options, **plain, **changes)


def variants(
    mechanisms: Sequence[str] = MECHANISMS, replications: Sequence[int] = (), rules: Sequence[str] = ("random",)
) -> list[Variant]:
    """The plain task, reshuffled every epoch, first; then one change at a time. A rule may be "replacement", too."""
    rules = [rule for rule in rules if rule != "random"]
    unknown = [m for m in mechanisms if m not in MECHANISMS]
    unknown += [r for r in rules if r not in (*rule_names(), REPLACEMENT)]
    if unknown:
        raise ValueError(
            f"no such mechanism or order: {', '.join(unknown)}; mechanisms are {', '.join(MECHANISMS)}, orders "
            f"{', '.join(rule_names())}, and {REPLACEMENT}"
        )
    found = [Variant()] if "none" in mechanisms else []
    found += [Variant(f"replicated {r}×", replication=r) for r in replications if r > 1]
    found += [Variant(mechanism, mechanism=mechanism) for mechanism in mechanisms if mechanism != "none"]
    found += [Variant("with replacement", replacement=True)] if REPLACEMENT in rules else []
    return found + [Variant(f"order {rule}", rule=rule) for rule in rules if rule != REPLACEMENT]
