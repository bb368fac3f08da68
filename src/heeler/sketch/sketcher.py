"""`Sketcher`: attaches to a model by forward hooks and hands out the sketches of its backwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from heeler.sketch import compiled
from heeler.sketch.backward_count import BackwardCount
from heeler.sketch.coverage import Coverage, Line
from heeler.sketch.layer_hooks import LayerHook
from heeler.sketch.matrices import AnyMatrix, AnyVector
from heeler.sketch.passes import Nobody, SketchListener
from heeler.sketch.prices import COMPILE_SECONDS, SHARE, Layers, Prices, StepPrice, choose, prices
from heeler.sketch.recorder import Recorder
from heeler.sketch.root_hooks import BeginHook, EndHook, OutputHook, SizeOf, watch
from heeler.sketch.survey import assign_columns, clean_name, draw, survey
from heeler.torch_private import compile_anew, guard_hooks, is_compiled, unwrapped, version, wants_backward

Dim = int | Callable[[int], int]
BatchDim = int | SizeOf


class Sketcher:
    """Sketches of every example's gradient, out of an ordinary `loss.backward()`.

    Every forward of the model with gradients enabled opens a pass; a backward finishes it. Two
    backwards through one forward add up as long as the pass has not been popped; what comes later is forgotten.

    Args:
        model: any module. What was compiled of it before is compiled once more, with the hooks.
        listener: told about forwards and backwards.
        dim: K, how many numbers a sketch has, or a function that tells it from the number of covered parameters. Where
            K is at least that number, the sketch is the exact gradient, and `sketcher.dim` is that number. Otherwise a
            square (256 = 16 × 16) is best.
        seed: of the projections, which depend on it and on the parameters' names alone.
        layers: None for the best that `share` of a step's time pays for, "all", or a predicate
            `(name, module) -> bool`.
        share: what sketches of these layers may add to a step, by the cost model.
        exact: keep the exact gradient whatever its length: the covered parameters' gradients side by side, in the
            model's order.
        batch_dim: the batch's dimension in the model's first tensor argument and in its activations; or, where no
            argument tells, a function `(args, kwargs) -> batch size` (activations then have the batch in front).
        scaler: the GradScaler in use, whose factor is taken out of the sketches.
        reduction: "mean" where the loss is a mean over the batch, "sum" where it is a sum.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: SketchListener | None = None,
        *,
        dim: Dim = 256,
        seed: int = 0,
        layers: Layers = None,
        share: float = SHARE,
        exact: bool = False,
        batch_dim: BatchDim = 0,
        scaler: Any = None,
        reduction: str = "mean",
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction must be "mean" or "sum", not {reduction!r}')
        self._is_compiled = is_compiled(model)
        if self._is_compiled and not compile_anew(model):
            raise compiled.HooksNotTraced(f"a compiled model has been called before. {compiled.ADVICE}")
        root = unwrapped(model)
        found = survey(root)
        if not found.parameters:
            raise ValueError(
                "the model has no trainable parameter to sketch: attach the model that is trained, not its frozen "
                "reference, and unfreeze it before"
            )
        device = next(iter(found.parameters.values())).device
        length_of = _length_of(dim)
        everything = found.count(found.layers)
        if layers is None and (exact or length_of(everything) >= everything):
            layers = "all"
        # Layers cost what those of a sketch would that is not exact, and leaves some out.
        length = length_of(1 << 60)
        self._layers = choose(found.layers, layers, share, length, device, self._is_compiled)
        count = found.count(self._layers)
        if not count:
            raise ValueError("no layer is left to sketch: " + _why(found.reasons))
        self.exact = exact or length_of(count) >= count
        self.dim = count if self.exact else length_of(count)
        self.seed, self.reduction = seed, reduction
        if self.exact:
            assign_columns(self._layers, found, device)
        else:
            draw(self._layers, found, self.dim, seed, device)

        self._survey = found
        self._root = root
        self._recorder = Recorder(
            root,
            self._layers,
            self.dim,
            device,
            batch_dim=0 if callable(batch_dim) else int(batch_dim),
            mean=reduction == "mean",
            scaler=scaler,
            exact=self.exact,
            listener=Nobody() if listener is None else listener,
            is_compiled=self._is_compiled,
        )
        size_of = batch_dim if callable(batch_dim) else None
        begin = BeginHook(self._recorder, size_of)
        self._handles = [root.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)]
        self._layer_handles: list[Any] = []
        self._output_handle: Any = None
        self.counts_steps = False
        """Keep `window` up to date in forwards that are not sketched, too."""
        self._hook_layers()
        if root is not model:
            self._handles += watch(model, self._recorder, begin.batch_of)
        self._backwards = BackwardCount()
        self._backwards.watch(self._covered())

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._recorder.device

    def _hook_layers(self) -> None:
        """Have the hooks that sketched forwards need; all others are counted as they begin."""
        if self._layer_handles:
            return
        # After the layers' hooks: where the model is a single layer, both are hooks of one module.
        self._layer_handles.append(self._root.register_forward_hook(EndHook(self._recorder), always_call=True))
        for layer in self._layers:  # before other hooks, which may change what the layer itself returned
            hook = LayerHook(self._recorder, layer)
            self._layer_handles.append(layer.module.register_forward_hook(hook, with_kwargs=True, prepend=True))

    def _unhook_layers(self) -> None:
        handles, self._layer_handles = self._layer_handles, []
        for handle in handles:
            handle.remove()

    def _covered(self) -> list[nn.Parameter]:
        return [p for layer in self._layers for p in layer.now().values()]

    @property
    def backwards(self) -> int:
        """Grows with every backward that puts a gradient into the model, sketched or not."""
        return self._backwards.count

    @property
    def window(self) -> int:
        """Of the last backward: the same for all between which no weights changed and no gradients were cleared."""
        return self._backwards.window

    @property
    def batch_dim(self) -> int:
        """The batch's dimension in the model's first tensor argument."""
        return self._recorder.batch_dim

    @property
    def enabled(self) -> bool:
        """False: the hooks do nothing and open no pass."""
        return self._recorder.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._recorder.enable(value)

    @property
    def sketching(self) -> bool:
        """False: forwards are counted (`SketchListener.forward_counted`) and nothing is sketched.

        Then the layers of an eager model have no hooks, once it has been seen to run eagerly in sketched forwards.
        Compiled code has a variant for either, each compiled when it is first needed: the unsketched one is what the
        compiler makes of the model alone.
        """
        return self._recorder.sketching

    @sketching.setter
    def sketching(self, value: bool) -> None:
        self._recorder.sketch(value)
        if value and self._handles:  # not detached
            self._hook_layers()
        elif not value and self._recorder.runs_eagerly and guard_hooks():
            self._unhook_layers()
        self._backwards.watch(self._covered(), value or self.counts_steps)  # fully_shard may have replaced them

    @property
    def notes_norms(self) -> bool:
        """Leave the norms of gradients at the model's output in the listener's stamps: in `norms`, (B,)."""
        return self._recorder.notes_norms

    @notes_norms.setter
    def notes_norms(self, value: bool) -> None:
        self._recorder.want_norms(value)
        if value and self._output_handle is None and self._handles:  # not detached
            inner = self._root.module if isinstance(self._root, DistributedDataParallel) else self._root
            self._output_handle = inner.register_forward_hook(OutputHook(self._recorder))
        elif not value:
            self._unhook_output()

    def _unhook_output(self) -> None:
        if self._output_handle is not None:
            self._output_handle.remove()
            self._output_handle = None

    def pop_passes(self) -> list[tuple[Any, Tensor]]:
        """All passes finished since the last pop, in forward order: the listener's stamp, and (B_i, K) float32."""
        return self._recorder.pop()

    def pop(self) -> Tensor:
        """The same in one (B, K) tensor; (0, K) if there are none."""
        passes = [sketch for _, sketch in self._recorder.pop()]
        if len(passes) == 1:
            return passes[0]
        if passes:
            return torch.cat(passes)
        return torch.zeros(0, self.dim, device=self._recorder.device)

    def sketch_of(self, loss: Tensor) -> Tensor:
        """The sketch (K,) of a loss's gradient, by autograd alone: what an example's row must be."""
        layers = [layer for layer in self._layers if not layer.broken]
        found = {id(p): (p, layer, local) for layer in layers for local, p in layer.parameters.items()}
        parameters = [p for p, _, _ in found.values()]
        if wants_backward(loss):
            gradients = self._by_backward(loss, parameters)
        else:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        total = torch.zeros(self.dim, device=self._recorder.device)
        for (_, layer, local), gradient in zip(found.values(), gradients, strict=True):
            if gradient is not None:
                total += layer.sketch_gradient(local, gradient.to(total.device))
        return total

    def _by_backward(self, loss: Tensor, parameters: list[nn.Parameter]) -> tuple[Tensor | None, ...]:
        """Gradients by `loss.backward()`, which is not counted; `.grad` is as it was afterwards."""
        before = [(p, p.grad) for p in self._root.parameters()]
        self._backwards.remove()
        try:
            for p, _ in before:
                p.grad = None
            loss.backward()
            return tuple(p.grad for p in parameters)
        finally:
            for p, gradient in before:
                p.grad = gradient
            if self._handles:  # not detached
                self._backwards.watch(self._covered())

    @property
    def weights_version(self) -> int:
        """Changes with every step of an optimizer."""
        return version(self._survey.parameters.values())

    def weights(self) -> Tensor:
        """(P,) the length of each parameter: another one if its values are others. Does not wait for the device."""
        own = [getattr(p, "to_local", lambda p=p: p)().detach() for p in self._survey.parameters.values()]
        return torch.stack([torch.linalg.vector_norm(p, dtype=torch.float64).to(self._recorder.device) for p in own])

    @property
    def root(self) -> nn.Module:
        """The model without what wraps it."""
        return self._root

    @property
    def sketched(self) -> list[str]:
        """The sketched layers' names."""
        return [layer.name or "the model" for layer in self._layers]

    @property
    def coverage(self) -> Coverage:
        """Which parameters the sketch covers, by which rule, and why it does not cover the others."""
        names = self._survey.names
        covered = self._survey.covered(self._layers)
        problems = {names[id(p)]: layer.problem for layer in self._layers for p in layer.parameters.values()}
        lines = []
        # By name, not by identity: fully_shard may have replaced the parameters since.
        now = {clean_name(name): p for name, p in self._root.named_parameters()}
        parameters = {name: now.get(name, old) for name, old in self._survey.parameters.items()}
        for name, parameter in parameters.items():
            problem = problems.get(name, "")
            rule = None if problem else covered.get(name)
            reason = problem or self._survey.reasons.get(name, "not chosen by layers=")
            lines.append(Line(name, parameter.numel(), rule, "" if rule else reason))
        return Coverage(lines, parameters, self.dim, self.exact)

    @property
    def projections(self) -> list[AnyMatrix | AnyVector]:
        """What every covered weight (a `Matrix`) and every gain or bias of a norm (a `Vector`) is sketched with."""
        return [part for layer in self._layers for part in (*layer.matrices, *layer.vectors.values())]

    def prices(self, batch: float) -> Prices:
        """What a step with so many examples costs by the cost model, plain and with sketches."""
        device = next(iter(self._survey.parameters.values())).device
        return prices(self._survey.layers, self.dim, device, self._is_compiled, batch)

    def price(self, batch: float) -> StepPrice:
        """What steps with so many examples cost by the cost model."""
        found = self.prices(batch)
        start = COMPILE_SECONDS * len(self._survey.layers) if self._is_compiled else 0.0
        on_gpu = self.device.type == "cuda"
        return StepPrice(found.step, found.sketches(self._layers, self.dim), start, on_gpu, found.output)

    @property
    def chosen(self) -> list[str]:
        """The parameters that were covered as the model was attached, whatever was left out since."""
        return list(self._survey.covered(self._layers))

    @property
    def left_out(self) -> dict[str, str]:
        """The layers that were left out since, by name, and why."""
        return {layer.name: layer.problem for layer in self._layers if layer.broken}

    def set_left_out(self, names: dict[str, str]) -> None:
        """Leave out exactly these layers, by name, as a run did that is gone on with; take the others in again."""
        for layer in self._layers:
            if layer.name in names:
                layer.miss(names[layer.name], broken=True)
            elif layer.broken:
                layer.take_in()
                self._recorder.checks.again()
                self._recorder.rows.meet_new()

    def leave_out(self, names: dict[str, str]) -> None:
        """Leave these layers out, too."""
        self.set_left_out({**self.left_out, **names})

    def detach(self) -> None:
        """Remove every hook; the model is as it was. Nothing of it, of a loss or of the listener's is held any more."""
        self._backwards.remove()
        self._unhook_layers()
        self._unhook_output()
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()
        self._recorder.close()


def _length_of(dim: Dim) -> Callable[[int], int]:
    """`dim` as a function of the number of covered parameters, checked."""

    def length_of(covered: int) -> int:
        length = dim(covered) if callable(dim) else dim
        if length < 1 <= covered:
            raise ValueError(f"dim must be positive, not {length}")
        return length

    return length_of


def _why(reasons: dict[str, str]) -> str:
    return "; ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:3]) or "layers= chose none"
