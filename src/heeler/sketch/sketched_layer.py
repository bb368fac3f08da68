"""The modules that can be sketched, each with its rule and the parameters it covers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from heeler.notices import warn
from heeler.sketch.batch import RowLayout
from heeler.sketch.layer_rules import LayerRule, LeftOut, find_rule
from heeler.sketch.layer_rules.embedding import EmbeddingRule
from heeler.sketch.layer_rules.norm import LastDimensions
from heeler.sketch.matrices import AnyMatrix, AnyVector, ExactMatrix, ExactVector, Matrix, MatrixSpec, Vector

_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def clean_name(name: str) -> str:
    """The name without what DDP, FSDP, checkpoint wrappers and torch.compile put into it.

    Projections are drawn from names, so a resumed run may wrap its model differently.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@dataclass(eq=False)
class SketchedLayer:
    """A module that is sketched, or can be."""

    name: str
    module: nn.Module
    rule: LayerRule
    parameters: dict[str, nn.Parameter]
    """By the name that the rule gave, those that require gradients."""
    matrices: list[AnyMatrix] = field(default_factory=list)
    vectors: dict[str, AnyVector] = field(default_factory=dict)
    like: Tensor = field(default_factory=lambda: torch.empty(0))
    """An empty tensor of the parameters' dtype."""
    problem: str = ""
    """Why a call of this module could not be sketched."""
    broken: bool = False
    """It is sketched no more."""
    layout: RowLayout | None = None
    """How its input holds the examples, as far as a test has told."""
    noise: float = 0.0
    """How much its input differs from run to run on the same examples, by that test: see `row_ownership`."""

    def lie(self, layout: RowLayout | None) -> None:
        """A test has told how its input holds the examples; None: no test has."""
        self.layout = layout

    def measure(self, noise: float) -> None:
        self.noise = noise

    def miss(self, problem: str, broken: bool) -> None:
        """A call of it has no part in sketches; broken: nor has any other."""
        self.problem, self.broken = problem, broken

    def leave_out(self, reason: str) -> None:
        """From now on it has no part in sketches; said once."""
        leave_out([self], reason)

    def take_in(self) -> None:
        """It was left out, and has its part in sketches again; how its input lies is tested once more."""
        self.miss("", broken=False)
        self.lie(None)

    def fail(self, error: Exception) -> None:
        """A rule's error costs the sketch this layer, never the training run its step."""
        self.leave_out(f"its rule failed: {error!r}")

    def now(self) -> dict[str, nn.Parameter]:
        """Its parameters as they are now: others of the same shape may have taken their places for good.

        `functional_call` puts tensors there that are no parameters.
        """
        found = {}
        for local, parameter in self.parameters.items():
            owner, _, name = local.rpartition(".")
            other = getattr(self.module.get_submodule(owner), name, None)
            found[local] = parameter
            if isinstance(other, nn.Parameter) and other.is_leaf and other.shape == parameter.shape:
                found[local] = other
        return found

    def columns_of(self, local: str) -> slice:
        """Where a parameter lies in the exact gradient."""
        size = self.parameters[local].numel()
        if local in self.vectors:
            start = self.vectors[local].at  # type: ignore[union-attr]
        else:
            at = {m.spec.weight: m.weight_at for m in self.matrices}  # type: ignore[union-attr]
            start = at[local] if local in at else {m.spec.bias: m.bias_at for m in self.matrices}[local]  # type: ignore[union-attr]
        return slice(start, start + size)

    def sketch_gradient(self, local: str, gradient: Tensor) -> Tensor:
        """The sketch (K,) of a gradient of one of its parameters: what the examples' parts add up to."""
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        if local in self.vectors:
            return self.vectors[local].write(gradient.flatten()[None].float())[0]
        for matrix in self.matrices:
            if matrix.spec.weight == local:
                return matrix.of_weight(gradient)
            if matrix.spec.bias == local:
                return matrix.of_bias(gradient)
        raise KeyError(local)

    def sketch_with(self, matrices: list[AnyMatrix], vectors: dict[str, AnyVector], device: torch.device) -> None:
        """Its projections, or its places in the exact gradient."""
        self.matrices, self.vectors = matrices, vectors
        self.like = torch.empty(0, dtype=next(iter(self.parameters.values())).dtype)
        self.move(device)

    def move(self, device: torch.device) -> None:
        for part in (*self.matrices, *self.vectors.values()):
            part.move(device)


def leave_out(layers: list[SketchedLayer], reason: str) -> None:
    """Leave layers out of the sketches from now on, and say so in one sentence."""
    layers = [layer for layer in layers if not layer.broken]
    for layer in layers:
        layer.miss(reason, broken=True)
    if layers:
        names = ", ".join(layer.name or "the model" for layer in layers[:4])
        names += f" and {len(layers) - 4} more layers" if len(layers) > 4 else ""
        warn("left out of the sketches: %s; %s", names, reason)


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


def lay_out(layers: list[SketchedLayer], found: Survey, device: torch.device) -> None:
    """Give every layer its places in the exact gradient: covered parameters side by side, in the model's order."""
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
