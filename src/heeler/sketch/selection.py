"""Which layers to tap: all, a predicate's choice, or the most gradient norm for a given extra cost.

The cost model is a roofline per token: multiply-adds, plus numbers moved times the machine's balance (multiply-adds it
can do while it moves one number). It is meant to rank layers and to be right within a factor of two; docs/overhead.md
compares it with measurements. Gradient norms are taken from `p.grad` where the parameters hold one when the sketcher
is made; otherwise a weight counts as the square root of its size: between "all matrices alike" and "all entries
alike".
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from heeler.sketch.sites import Site, tied_groups

Layers = str | Callable[[str, nn.Module], bool] | None

DEFAULT_BUDGET = "1%"
BALANCE = {"cpu": 10.0, "cuda": 100.0}
FIXED = {"cpu": 1e4, "cuda": 5e4}
"""What a tap costs however small it is (Python, kernel launches), in multiply-adds of one example of a usual batch."""


TINY = 1e5
"""Multiply-adds an example below which the default taps everything: such a model's step is all overhead anyway."""


def choose(sites: list[Site], layers: Layers, dim: int, device: torch.device) -> list[Site]:
    """The sites to tap, in the model's order."""
    if layers is None:
        costs = [site.rule.cost(site.module, math.sqrt(dim)) for site in sites]
        tiny = None not in costs and sum(c.tokens * c.own_flops for c in costs if c is not None) < TINY
        layers = "all" if tiny else DEFAULT_BUDGET
    if callable(layers):
        return [site for site in sites if layers(site.name, site.module)]
    if layers == "all":
        return list(sites)
    return within_budget(sites, parse_budget(layers), dim, device)


def parse_budget(layers: str) -> float:
    """ "2%" → 0.02."""
    try:
        if not layers.endswith("%"):
            raise ValueError
        budget = float(layers[:-1]) / 100
    except ValueError:
        raise ValueError(
            f'layers={layers!r} is not understood: give None, "all", a budget such as "2%", '
            "or a function (name, module) -> bool"
        ) from None
    if not budget > 0:
        raise ValueError(f"layers={layers!r}: the budget must be positive")
    return budget


def within_budget(sites: list[Site], budget: float, dim: int, device: torch.device) -> list[Site]:
    """Greedily by worth per cost, until the taps cost `budget` of the layers' own work; the best one at least."""
    balance = BALANCE.get(device.type, BALANCE["cuda"])
    fixed = FIXED.get(device.type, FIXED["cuda"])
    k = math.sqrt(dim)
    priced: list[tuple[float, float, list[Site]]] = []  # (worth, price, sites)
    own_total = 0.0
    for group in tied_groups(sites):
        costs = [site.rule.cost(site.module, k) for site in group]
        known = [c for c in costs if c is not None]
        own_total += sum(c.tokens * (c.own_flops + balance * c.own_numbers) for c in known)
        if len(known) == len(group):
            price = sum(fixed + c.tokens * (c.tap_flops + balance * c.tap_numbers) for c in known)
            priced.append((worth(group), price, group))
    priced.sort(key=lambda item: item[0] / item[1], reverse=True)
    chosen: set[int] = set()
    spent = 0.0
    for _, price, group in priced:
        if spent + price <= budget * own_total:
            spent += price
            chosen.update(id(site) for site in group)
    sure = [group for _, _, group in priced if not any(site.rule.may_miss for site in group)]
    if not any(id(site) in chosen and not site.rule.may_miss for site in sites):
        chosen.update(id(site) for site in (sure[0] if sure else sites))
    return [site for site in sites if id(site) in chosen]


def worth(group: list[Site]) -> float:
    parameters = {id(p): p for site in group for p in site.parameters.values()}.values()
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        return sum(float(g.detach().float().pow(2).sum()) for g in grads)
    return math.sqrt(sum(p.numel() for p in parameters))
