"""What a step costs by a model of the machine, plain and with sketches; and which layers are worth their price.

The model knows a layer's arithmetic (a roofline: multiply-adds, plus numbers moved times the machine's balance) and
what every layer, every hook and every step costs the host in Python and launches. On a CPU the two add up; on a GPU the
larger one is the step, so sketches of a large model are paid in memory traffic and those of a small one in launches.
What the layers do not tell is guessed: 64 examples per batch, 512 tokens per example where there are embeddings or
layer norms, positions of images by channels. It is meant to rank layers and to be right within a factor of two.
Gradient norms are taken from `p.grad` where the parameters hold one when the sketcher is made; otherwise a weight
counts as the fourth root of its size: nearer to "all matrices alike" than to "all entries alike". The last layer counts
as much as the largest: alone, a head gives orders as good as any other layer's, or better (docs/overhead.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from heeler.sketch.layer_rules.base import Cost
from heeler.sketch.sketched_layer import SketchedLayer
from heeler.sketch.survey import has_tokens, last_layer, tied_groups

Layers = str | Callable[[str, nn.Module], bool] | None

SHARE = 0.01
"""Of a plain step: what the chosen layers' sketches may cost by default."""
BATCH, TOKENS, NOMINAL = 64.0, 512.0, 1024
"""Of a batch, of a sequence and of a sketch, where the sizes are not known."""
COMPILE_SECONDS = 0.3
"""Of a compiled model, for every layer: a second variant, with sketches, is compiled. LeNet's five layers took 1.5 s
under CUDA graphs on an H200 (`python -m benchmarks.clock cost --only LeNet`, 2026-11-19)."""
TINY = 1e5
"""Multiply-adds per example below which all layers are sketched on a CPU: such a step is all overhead anyway."""


@dataclass(frozen=True)
class Machine:
    """Multiply-adds per second, multiply-adds per number moved, and seconds of the host."""

    rate: float
    balance: float
    layer: float
    """Of the host, for every layer of a plain step."""
    step: float
    """And for the rest of it: the loader, the loss, the optimizer."""
    example: float
    """And for every example that the loader reads."""
    tap: float
    """Of the host, for every layer that is sketched."""
    sketch: float
    """And for the rest of a sketched step: finding the examples, storing their sketches."""
    number: float
    """And for every number of a sketch that is stored."""
    output: float
    """And for norms of gradients at the model's output."""
    overlaps: bool
    """The host runs ahead of the device."""
    fuses: bool
    """The fused kernels run here, which leave columns unread."""

    def seconds(self, flops: float, numbers: float, tokens: float, batch: float = BATCH) -> float:
        return batch * tokens * (flops + self.balance * numbers) / self.rate

    def tap_seconds(self, cost: Cost, k: float, tokens: float, batch: float = BATCH) -> float:
        unread = cost.unread if self.fuses else 0.0
        return self.seconds(cost.tap_flops - k * unread, cost.tap_numbers - unread, tokens, batch)


MACHINES = {
    "cpu": Machine(
        rate=3e10,
        balance=10.0,
        layer=4e-5,
        step=1.5e-4,
        example=5e-6,
        tap=6e-5,
        sketch=4e-4,
        number=5e-9,
        output=2e-5,
        overlaps=False,
        fuses=False,
    ),
    "cuda": Machine(
        rate=1e14,
        balance=100.0,
        layer=1e-4,
        step=3e-4,
        example=2e-6,
        tap=1.2e-4,
        sketch=4e-4,
        number=3e-9,
        output=2e-5,
        overlaps=True,
        fuses=True,
    ),
}


def choose(
    candidates: list[SketchedLayer], layers: Layers, share: float, dim: int, device: torch.device, compiled: bool
) -> list[SketchedLayer]:
    """The layers to sketch, in the model's order. compiled: the host's part costs nothing."""
    if layers is None:
        costs = [layer.rule.cost(layer.module, math.sqrt(dim)) for layer in candidates]
        work = sum(c.tokens * c.own_flops for c in costs if c is not None)
        tiny = None not in costs and work < TINY and (compiled or device.type == "cpu")
        return list(candidates) if tiny else within_share(candidates, share, dim, device, compiled)
    if callable(layers):
        return [layer for layer in candidates if layers(layer.name, layer.module)]
    if layers == "all":
        return list(candidates)
    raise ValueError(
        f'layers={layers!r} is not understood: give None, "all", or a function (name, module) -> bool. What sketches '
        "may cost is said once for all, Sampler(budget=...)"
    )


class StepPrice(NamedTuple):
    """Seconds of a model by the cost model."""

    step: float
    """Of a plain step."""
    sketches: float | None
    """That sketches add to it; None: no price is known."""
    start: float = 0.0
    """Once, before the first sketches."""
    on_gpu: bool = False
    output: float = 0.0
    """That norms of gradients at the model's output add to it: see `output_norms`."""


