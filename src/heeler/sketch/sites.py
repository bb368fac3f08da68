"""Sites: the modules that can be tapped, each with its rule and the parameters it covers."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch.matrices import AnyMatrix, AnyVector, ExactMatrix, ExactVector, Matrix, MatrixSpec, Vector
from heeler.sketch.rules import LeftOut, Rule, find_rule
from heeler.sketch.rules.embedding import EmbeddingRule
from heeler.sketch.rules.norm import LastDimensions

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def clean_name(name: str) -> str:
    """The name without what DDP, FSDP, checkpoint wrappers and torch.compile put into it.

    Projections are drawn from names, so a resumed run may wrap its model differently.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(eq=False)
class Site:
    """A tapped module."""

    name: str
    module: nn.Module
    rule: Rule
    parameters: dict[str, nn.Parameter]
    """By the name that the rule gave, those that require gradients."""
    matrices: list[AnyMatrix] = field(default_factory=list)
    vectors: dict[str, AnyVector] = field(default_factory=dict)
    like: Tensor = field(default_factory=lambda: torch.empty(0))
    """An empty tensor of the parameters' dtype."""
    problem: str = ""
    """Why a call of this module could not be tapped."""
    broken: bool = False
    """Its rule failed: it is tapped no more."""

    def fail(self, error: Exception) -> None:
        """A rule's error costs the sketch this layer, never the training run its step."""
        self.problem, self.broken = f"its rule failed: {error!r}", True
        logging.getLogger("heeler").warning("%s is no longer sketched: %s", self.name or "the model", self.problem)

    def move(self, device: torch.device) -> None:
        for part in (*self.matrices, *self.vectors.values()):
            part.move(device)


@dataclass
class Survey:
    """All of a model that bears on sketching."""

    names: dict[int, str]
    """id(parameter) → its first clean name; tied parameters have one name."""
    parameters: dict[str, nn.Parameter]
    """Trainable parameters by that name, in the model's order."""
    sites: list[Site]
    reasons: dict[str, str]
    """Why a parameter has no site, by name."""


def survey(model: nn.Module) -> Survey:
    """Find every site of the model, and a reason for every trainable parameter without one."""
    names: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        name = names.setdefault(id(parameter), clean_name(full_name))
        if parameter.requires_grad:
            parameters[name] = parameter

    sites: list[Site] = []
    reasons: dict[str, str] = {}
    claimed: set[int] = set()
    for full_name, module in model.named_modules():
        rule_class = find_rule(module)
        if rule_class is None or id(module) in claimed:
            continue
        own = {clean_name(n): p for n, p in module.named_parameters() if p.requires_grad}
        try:
            rule = rule_class(module)
        except LeftOut as reason:
            reasons.update({names[id(p)]: f"{type(module).__name__}: {reason}" for p in own.values()})
            claimed.update(id(child) for child in module.modules() if child is not module)
            continue
        if any("." in name for name in rule.parameter_names()):
            claimed.update(id(child) for child in module.modules() if child is not module)
        covered = {name: own[name] for name in rule.parameter_names() if name in own}
        if covered:
            sites.append(Site(clean_name(full_name), module, rule, covered))

    sites = _drop_half_seen(model, sites, names, reasons)
    _settle_hidden(sites)
    for name in parameters:
        reasons.setdefault(name, "no rule for the module that holds it")
    for site in sites:
        for parameter in site.parameters.values():
            reasons.pop(names[id(parameter)], None)
    return Survey(names, parameters, sites, reasons)


