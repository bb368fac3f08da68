"""Whose row is it? A test: exchange some examples' inputs for others', and see which rows of each layer change.

A layer's rows are the batch's examples only if the model keeps them so: positions, pairs, views laid end to end,
time-major activations and routed tokens may have the same number of rows, or a multiple of it. So the operations of a
forward run some more times on inputs in which a set of examples has been exchanged for others (`recording`; of compiled
code the model itself runs: `rerun`). A split of a layer's input is right if no example's part ever changes unless the
example is in the set, and some do. The sets are such that no example is in all the sets of another (an antichain of
codes), so a row that depends on any other example is found out. With m sets C(m, ⌊m/2⌋) examples can be told apart: 9
runs for a batch of 64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from heeler.sketch.examples import Examples, RowLayout, row_layouts
from heeler.sketch.layer_rules.base import Call
from heeler.sketch.recording import Recording
from heeler.sketch.sketched_layer import SketchedLayer, leave_out

NOISE, REDUCED_NOISE = 1e-4, 1e-2
"""A share of a layer's typical input: less is the noise of operations whose order of sums is left open. The second one
is for half precision, and the most that is ever taken for noise."""
ROOM = 8
"""How much more than it changed between two runs on the same examples a row must change to count as changed. TF32, and
convolutions that choose their algorithm by how memory lies, differ by a thousandth."""
MIXED = "its input mixes the examples of a batch, or holds them in a way that is not known"
NOBODYS = "its input is not about the examples of a batch (positions, for instance)"

Prints = dict[RowLayout, Tensor]
Moved = dict[int, tuple[Tensor, Tensor]]
"""By the id of an input: the tensor, and the one with some examples exchanged."""
Run = Callable[[Moved], None]
"""Runs the model's operations once, with some inputs exchanged, and shows every sketched layer's call to `see`."""


def exchange_sets(batch: int) -> Tensor:
    """(m, B) bool: which examples are exchanged in each run. No example's column lies within another's."""
    count = next(m for m in itertools.count(2) if math.comb(m, m // 2) >= batch)
    codes = itertools.islice(itertools.combinations(range(count), count // 2), batch)
    sets = torch.zeros(count, batch, dtype=torch.bool)
    for example, code in enumerate(codes):
        sets[list(code), example] = True
    return sets


def some_halves(batch: int) -> Tensor:
    """(2, B) bool: two of the many ways to exchange half of the examples."""
    generator = torch.Generator().manual_seed(batch)
    return torch.stack([torch.randperm(batch, generator=generator) < max(batch // 2, 1) for _ in range(2)])


class RowOwnershipTest:
    """Finds each layer's layout. `see` is called for every sketched layer's call while a run of the test goes on.

    inputs: the tensors that come in. found: the one that holds the batch, or None where it is not known which does.
    """

    def __init__(
        self,
        layers: list[SketchedLayer],
        inputs: Iterable[Tensor],
        found: Tensor | None,
        batch: int,
        batch_dim: int,
    ) -> None:
        self.layers = {id(layer): layer for layer in layers}
        self.batch, self.batch_dim = batch, batch_dim
        self.found = found if found is not None and found.shape[batch_dim] == batch else None
        self._inputs = {id(t): t for t in inputs if t.ndim > batch_dim and t.shape[batch_dim] == batch}
        self._original: Callable[[Tensor], Tensor] = lambda tensor: tensor
        # At random: among sorted examples, neighbours would leave the order as it is.
        circle = torch.randperm(batch, generator=torch.Generator().manual_seed(batch))
        self.partners = torch.empty_like(circle).scatter_(0, circle, circle.roll(1))
        self._noise = NOISE
        self._thread = get_ident()
        self._calls: dict[int, list[Prints]] = {}
        self._directions: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def can_tell(self) -> bool | None:
        """Whether the batch has examples that differ; None where no input holds examples that can be exchanged."""
        everybody = torch.ones(self.batch, dtype=torch.bool)
        try:
            pairs = self._exchange(everybody, everything=True).values()
            return any(_differ(old, new) for old, new in pairs) if pairs else None
        except (RuntimeError, NotImplementedError):  # nested tensors, for instance
            return None

    def replay(self, recording: Recording) -> None:
        """Settle the layers' layouts by a forward's own operations."""
        self._original = recording.original

        def run(moved: Moved) -> None:
            for layer, args, kwargs in recording.replay({key: new for key, (_, new) in moved.items()}):
                self.see(layer, args, kwargs)

        self.run(run)

    def see(self, layer: SketchedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(layer) not in self.layers or get_ident() != self._thread:
            return
        prints: Prints = {}
        for layout in self._candidates(layer, args, kwargs):
            call = Call(args, kwargs, None, Examples(self.batch, self.batch_dim, [], layout))
            try:
                prints[layout] = self._fingerprints(layer.rule.rows(call))
            except Exception:  # it does not lie like that
                continue
            if layout == layer.layout:
                break  # no other is asked for
        self._calls.setdefault(id(layer), []).append(prints)

    def _candidates(self, layer: SketchedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[RowLayout]:
        """Layouts to try, the one that is known first."""
        given = layer.rule.natural_layout or RowLayout("dim", self.batch_dim)
        candidates = [given] if layer.layout in (None, given) else [layer.layout, given]
        if layer.rule.natural_layout is None:
            with_features = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(with_features, Tensor):
                candidates += [la for la in row_layouts(with_features.shape, self.batch) if la not in candidates]
        return candidates

    def run(self, run: Run) -> None:
        """Settle the layers' layouts, or leave those out whose rows are no examples.

        Layouts that are known are looked at again with two sets only, and with the noise that was measured before:
        calls may depend on the data.
        """
        first = self._look(run, {})
        calls = [(self.layers[key].layout, call) for key, of_layer in first.items() for call in of_layer]
        known = all(layout in call for layout, call in calls)
        sets = some_halves(self.batch) if known else exchange_sets(self.batch)
        measured = not known
        if measured:
            self._measure_noise(first, run)
        # One that is not called now may be later: then the test is made once more.
        open_ = {key: layer for key, layer in self.layers.items() if key in first}
        mixed: list[SketchedLayer] = []
        reason = NOBODYS
        # The first tensor alone, then all, if there are others: masks may fit the batch by chance.
        alone = self.found is not None and len(self._exchange(sets[0], everything=True)) == 1
        for everything in (True,) if alone or self.found is None else (False, True):
            try:
                runs = [self._look(run, self._exchange(members, everything)) for members in sets] if open_ else []
            except Exception as error:
                reason = (
                    f"the model does not run with examples exchanged, so it is not known whose rows it sees: {error!r}"
                )
                break
            for key, layer in list(open_.items()):
                only, seen = layer.layout, [looks.get(key, []) for looks in runs]
                verdict = _verdict(first[key], seen, sets, self._noise_of(layer), only)
                if verdict == MIXED and not measured:  # or is there more noise than there was?
                    self._measure_noise(first, run)
                    measured = True
                    verdict = _verdict(first[key], seen, sets, self._noise_of(layer), only)
                if isinstance(verdict, RowLayout):
                    layer.lie(verdict)
                    del open_[key]
                elif verdict == MIXED:
                    mixed.append(open_.pop(key))
        leave_out(mixed, MIXED)
        leave_out(list(open_.values()), reason)

    def _measure_noise(self, first: dict[int, list[Prints]], run: Run) -> None:
        """What to take for noise in each layer, by another run on copies of the same examples."""
        nobody = torch.zeros(self.batch, dtype=torch.bool)
        again = self._look(run, self._exchange(nobody, everything=True))
        for key, calls in first.items():
            pairs = [
                (before[layout], after[layout])
                for before, after in zip(calls, again.get(key, []), strict=False)
                for layout in before.keys() & after.keys()
            ]
            seen = max((float(_change(*pair).max()) for pair in pairs), default=0.0)
            self.layers[key].measure(min(max(self._noise, ROOM * seen), REDUCED_NOISE))

    def _noise_of(self, layer: SketchedLayer) -> float:
        """As it was measured, unless the precision is a lower one by now."""
        return max(self._noise, layer.noise)

    def _look(self, run: Run, moved: Moved) -> dict[int, list[Prints]]:
        self._calls = {}
        run(moved)
        return self._calls

    def _fingerprints(self, rows: Tensor) -> Tensor:
        """(B, 4): a few random directions of each example's part."""
        if rows.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled(rows.device.type):
            self._noise = REDUCED_NOISE
        flat = rows.reshape(self.batch, -1).float()
        key = flat.shape[1], flat.device
        if key not in self._directions:
            generator = torch.Generator(flat.device).manual_seed(key[0])
            direction = torch.randn(key[0], 4, generator=generator, device=flat.device)
            self._directions[key] = direction / math.sqrt(max(key[0], 1))
        return torch.nan_to_num(flat, 0.0, 0.0, 0.0) @ self._directions[key]

    def _exchange(self, members: Tensor, everything: bool) -> Moved:
        """The inputs with some examples' parts replaced by others'."""
        moved: Moved = {}
        here = torch.where(members, self.partners, torch.arange(self.batch))
        for key, tensor in self._inputs.items():
            if everything or tensor is self.found:
                old = self._original(tensor).detach()
                # In memory as the original lies: a convolution's algorithm may depend on it.
                new = old.index_select(self.batch_dim, here.to(old.device))
                new = torch.empty_like(old).copy_(new) if old.layout == torch.strided else new
                moved[key] = old, new.requires_grad_(tensor.requires_grad)
        return moved


