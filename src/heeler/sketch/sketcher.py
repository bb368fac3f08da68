"""`Sketcher`: attaches to a model by forward hooks and hands out the sketches of its backwards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from heeler.sketch import compiled
from heeler.sketch.batch import first_tensor
from heeler.sketch.coverage import Coverage, Line
from heeler.sketch.hooks import SiteHook, is_rerun
from heeler.sketch.matrices import AnyMatrix, AnyVector
from heeler.sketch.passes import PassLog, Slot
from heeler.sketch.selection import Layers, choose
from heeler.sketch.sites import clean_name, covered_names, draw, lay_out, survey
from heeler.sketch.tap import Marker

BatchDim = int | Callable[[tuple[Any, ...], dict[str, Any]], int]


class Sketcher:
    """Sketches of every example's gradient, out of an ordinary `loss.backward()`.

    Every forward of the model in training mode with gradients enabled opens a pass; a backward finishes it. Two
    backwards through one forward add up as long as the pass has not been popped; what comes later is forgotten.

    Args:
        model: any module; attach before its first compiled call.
        dim: K, the numbers of a sketch; a square (256 = 16 × 16) is best.
        whole: where the covered parameters are no more than this (`dim` by default), the sketch is the exact gradient,
            and `sketcher.dim` their number.
        seed: of the projections, which depend on it and on the parameters' names alone.
        layers: None for the default choice, "all", a budget such as "2%" of the step's time, or a predicate
            `(name, module) -> bool`.
        exact: keep every coordinate: the covered parameters' gradients side by side, in the model's order.
        batch_dim: the batch's dimension in the model's first tensor argument and in its activations; or, where no
            argument tells, a function `(args, kwargs) -> batch size` (activations then have the batch in front).
        scaler: the GradScaler in use, whose factor the sketches shall not carry.
        reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum.
    """

    def __init__(
        self,
        model: nn.Module,
        dim: int = 256,
        seed: int = 0,
        layers: Layers = None,
        exact: bool = False,
        *,
        whole: int | None = None,
        batch_dim: BatchDim = 0,
        scaler: Any = None,
        reduction: str = "mean",
    ) -> None:
        if dim < 1:
            raise ValueError(f"dim must be positive, not {dim}")
        whole = dim if whole is None else whole
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", not {reduction!r}')
        compiled.refuse_if_called(model)
        root = getattr(model, "_orig_mod", model)
        found = survey(root)
        if not found.parameters:
            raise ValueError("the model has no trainable parameter to sketch")
        device = next(iter(found.parameters.values())).device
        sizes = {name: p.numel() for name, p in found.parameters.items()}
        everything = covered_names(found.sites, found.names)
        small = sum(sizes[name] for name in everything) <= whole
        wanted = "all" if layers is None and (exact or small) else layers
        is_compiled = root is not model or getattr(model, "_compiled_call_impl", None) is not None
        sites = choose(found.sites, wanted, dim, device, is_compiled)
        covered = covered_names(sites, found.names)
        if not covered:
            raise ValueError("no layer is left to sketch: " + _why(found.reasons))
        count = sum(sizes[name] for name in covered)
        self.exact = exact or count <= whole
        self.dim = count if self.exact else dim
        self.seed = seed
        if self.exact:
            offsets, at = {}, 0
            for name in found.parameters:
                if name in covered:
                    offsets[name] = at
                    at += sizes[name]
            lay_out(sites, found.names, offsets, self.dim, device)
        else:
            draw(sites, found.names, self.dim, seed, device)

        self._key = compiled.enrol(self)
        self._warned = False
        self.scaler = scaler
        self._sites = sites
        self._survey = found
        self._root = root
        self._size_of = batch_dim if callable(batch_dim) else None
        self._batch_dim = 0 if callable(batch_dim) else int(batch_dim)
        self._log = PassLog(self.dim, device, self._batch_dim, reduction == "mean", self._unscale)
        start = self._start if root is model else self._start_inside
        self._handles = [root.register_forward_pre_hook(start, with_kwargs=True, prepend=True)]
        for site in sites:
            self._handles.append(
                site.module.register_forward_hook(SiteHook(self._log, site, self._key), with_kwargs=True)
            )
        # After the sites' hooks: where the model is a single layer, root and site are one module.
        self._handles.append(root.register_forward_hook(self._end, always_call=True))
        if root is not model:
            self._handles += compiled.watch(model, self._log)

    # What users and the ordering read.

    @property
    def on_forward(self) -> Callable[[], None] | None:
        """Called without arguments once for every pass, before its sketch can be popped.

        Eager: as the forward starts. Compiled: no callback can run inside the graph, so it is called when the
        backward delivers the first gradient, still before `pop` shows it.
        """
        return self._log.on_forward

    @on_forward.setter
    def on_forward(self, callback: Callable[[], None] | None) -> None:
        self._log.on_forward = callback

    @property
    def on_backward(self) -> Callable[[], None] | None:
        """Called without arguments after a backward put a gradient into a pass: once, or once for every checkpointed
        segment under reentrant checkpointing."""
        return self._log.on_backward

    @on_backward.setter
    def on_backward(self, callback: Callable[[], None] | None) -> None:
        self._log.on_backward = callback

    @property
    def enabled(self) -> bool:
        """False: the hooks do nothing and open no pass."""
        return self._log.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._log.enabled = value

    @property
    def sketching(self) -> bool:
        """False: forwards are counted (`on_count` is called with their batch size) and nothing is tapped.

        Compiled code goes on sketching: its taps are part of it, and to leave them out it would be compiled again.
        """
        return self._log.sketching

    @sketching.setter
    def sketching(self, value: bool) -> None:
        self._log.sketching = value

    @property
    def on_count(self) -> Callable[[int], None] | None:
        """Called with the batch size of every forward that is counted, as it starts."""
        return self._log.on_count

    @on_count.setter
    def on_count(self, callback: Callable[[int], None] | None) -> None:
        self._log.on_count = callback

    def pop_passes(self) -> list[Tensor]:
        """The sketches of all passes finished since the last pop, (B_i, K) float32 each, in forward order."""
        return self._log.pop()

    def pop(self) -> Tensor:
        """The same in one (B, K) tensor; (0, K) if there are none."""
        passes = self._log.pop()
        if len(passes) == 1:
            return passes[0]
        if passes:
            return torch.cat(passes)
        return torch.zeros(0, self.dim, device=self._log.device)

    @property
    def coverage(self) -> Coverage:
        covered = covered_names(self._sites, self._survey.names)
        problems = {
            self._survey.names[id(p)]: site.problem
            for site in self._sites
            if site.problem
            for p in site.parameters.values()
        }
        lines = []
        # By name, not by identity: fully_shard may have replaced the parameters since.
        now = {clean_name(name): p for name, p in self._root.named_parameters()}
        parameters = {name: now.get(name, old) for name, old in self._survey.parameters.items()}
        for name, parameter in parameters.items():
            reason = problems.get(name, "") or self._survey.reasons.get(name, "not chosen by layers=")
            rule = None if name in problems else covered.get(name)
            lines.append(Line(name, parameter.numel(), rule, "" if rule else reason))
        return Coverage(lines, parameters, self.dim, self.exact)

    @property
    def projections(self) -> list[AnyMatrix | AnyVector]:
        """What every covered weight (a `Matrix`) and every gain or bias of a norm (a `Vector`) is sketched with."""
        return [part for site in self._sites for part in (*site.matrices, *site.vectors.values())]

    def detach(self) -> None:
        """Remove every hook; the model is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._log.current = None

    # The hooks.

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        log = self._log
        log.running = False
        if not (log.enabled and module.training and torch.is_grad_enabled()):
            return
        found = args[0] if args else None  # nearly always; the search costs as much as all the rest
        if not isinstance(found, Tensor) or found.ndim <= self._batch_dim:
            found = first_tensor((args, kwargs), self._batch_dim + 1)
        batch = self._batch_size(args, kwargs, found)
        if batch is None:
            log.current, log.lost = None, True
            compiled.warn_of_lost_batch(self._key)
            return
        log.lost = False
        shapes = [] if found is None else [found.shape]
        device = log.device if found is None else found.device
        if torch.compiler.is_compiling():
            armed = capacity = int(log.capacity)
            while batch > capacity:
                capacity = max(8, 2 * capacity)
            if capacity > armed or device != log.device:
                index = -1 if device.index is None else device.index
                compiled.prepare(self._key, capacity, device.type, index)
            log.open_traced(batch, shapes)
        elif log.sketching or log.needs_leaves:
            if device != log.device:
                self._move(device)
            log.open(batch, device, shapes)
        else:
            log.current = None
            if log.on_count is not None and not is_rerun():
                log.on_count(batch)

    def _start_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The same as a part of the compiled code, so that `compiled.watch` notices where that is not this model's."""
        self._start(module, args, kwargs)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        log = self._log
        slot = log.current
        if not log.running or slot is None:
            return None
        log.running = False
        if slot.replayed:
            return _mark(output, log, slot)
        if torch.compiler.is_compiling():
            log.close_traced(slot)
        return None

    def _batch_size(self, args: tuple[Any, ...], kwargs: dict[str, Any], found: Tensor | None) -> int | None:
        """None where it cannot be told: then this forward has no sketch, and the training step goes on."""
        if self._size_of is None:
            return None if found is None else found.shape[self._batch_dim]
        if torch.compiler.is_compiling():
            return self._size_of(args, kwargs)
        try:
            return self._size_of(args, kwargs)
        except Exception:
            return None

    def _warn_of_lost_batch(self) -> None:
        if not self._warned:
            self._warned = True
            logging.getLogger("heeler").warning(
                "a forward has no sketch, since its batch size cannot be told from its arguments: "
                "tell Heeler with batch_dim=lambda args, kwargs: batch_size"
            )

    def _move(self, device: torch.device) -> None:
        for site in self._sites:
            site.move(device)
        self._log.move(device)

    def _unscale(self, sketch: Tensor) -> Tensor:
        """Free the sketch of the scaler's factor, without waiting for the device."""
        if self.scaler is None or not self.scaler.is_enabled():
            return sketch
        scale = self.scaler.scale(torch.ones((), device=sketch.device))
        # A step with infinities is skipped: one non-finite number makes the whole batch non-finite, so that no row
        # of it is stored.
        return sketch / scale + sketch.sum() * 0.0


def _mark(output: Any, log: PassLog, slot: Slot) -> Any:
    """Put a Marker on every output that carries gradients."""

    def announce() -> None:
        log.current = slot

    if isinstance(output, Tensor):
        return Marker.apply(announce, output) if output.requires_grad else output
    if isinstance(output, dict):
        for name in list(output):
            output[name] = _mark(output[name], log, slot)
        return output
    if isinstance(output, (tuple, list)):
        items = [_mark(item, log, slot) for item in output]
        return type(output)(*items) if hasattr(output, "_fields") else type(output)(items)
    return output


def _why(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:3]) or "layers= chose none"


for _hook in (Sketcher._start, Sketcher._end):
    compiled.run_as_it_is(_hook)