def _drop_half_seen(model: nn.Module, sites: list[Site], names: dict[int, str], reasons: dict[str, str]) -> list[Site]:
    """Leave out parameters of which the sites would see only a part of the gradient, and biases shared between weights.

    A shared bias meets the row projections of several weights, so its two parts could not be added up.
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    seen = Counter(id(p) for site in sites for p in site.parameters.values())
    for site in sites:
        biases = {spec.bias for spec in site.rule.matrices}
        for local, parameter in list(site.parameters.items()):
            if owners[id(parameter)] > seen[id(parameter)]:
                reasons[names[id(parameter)]] = "shared with a module that has no rule"
                del site.parameters[local]
            elif local in biases and seen[id(parameter)] > 1:
                reasons[names[id(parameter)]] = "a bias shared by several layers"
                del site.parameters[local]
    return [site for site in sites if site.parameters]


def _settle_hidden(sites: list[Site]) -> None:
    """Leave `hidden` to the layers of which a part may be read: those inside a model of many tokens an example.

    Not where tokens are few: there a tap costs next to nothing. Not the last layer, whose rows may be words or classes,
    and not a weight that another layer reads whole, as an embedding does: tied layers share one projection.
    """
    last = last_layer(sites) if has_tokens(sites) else None
    pairs = [(site, spec) for site in sites for spec in site.rule.matrices]
    whole = {id(site.parameters.get(spec.weight)) for site, spec in pairs if site is last or not spec.hidden}

    def settled(site: Site, spec: MatrixSpec) -> MatrixSpec:
        tied = spec.weight in site.parameters and id(site.parameters[spec.weight]) in whole
        return replace(spec, hidden=spec.hidden and last is not None and site is not last and not tied)

    for site in sites:
        site.rule.matrices = [settled(site, spec) for spec in site.rule.matrices]


def last_layer(sites: list[Site]) -> Site | None:
    """The last one with a weight matrix: a head, where the model has one."""
    return next((site for site in reversed(sites) if site.rule.matrices), None)


def has_tokens(sites: list[Site]) -> bool:
    """Whether the model looks as if its linear layers saw many tokens an example: it has embeddings or layer norms."""
    return any(isinstance(site.rule, (EmbeddingRule, LastDimensions)) for site in sites)


def draw(sites: list[Site], names: dict[int, str], dim: int, seed: int, device: torch.device) -> None:
    """Give every site its random projections. Tied parameters share a name, so they share projections."""
    for site in sites:

        def key(local: str | None, site: Site = site) -> str | None:
            return names[id(site.parameters[local])] if local in site.parameters else None

        site.matrices = [Matrix(spec, dim, seed, key(spec.weight), key(spec.bias)) for spec in site.rule.matrices]
        site.vectors = {
            local: Vector(size, dim, seed, names[id(site.parameters[local])])
            for local, size in site.rule.vectors.items()
            if local in site.parameters
        }
        _finish(site, device)


def lay_out(sites: list[Site], names: dict[int, str], offsets: dict[str, int], dim: int, device: torch.device) -> None:
    """Give every site its places in the exact sketch."""
    for site in sites:

        def at(local: str | None, site: Site = site) -> int | None:
            return offsets[names[id(site.parameters[local])]] if local in site.parameters else None

        site.matrices = [ExactMatrix(spec, dim, at(spec.weight), at(spec.bias)) for spec in site.rule.matrices]
        site.vectors = {
            local: ExactVector(dim, offsets[names[id(site.parameters[local])]])
            for local in site.rule.vectors
            if local in site.parameters
        }
        _finish(site, device)


def _finish(site: Site, device: torch.device) -> None:
    dtype = next(iter(site.parameters.values())).dtype
    site.like = torch.empty(0, dtype=dtype)
    site.move(device)


def covered_names(sites: list[Site], names: dict[int, str]) -> dict[str, str]:
    """Covered parameters → the rule that covers them."""
    result: dict[str, str] = {}
    for site in sites:
        for parameter in site.parameters.values():
            result[names[id(parameter)]] = type(site.rule).__name__
    return result


def tied_groups(sites: list[Site]) -> list[list[Site]]:
    """Sites that share a parameter belong together: tapping one without the other would sketch half a gradient."""
    groups: list[list[Site]] = []
    for site in sites:
        mine: Any = {id(p) for p in site.parameters.values()}
        joined = [g for g in groups if any(mine & {id(p) for p in s.parameters.values()} for s in g)]
        groups = [g for g in groups if g not in joined]
        groups.append([s for g in joined for s in g] + [site])
    return groups