def _differ(old: Tensor, new: Tensor) -> bool:
    return old.layout != torch.strided or not torch.equal(old, new)


def _verdict(
    first: list[Prints], runs: list[list[Prints]], sets: Tensor, noise: float, only: RowLayout | None
) -> RowLayout | str:
    """The first layout of all calls under which only exchanged examples change, and some do; or why there is none."""
    if any(len(run) != len(first) for run in runs):
        return MIXED  # calls depend on the data
    common = [layout for layout in first[0] if all(layout in call for call in first) and only in (None, layout)]
    if not common:
        return MIXED
    silent = False
    for layout in common:
        right, seen = True, [False] * len(first)
        for members, run in zip(sets, runs, strict=True):
            for number, (before, after) in enumerate(zip(first, run, strict=True)):
                if layout not in after:
                    right = False
                    break
                changed = _changed(before[layout], after[layout], noise).cpu()
                right = right and not bool((changed & ~members).any())
                seen[number] = seen[number] or bool(changed.any())
            if not right:
                break
        if right and all(seen):
            return layout
        silent = silent or right
    return NOBODYS if silent else MIXED


def _changed(before: Tensor, after: Tensor, noise: float) -> Tensor:
    return (_change(before, after) > noise).any(1)


def _change(before: Tensor, after: Tensor) -> Tensor:
    """(B, 4) as a share of what is typical."""
    return (after - before).abs() / (before.abs().mean() + after.abs().mean() + 1e-30)