@dataclass(frozen=True)
class Prices:
    """What a step of the model takes, and what sketches of each layer add to it, in the cost model's seconds."""

    layers: float
    """The layers of a plain step."""
    host: float
    """The host's part of a plain step."""
    device: float
    """The device's; on a CPU, what its arithmetic takes."""
    machine: Machine
    batch: float
    groups: list[tuple[float, list[SketchedLayer]]]
    """(price, layers that are sketched together); without those that are known to be too expensive."""
    output_numbers: float
    """Of the model's output, per token; 0 where that is not known."""
    tokens: float

    @property
    def step(self) -> float:
        """A plain step."""
        return self._longer(self.host, self.device)

    def sketches(self, chosen: list[SketchedLayer], dim: int) -> float | None:
        """What sketches of `dim` numbers of these layers add to a step; None if one of them has no price."""
        wanted = set(chosen)
        paid = [(price, group) for price, group in self.groups if not wanted.isdisjoint(group)]
        if sum(len(group) for _, group in paid) < len(wanted):
            return None
        host = self.machine.sketch + self.machine.number * dim * self.batch
        taps = sum(price for price, _ in paid)
        return self._longer(self.host + host, self.device) - self.step + taps

    @property
    def output(self) -> float:
        """What norms of gradients at the model's output add to a step: a hook, and reading these gradients once."""
        read = self.machine.seconds(0.0, self.output_numbers, self.tokens, self.batch)
        return self._longer(self.host + self.machine.output, self.device + read) - self.step

    def ratio(self, chosen: list[SketchedLayer], dim: int) -> float | None:
        """A step with these layers sketched over a plain one; None if one of them has no price."""
        added = self.sketches(chosen, dim)
        return None if added is None else 1 + added / self.step

    def _longer(self, host: float, device: float) -> float:
        return max(host, device) if self.machine.overlaps else host + device


def prices(
    candidates: list[SketchedLayer], dim: int, device: torch.device, compiled: bool, batch: float = BATCH
) -> Prices:
    """Of all layers of a model that can be sketched, by groups that are sketched together."""
    machine = MACHINES.get(device.type, MACHINES["cuda"])
    sequences = has_tokens(candidates)

    def tokens(cost: Cost) -> float:
        return TOKENS if sequences and cost.tokens == 1.0 else cost.tokens

    groups: list[tuple[list[SketchedLayer], list[Cost]]] = []
    of_device = 0.0
    for group in tied_groups(candidates):
        costs = [layer.rule.cost(layer.module, math.sqrt(dim)) for layer in group]
        known = [c for c in costs if c is not None]
        of_device += sum(machine.seconds(c.own_flops, c.own_numbers, tokens(c), batch) for c in known)
        if len(known) == len(group):
            groups.append((group, known))
    of_host = 0.0 if compiled else machine.layer * len(candidates)
    layers = max(of_host, of_device) if machine.overlaps else of_host + of_device
    pays_host = not compiled and (not machine.overlaps or of_host > of_device)
    pays_device = not machine.overlaps or of_device >= of_host
    priced: list[tuple[float, list[SketchedLayer]]] = []
    for group, known in groups:
        price = 5e-6 * len(known)  # kernels of no size
        if pays_host:
            price += machine.tap * len(known)
        if pays_device:
            price += sum(machine.tap_seconds(c, math.sqrt(dim), tokens(c), batch) for c in known)
        priced.append((price, group))
    host = of_host + machine.step + machine.example * batch
    last = last_layer(candidates)
    head = 0.0 if last is None else float(next(iter(last.parameters.values())).shape[0])
    return Prices(layers, host, of_device, machine, batch, priced, head, TOKENS if sequences else 1.0)


def within_share(
    candidates: list[SketchedLayer], share: float, dim: int, device: torch.device, compiled: bool
) -> list[SketchedLayer]:
    """Greedily by worth per cost, until sketches cost `share` of the layers' own work; the best layer at least."""
    priced = prices(candidates, dim, device, compiled)
    last = last_layer(candidates)
    worths = worth_of([group for _, group in priced.groups], last)
    ranked = sorted(
        zip(worths, priced.groups, strict=True),
        key=lambda item: (item[0] / item[1][0], last in item[1][1]),  # of equals the last layer
        reverse=True,
    )
    by_worth = [item for _, item in ranked]
    chosen: set[SketchedLayer] = set()
    spent = 0.0
    for price, group in by_worth:
        if spent + price <= share * priced.layers:
            spent += price
            chosen.update(group)
    sure = [group for _, group in by_worth if not all(layer.rule.may_miss for layer in group)]
    if all(layer.rule.may_miss for layer in chosen):
        chosen.update(sure[0] if sure else candidates)
    return [layer for layer in candidates if layer in chosen]


def worth_of(groups: list[list[SketchedLayer]], last: SketchedLayer | None) -> list[float]:
    """What each group is worth: its squared gradient norm where there are gradients, else a guess by size and place."""
    known = [_square(group) for group in groups]
    if any(known):
        return known
    guessed = [sum(p.numel() for p in _parameters(group)) ** 0.25 for group in groups]
    return [max(guessed) if last in group else guess for guess, group in zip(guessed, groups, strict=True)]


def _square(group: list[SketchedLayer]) -> float:
    grads = [p.grad for p in _parameters(group) if p.grad is not None]
    return sum(float(g.detach().float().pow(2).sum()) for g in grads)


def _parameters(group: list[SketchedLayer]) -> list[nn.Parameter]:
    return list(dict.fromkeys(p for layer in group for p in layer.parameters.values()))
