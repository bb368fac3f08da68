"""Whose row is it? A dye test: exchange some examples' inputs for others', and see which rows of each layer change.

A layer's rows are the batch's examples only if the model keeps them so: positions, pairs, views laid end to end,
time-major activations and routed tokens may have the same number of rows, or a multiple of it. So once, before the
first sketched forward, the model runs some more times without gradients on inputs in which a set of examples has been
exchanged for their neighbours. A split of a layer's input is right if no example's part ever changes unless the example
is in the set, and some do. The sets are such that no example is in all the sets of another (an antichain of codes), so
a row that depends on any other example is found out. With m sets C(m, ⌊m/2⌋) examples can be told apart: 9 forwards for
a batch of 64.

Random numbers, buffers and the statistics of norms are put back as they were.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heeler.sketch.batch import Layout, NoBatchDimension, layouts_of
from heeler.sketch.examples import Examples
from heeler.sketch.layer_rules.base import Call
from heeler.sketch.tapped_layer import TappedLayer, leave_out

CHANGED = 1e-4
"""A share of a layer's typical input: less is the noise of operations whose order of sums is left open."""
MIXED = "its input mixes the examples of a batch, or holds them in a way that is not known"
NOBODYS = "its input is not about the examples of a batch (positions, for instance)"


def dye_sets(batch: int) -> Tensor:
    """(m, B) bool: which examples are exchanged in each run. No example's column lies within another's."""
    count = next(m for m in itertools.count(2) if math.comb(m, m // 2) >= batch)
    codes = itertools.islice(itertools.combinations(range(count), count // 2), batch)
    sets = torch.zeros(count, batch, dtype=torch.bool)
    for example, code in enumerate(codes):
        sets[list(code), example] = True
    return sets


class DyeTest:
    """Finds each layer's layout. `see` is called for every tapped layer's call while a forward of the test runs."""

    def __init__(self, layers: list[TappedLayer], batch: int, batch_dim: int) -> None:
        self.layers = {id(layer): layer for layer in layers}
        self.batch, self.batch_dim = batch, batch_dim
        self._calls: dict[int, list[dict[Layout, Tensor]]] = {}
        self._directions: dict[int, Tensor] = {}

    def see(self, layer: TappedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(layer) not in self.layers:
            return
        prints: dict[Layout, Tensor] = {}
        given = layer.rule.natural_layout or Layout("dim", self.batch_dim)
        candidates = [given]
        if layer.rule.natural_layout is None:
            with_features = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(with_features, Tensor):
                candidates += [la for la in layouts_of(with_features.shape, self.batch) if la != given]
        for layout in candidates:
            call = Call(args, kwargs, None, Examples(self.batch, self.batch_dim, [], layout))
            try:
                rows = layer.rule.rows(call)
            except NoBatchDimension:
                continue
            prints[layout] = self._fingerprints(rows)
        self._calls.setdefault(id(layer), []).append(prints)

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor) -> None:
        """Settle the layers' layouts, or leave those out whose rows are no examples."""
        sets = dye_sets(self.batch)
        first = self._look(forward, args, kwargs)
        # One that is not called now may be later, and is then split by its shape alone.
        open_ = {key: layer for key, layer in self.layers.items() if key in first}
        mixed: list[TappedLayer] = []
        for exchange_all in (False, True):  # the first tensor alone, then all: masks may fit the batch by chance
            if not open_:
                break
            runs = []
            for members in sets:
                dyed = [
                    _exchanged(part, members, self.batch, self.batch_dim, found, exchange_all)
                    for part in (args, kwargs)
                ]
                runs.append(self._look(forward, *dyed))
            for key, layer in list(open_.items()):
                verdict = _verdict(first[key], [run.get(key, []) for run in runs], sets)
                if isinstance(verdict, Layout):
                    layer.layout = verdict
                    del open_[key]
                elif verdict == MIXED:
                    mixed.append(open_.pop(key))
        leave_out(mixed, MIXED)
        leave_out(list(open_.values()), NOBODYS)

    def _look(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, list[dict[Layout, Tensor]]]:
        self._calls = {}
        forward(*args, **kwargs)
        return self._calls

    def _fingerprints(self, rows: Tensor) -> Tensor:
        """(B, 4): a few random directions of each example's part."""
        flat = rows.reshape(self.batch, -1).float()
        size = flat.shape[1]
        if size not in self._directions:
            generator = torch.Generator().manual_seed(size)
            self._directions[size] = torch.randn(size, 4, generator=generator) / math.sqrt(max(size, 1))
        direction = self._directions[size].to(flat.device)
        return torch.nan_to_num(flat) @ direction


def _verdict(first: list[dict[Layout, Tensor]], runs: list[list[dict[Layout, Tensor]]], sets: Tensor) -> Layout | str:
    """The first layout of all calls under which only exchanged examples change, and some do; or why there is none."""
    if any(len(run) != len(first) for run in runs):
        return MIXED  # calls depend on the data
    common = [layout for layout in first[0] if all(layout in call for call in first)]
    if not common:
        return NOBODYS
    silent = False
    for layout in common:
        right, seen = True, torch.zeros(sets.shape[1], dtype=torch.bool)
        for members, run in zip(sets, runs, strict=True):
            for before, after in zip(first, run, strict=True):
                if layout not in after or after[layout].shape != before[layout].shape:
                    right = False
                    break
                changed = _changed(before[layout], after[layout]).cpu()
                right = right and not bool((changed & ~members).any())
                seen |= changed
            if not right:
                break
        if right and seen.any():
            return layout
        silent = silent or (right and not seen.any())
    return NOBODYS if silent else MIXED


def _changed(before: Tensor, after: Tensor) -> Tensor:
    typical = before.abs().mean() + after.abs().mean() + 1e-30
    return ((after - before).abs() > CHANGED * typical).any(1)


def _exchanged(tree: Any, members: Tensor, batch: int, batch_dim: int, found: Tensor, everything: bool) -> Any:
    """The arguments with some examples' parts replaced by their neighbours'."""
    if isinstance(tree, Tensor):
        fits = tree.ndim > batch_dim and tree.shape[batch_dim] == batch
        if not (tree is found or (everything and fits)):
            return tree
        neighbours = torch.arange(batch, device=tree.device)
        neighbours = torch.where(members.to(tree.device), (neighbours + 1) % batch, neighbours)
        return tree.detach().index_select(batch_dim, neighbours)
    if isinstance(tree, dict):
        items = {k: _exchanged(v, members, batch, batch_dim, found, everything) for k, v in tree.items()}
        return items if type(tree) is dict else _rebuilt(tree, items)
    if isinstance(tree, (tuple, list)):
        parts = [_exchanged(v, members, batch, batch_dim, found, everything) for v in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _rebuilt(tree: Any, items: dict[str, Any]) -> Any:
    """A mapping of another class, such as transformers' BatchEncoding."""
    try:
        copy = type(tree)(tree)
        copy.update(items)
        return copy
    except Exception:
        return items


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put random numbers, buffers and modes back; norms use their running statistics meanwhile, which mix nothing.

    Yields what sets the random numbers to where they are now: the same dropout in every run.
    """
    norms = [m for m in model.modules() if getattr(m, "track_running_stats", False) and m.training]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    python, numpy, host = random.getstate(), np.random.get_state(), torch.random.get_rng_state()  # noqa: NPY002
    on_devices = [torch.cuda.get_rng_state(device) for device in devices]

    def rewind() -> None:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.random.set_rng_state(host)
        for device, state in zip(devices, on_devices, strict=True):
            torch.cuda.set_rng_state(state, device)

    for norm in norms:
        norm.training = False
    try:
        with torch.no_grad():
            yield rewind
    finally:
        rewind()
        for norm in norms:
            norm.training = True
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def test_layers(
    layers: list[TappedLayer],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: Tensor,
    batch_dim: int,
    begin: Callable[[DyeTest | None], None],
) -> None:
    """Run the test on the batch that is about to be trained on. If the model cannot run so, layouts stay unknown.

    begin: told of the test before its first forward, and of None after its last.
    """
    test = DyeTest(layers, found.shape[batch_dim], batch_dim)
    begin(test)
    try:
        with left_as_it_was(model) as rewind:

            def forward(*own_args: Any, **own_kwargs: Any) -> None:
                rewind()
                model(*own_args, **own_kwargs)

            test.run(forward, args, kwargs, found)
    except Exception as error:
        logging.getLogger("heeler").info("the dye test could not run (%r): rows are split by shape alone", error)
    finally:
        begin(None)
