"""What of a model can be sketched: its layers with a rule, and a reason for every parameter that is in none."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn

from heeler.sketch.layer_rules import LeftOut, find_rule, found_norm
from heeler.sketch.layer_rules.embedding import EmbeddingRule
from heeler.sketch.layer_rules.norm import LastDimensions, LayerNormRule
from heeler.sketch.matrices import ExactMatrix, ExactVector, Matrix, MatrixSpec, Vector
from heeler.sketch.sketched_layer import SketchedLayer

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def clean_name(name: str) -> str:
    """The name without what DDP, FSDP, checkpoint wrappers and torch.compile put into it.

    Projections are drawn from names, so a resumed run may wrap its model differently.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass
class Survey:
    """All of a model that bears on sketching."""

    names: dict[int, str]
    """id(parameter) → its first clean name; tied parameters have one name."""
    parameters: dict[str, nn.Parameter]
    """Trainable parameters by that name, in the model's order."""
    layers: list[SketchedLayer]
    """All that can be sketched, in the model's order."""
    reasons: dict[str, str]
    """Why a parameter is in none of them, by name."""

    def covered(self, layers: list[SketchedLayer]) -> dict[str, str]:
        """Parameters that these layers cover → the rule that covers them."""
        return {self.names[id(p)]: type(layer.rule).__name__ for layer in layers for p in layer.parameters.values()}

    def count(self, layers: list[SketchedLayer]) -> int:
        """Entries of these parameters, all together."""
        return sum(self.parameters[name].numel() for name in self.covered(layers))


def survey(model: nn.Module) -> Survey:
    """Find every layer that can be sketched, and a reason for every trainable parameter that is in none."""
    names: dict[int, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        name = names.setdefault(id(parameter), clean_name(full_name))
        if parameter.requires_grad:
            parameters[name] = parameter

    layers: list[SketchedLayer] = []
    reasons: dict[str, str] = {}
    claimed: set[int] = set()
    for full_name, module in model.named_modules():
        rule_class = find_rule(module)
        if rule_class in (None, LayerNormRule):  # LayerNorm2d is often a subclass with a forward of its own
            rule_class = found_norm(module) or rule_class
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
            layers.append(SketchedLayer(clean_name(full_name), module, rule, covered))

    layers = _drop_half_seen(model, layers, names, reasons)
    _settle_hidden(layers)
    for name in parameters:
        reasons.setdefault(name, "no rule for the module that holds it")
    for layer in layers:
        for parameter in layer.parameters.values():
            reasons.pop(names[id(parameter)], None)
    return Survey(names, parameters, layers, reasons)


def _drop_half_seen(
    model: nn.Module, layers: list[SketchedLayer], names: dict[int, str], reasons: dict[str, str]
) -> list[SketchedLayer]:
    """Leave out parameters of whose gradient the layers would see only a part, and biases shared by several weights.

    A shared bias meets a row projection of each weight, so its parts could not be added up.
    """
    own = [module.named_parameters(recurse=False, remove_duplicate=False) for module in model.modules()]
    owners = Counter(id(p) for named in own for _, p in named)
    seen = Counter(id(p) for layer in layers for p in layer.parameters.values())
    for layer in layers:
        biases = {spec.bias for spec in layer.rule.matrices}
        for local, parameter in list(layer.parameters.items()):
            if owners[id(parameter)] > seen[id(parameter)]:
                reasons[names[id(parameter)]] = "shared with a module that has no rule"
                del layer.parameters[local]
            elif local in biases and seen[id(parameter)] > 1:
                reasons[names[id(parameter)]] = "a bias shared by several layers"
                del layer.parameters[local]
    return [layer for layer in layers if layer.parameters]


def _settle_hidden(layers: list[SketchedLayer]) -> None:
    """Leave `hidden` to the layers of which a part may be read: those inside a model of many tokens per example.

    Not where tokens are few: there a tap costs next to nothing. Not the last layer, whose rows may be words or classes,
    and not a weight of which another layer reads all, as an embedding does: tied layers share one projection.
    """
    last = last_layer(layers) if has_tokens(layers) else None
    pairs = [(layer, spec) for layer in layers for spec in layer.rule.matrices]
    read_fully = {id(layer.parameters.get(spec.weight)) for layer, spec in pairs if layer is last or not spec.hidden}

    def settled(layer: SketchedLayer, spec: MatrixSpec) -> MatrixSpec:
        tied = spec.weight in layer.parameters and id(layer.parameters[spec.weight]) in read_fully
        return replace(spec, hidden=spec.hidden and last is not None and layer is not last and not tied)

    for layer in layers:
        layer.rule.settle([settled(layer, spec) for spec in layer.rule.matrices])


def last_layer(layers: list[SketchedLayer]) -> SketchedLayer | None:
    """The last one with a weight matrix: a head, where the model has one."""
    return next((layer for layer in reversed(layers) if layer.rule.matrices), None)


def has_tokens(layers: list[SketchedLayer]) -> bool:
    """Whether the model looks as if its linear layers saw many tokens per example: it has embeddings or layer norms."""
    return any(isinstance(layer.rule, (EmbeddingRule, LastDimensions)) for layer in layers)


def draw(layers: list[SketchedLayer], found: Survey, dim: int, seed: int, device: torch.device) -> None:
    """Give every layer its random projections. Tied parameters share a name, so they share projections."""
    for layer in layers:
        key: dict[str | None, str] = {local: found.names[id(p)] for local, p in layer.parameters.items()}
        sizes = layer.rule.vectors.items()
        layer.sketch_with(
            [Matrix(s, dim, seed, key.get(s.weight), key.get(s.bias)) for s in layer.rule.matrices],
            {local: Vector(size, dim, seed, key[local]) for local, size in sizes if local in key},
            device,
        )


def assign_columns(layers: list[SketchedLayer], found: Survey, device: torch.device) -> None:
    """Give every layer its columns of the exact gradient: covered parameters side by side, in the model's order."""
    covered, offsets, dim = found.covered(layers), {}, 0
    for name, parameter in found.parameters.items():
        if name in covered:
            offsets[name] = dim
            dim += parameter.numel()
    for layer in layers:
        at: dict[str | None, int] = {local: offsets[found.names[id(p)]] for local, p in layer.parameters.items()}
        layer.sketch_with(
            [ExactMatrix(s, dim, at.get(s.weight), at.get(s.bias)) for s in layer.rule.matrices],
            {local: ExactVector(dim, at[local]) for local in layer.rule.vectors if local in at},
            device,
        )


def tied_groups(layers: list[SketchedLayer]) -> list[list[SketchedLayer]]:
    """Layers that share a parameter belong together: tapping one without the other would sketch half a gradient."""
    groups: list[list[SketchedLayer]] = []
    for layer in layers:
        mine = {id(p) for p in layer.parameters.values()}
        joined = [g for g in groups if any(id(p) in mine for other in g for p in other.parameters.values())]
        groups = [g for g in groups if g not in joined]
        groups.append([other for g in joined for other in g] + [layer])
    return groups
