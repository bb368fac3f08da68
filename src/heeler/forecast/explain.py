"""`explain`: everything that can be said before a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from heeler.forecast import findings as find
from heeler.forecast import run_costs, step_timing
from heeler.forecast.explanation_text import describe
from heeler.forecast.findings import Finding
from heeler.forecast.run_costs import Needs
from heeler.forecast.step_timing import Timing
from heeler.herding.strata import strata_of
from heeler.herding.subset import Subset
from heeler.ordering.distributed.ranks import find_ranks
from heeler.ordering.pace import BUDGET, REFRESH, Pace
from heeler.ordering.setup import ONE_LEVEL, Setup, default_dim, epoch_costs
from heeler.sketch import Coverage, Sketcher
from heeler.sketch.compiled import HooksNotTraced
from heeler.sketch.coverage import coverable
from heeler.sketch.prices import Layers, StepPrice


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. `print` it, or take `as_dict()` for JSON."""

    model: str
    parameters: int
    """Trainable ones."""
    examples: int
    """Of all workers."""
    batch_size: int
    workers: int
    epochs: int | None
    order: str
    refresh: int
    """How many epochs old a sketch may get; 1 where sketches are taken in every epoch."""
    pace: Pace
    """In which epochs sketches are taken, as far as the budget allows."""
    steps: int
    """Per epoch, of each worker."""
    dim: int
    """Dimensions of a sketch."""
    exact: bool
    """Whether a sketch is the exact gradient of what is covered."""
    sketched: list[str]
    """The names of the layers that sketches cover."""
    coverage: Coverage | None
    """None where no gradient is needed, or no layer can be sketched."""
    estimated_ratio: float | None
    """A step with sketches over a plain one, by the cost model that chooses the layers: right within a factor of two or
    so."""
    timing: Timing | None
    """The same, measured; None without `loss`."""
    needs: Needs
    findings: list[Finding]

    @property
    def works(self) -> bool:
        """Whether nothing was found that stops it."""
        return all(finding.level != "stops" for finding in self.findings)

    @property
    def epoch_seconds(self) -> float | None:
        """Of a plain epoch's steps, where they were measured."""
        return None if self.timing is None else self.steps * self.timing.plain_ms / 1e3

    @property
    def ratio(self) -> float | None:
        """An epoch in which sketches are taken over a plain one: measured where it was, with the solve at its end."""
        if self.timing is None or self.epoch_seconds is None:
            return self.estimated_ratio
        return self.timing.ratio + self.needs.solve_seconds / self.epoch_seconds

    @property
    def run_ratio(self) -> float | None:
        """The whole run over a plain one, where the number of epochs is known: most epochs take no sketches."""
        if self.ratio is None or self.epochs is None:
            return None
        return run_costs.run_time(self.epochs, self.ratio, self.pace) / self.epochs

    def as_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dicts of these."""
        plain = dataclasses.asdict(dataclasses.replace(self, coverage=None, pace=None))  # type: ignore[arg-type]
        plain["budget"] = plain.pop("pace") or self.pace.budget
        plain["sketched_epochs"] = None if self.epochs is None else self.pace.taken(self.epochs)
        shown = ("share_of_parameters", "covered", "left_out")
        plain["coverage"] = self.coverage and {name: getattr(self.coverage, name) for name in shown}
        return {**plain, "works": self.works, "ratio": self.ratio, "run_ratio": self.run_ratio}

    def __str__(self) -> str:
        return describe(self)


def explain(
    model: nn.Module,
    dataset: Any,
    batch_size: int,
    *,
    epochs: int | None = None,
    workers: int | None = None,
    order: str = "herd",
    dim: int | None = None,
    strata: Any = None,
    refresh: int = REFRESH,
    budget: float | None = BUDGET,
    layers: Layers = None,
    shards: Literal["global", "local"] = "global",
    loss: Callable[[nn.Module], Tensor] | None = None,
    loader: Any = None,
    trainer: Any = None,
) -> Explanation:
    """Report, before a long run, what will be covered, what it will cost, when it can pay, and what will not work.

        print(heeler.explain(model, dataset, 64, epochs=30, loss=lambda model: loss_fn(model(x), y)))

    Nothing is trained and nothing of the model changes. `batch_size`, `order`, `dim`, `strata`, `refresh`,
    `budget` and `shards` are as for `heeler.Sampler`.

    Args:
        model: as it will be given to `heeler.attach`.
        dataset: as it will be given to `heeler.Sampler`, or the number of its examples.
        epochs: how long the run will be.
        workers: by default `torch.distributed`'s, else one.
        layers: as for `heeler.attach`.
        loss: takes a model and returns its loss on one typical batch. With it the cost of a step is measured, on
            copies of the model, in two or three seconds; without it, estimated.
        loader: the training loader, to be checked.
        trainer: the framework's object, to be checked: transformers' `TrainingArguments` or `Trainer`, an
            `Accelerator`, Lightning's `Trainer`.
    """
    for name, value in (("epochs", epochs), ("workers", workers)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    ranks = find_ranks(None)
    workers = workers or (1 if ranks is None else len(ranks.workers))
    own = dataset if isinstance(dataset, int) else len(dataset) if hasattr(dataset, "__len__") else 0
    examples = own * workers if shards == "local" else own
    given = None if strata is None or own < 1 else strata_of(strata, own)
    setup = Setup(Subset(max(own, 1)), batch_size, order, dim, refresh, budget, 0, workers, 0, shards, False, given)
    rule = setup.rule
    findings = [*find.of_parts(model, dataset, own), *find.of_run(examples, batch_size * workers, epochs)]
    findings += find.of_loops(rule.c_sources())

    everything, prices = coverable(model, batch_size)

    def length(covered: int) -> int:
        return setup.sketch_length(covered, everything, max(examples, 1), prices)

    options: dict[str, Any] = {"dim": length, "layers": layers, "share": setup.layer_share}
    sketcher = _sketcher(model, options, findings) if rule.needs_vectors else None
    dim = sketcher.dim if sketcher is not None else dim or default_dim(max(examples, 1))
    if shards == "local" and not rule.coordinates_shards:  # each worker orders its shard alone
        needs = run_costs.needs(order, own, dim, 1, strata=given)
    else:
        dealt = shards == "global"
        needs = run_costs.needs(order, examples, dim, workers, dealt=dealt, strata=given)
    price = StepPrice(0.0, 0.0) if sketcher is None else sketcher.price(batch_size)
    costs = epoch_costs(setup, max(examples, 1), price, dim)
    timing = None
    if loss is not None and sketcher is not None and all(finding.level != "stops" for finding in findings):
        try:
            timing = step_timing.measure(model, loss, options)
        except Exception as error:
            do = "check loss=, or leave it out for an estimate"
            findings.append(find.note(f"a step could not be measured: {error}", do))
    found = Explanation(
        model=_name(model),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        examples=examples,
        batch_size=batch_size,
        workers=workers,
        epochs=epochs,
        order=order,
        refresh=refresh if rule.keeps_table else 1,
        pace=Pace(refresh if rule.keeps_table else 1, budget if rule.keeps_table else None, costs),
        steps=-(-examples // (batch_size * workers)),
        dim=dim,
        exact=sketcher is not None and sketcher.exact,
        sketched=[] if sketcher is None else sketcher.sketched,
        coverage=None if sketcher is None else sketcher.coverage,
        estimated_ratio=None if sketcher is None or price.sketches is None else 1 + price.sketches / price.step,
        timing=timing,
        needs=needs,
        findings=findings,
    )
    if rule.solves_in_background and own > ONE_LEVEL:
        do = "give the sampler order=heeler.two_levels(), on several workers with shards='local'"
        findings.append(find.limits(f"one order over {own:,} examples takes long to find and much memory", do))
    found_by_integration = trainer is not None and shards != "local"
    if strata is None and rule.uses_strata and not found_by_integration:
        findings += find.of_labels(dataset)
    if loader is not None:
        findings += find.of_loader(loader, own, batch_size)
    if trainer is not None:
        findings += find.of_trainer(trainer)
    if sketcher is not None:
        findings += find.of_coverage(sketcher.coverage)
    findings += find.of_cost(needs, found.ratio, found.run_ratio, epochs)
    findings.sort(key=lambda finding: ("stops", "limits", "note").index(finding.level))
    return found


def _sketcher(model: nn.Module, options: dict[str, Any], findings: list[Finding]) -> Sketcher | None:
    """The sketcher that `attach` would make, its hooks taken off again."""
    try:
        sketcher = Sketcher(model, **options)
    except HooksNotTraced as error:
        findings.append(find.stops("the compiled model has been called already", str(error)))
        return _sketcher(model._orig_mod, options, [])  # type: ignore[arg-type]
    except ValueError as error:
        findings.append(find.stops(str(error), "docs/layer-rules.md says how to write a rule for a layer"))
        return None
    sketcher.detach()
    return sketcher


def _name(model: nn.Module) -> str:
    inner: Any = getattr(model, "_orig_mod", model)
    return type(inner.module if isinstance(inner, nn.parallel.DistributedDataParallel) else inner).__name__
