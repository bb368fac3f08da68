"""What one run is: a task, a rule, a seed and every setting, in one value that goes to JSON and back."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from experiments.rules import rule_names

OURS = ("herd", "sweeps")
"""The rules that get the library's default layers and sketches; the published ones see what their papers say."""
SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class Run:
    """One training run. Two runs that differ in `rule` alone start from the same weights and have the same budget."""

    task: str
    rule: str
    seed: int = 0
    label: str = ""
    """What tables and charts call it; runs with one label are seeds of one line. Empty: the rule's name."""
    epochs: int = 20
    batch_size: int = 16
    """Examples of one worker in a step."""
    workers: int = 1
    shards: str = "global"
    """"global": one order over all examples, dealt out to the workers; "local": each worker orders its own part."""
    sorted_shards: bool = False
    """Cut the shards from the examples sorted by label, so that the workers' data differ as much as they can."""
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    schedule: str = "constant"
    """What the rate does from step to step: "constant", or to zero at the run's end as a "cosine" or "linear"."""
    warmup: float = 0.0
    """The share of all steps over which the rate rises to `lr`, in a straight line."""
    decay_every: int = 0
    """Epochs after which a constant rate is multiplied by `decay`; 0: never."""
    decay: float = 0.1
    ema: float = 0.0
    """Decay per step of an average of the weights, which is measured beside the weights; 0: none."""
    clip: float = 0.0
    """Largest norm of a step's gradient; 0: no clipping."""
    dim: int | None = None
    """Numbers per sketch; None: what the library takes by default, exact gradients of small models."""
    exact: bool | None = None
    """Full gradients instead of sketches; None: as the task says for published rules, the library's default else."""
    scaled: bool = False
    """Sketches scaled as the optimizer steps: a setting of stored runs of 0.2, which nothing can be run with now."""
    strata: str = "none"
    """"labels": the sampler knows the examples' classes; `stratified` always does."""
    passes: int | None = None
    """Balance sweeps in a solve of `sweeps`; None: the rule's default."""
    block_size: int | None = None
    """Examples per block of `herd` in two levels; None: one level."""
    refresh: int | None = None
    """How many epochs old a sketch of our rules may get; None: the sampler's default."""
    layers: str | None = None
    """Layers that are tapped: "all", or "name:PREFIX|PREFIX" for modules whose name starts so;
    None: what the library taps by default for `herd`, all for the published rules."""
    device: str = "cpu"
    options: dict[str, Any] = field(default_factory=dict)
    """The task's own: limit, dropout, augment; and those of all tasks, see `tasks.base.resampled`."""
    measure_every: int = 1
    """Epochs from one measurement to the next; the last epoch is always measured."""
    bounds: bool = False
    """Measure every epoch's herding bound, on taps that then `random` has too; costs time, so not for timings."""

    def __post_init__(self) -> None:
        if self.rule not in rule_names():
            raise ValueError(f"there is no rule {self.rule!r}: choose among {', '.join(rule_names())}")
        if self.shards not in ("global", "local"):
            raise ValueError(f'shards must be "global" or "local", not {self.shards!r}')
        if self.optimizer not in ("sgd", "adamw"):
            raise ValueError(f'optimizer must be "sgd" or "adamw", not {self.optimizer!r}')
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, not {self.schedule!r}")
        if self.schedule != "constant" and self.decay_every:
            raise ValueError(f"a {self.schedule} schedule has no steps of decay: set decay_every to 0")
        if self.strata not in ("none", "labels"):
            raise ValueError(f'strata must be "none" or "labels", not {self.strata!r}')
        if self.rule == "stratified":
            object.__setattr__(self, "strata", "labels")
        if self.nesterov and not (self.optimizer == "sgd" and self.momentum > 0):
            raise ValueError("nesterov needs SGD with a momentum")
        for name, value in (("ema", self.ema), ("warmup", self.warmup)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} must lie in [0, 1), not {value}")
        for name in ("epochs", "batch_size", "workers", "dim", "block_size", "refresh", "measure_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if not self.lr > 0:
            raise ValueError(f"lr must be positive, not {self.lr}")

    @property
    def name(self) -> str:
        """The line in tables and charts that this run belongs to."""
        known = self.strata == "labels" and self.rule != "stratified"
        return self.label or (f"{self.rule}, strata" if known else self.rule)

    @property
    def step(self) -> int:
        """Examples in a step of all workers together."""
        return self.workers * self.batch_size

    @property
    def key(self) -> str:
        """A file name: readable, and different for different settings."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]
        readable = "".join(c if c.isalnum() or c in "-." else "_" for c in f"{self.task}-{self.name}")
        return f"{readable}-{self.seed}-{digest}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> Run:
        """The run that `to_json` described; a setting that does not exist is an error, not ignored."""
        return cls(**checked(settings))

    def but(self, **changes: Any) -> Run:
        """The same run with some settings changed."""
        return replace(self, **checked(changes))


def checked(settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`, if every name in it is one."""
    known = {f.name for f in fields(Run)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ValueError(f"no such setting: {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    return settings
