"""How a run of these experiments differs from others: mechanisms act on its steps, and its epochs are measured."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.diversity.point import example_gradients, measure
from experiments.diversity.variants import DROPOUT
from experiments.setup import Run
from experiments.tasks import Examples, Task
from experiments.training import OneProcess, Strata
from heeler.diversity import add_langevin_noise, quantize
from heeler.herding.rules import Random
from heeler.herding.validate import IntArray
from heeler.ordering import Sampler
from heeler.sketch import Sketcher


class DiversityPlace(OneProcess):
    """Options of a run that it heeds: `mechanism` (with `sigma` for Langevin noise), and `measure`: "own" for what the
    run itself uses, "mechanisms" for the bound with each mechanism at its weights, too."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._called: nn.Module | None = None
        self._sampler: Sampler | None = None
        self._sigma: float | None = run.options.get("sigma")

    def sampler(self, run: Run, examples: int, strata: Strata | None = None) -> Sampler:
        if run.options.get("replacement"):
            draws = WithReplacement(examples, run.seed)
            self._sampler = Sampler(examples, batch_size=run.step, order=draws, seed=run.seed)
        else:
            self._sampler = super().sampler(run, examples, strata)
        return self._sampler

    def wrap(self, model: nn.Module) -> nn.Module:
        self._called = with_dropout(model) if self._run.options.get("mechanism") == "dropout" else model
        return self._called

    def prepare(self, run: Run, model: nn.Module, optimizer: Optimizer) -> None:
        mechanism = run.options.get("mechanism")
        if mechanism == "langevin":
            add_langevin_noise(optimizer, run.options["sigma"], batch_size=run.step, seed=run.seed)
        elif mechanism == "quantize":
            quantize_each_example(model, optimizer, seed=run.seed)

    def measure(self, run: Run, task: Task, model: nn.Module, examples: Examples) -> dict[str, Any]:
        if not run.options.get("measure"):
            return {}
        assert self._called is not None
        assert self._sampler is not None
        walked = examples.train
        if not run.options.get("replacement"):  # the bound is of all examples, not of those that were drawn
            order = torch.from_numpy(np.array(self._sampler.indices)).to(walked[0].device)
            walked = tuple(t[order] for t in walked)
        session = self._sampler.session
        with session.paused() if session.is_attached else nullcontext():
            own = self._found(run, task, self._called, walked, run.options.get("mechanism", "none"))
            if run.options["measure"] == "own":
                return {"diversity": own}
            if self._sigma is None:  # before training: noise as large as a typical gradient
                self._sigma = langevin_sigma(own["mean_square"], model)
            bounds = {}
            for mechanism in ("dropout", "langevin", "quantize"):
                called = with_dropout(copy.deepcopy(model)) if mechanism == "dropout" else model
                bounds[mechanism] = self._found(run, task, called, walked, mechanism)["batch_size_bound"]
            return {"diversity": {**own, "with_mechanism": bounds}}

    def _found(
        self, run: Run, task: Task, called: nn.Module, walked: tuple[Tensor, ...], mechanism: str
    ) -> dict[str, Any]:
        changed = Changed(called, mechanism, self._sigma or 0.0, run.weight_decay, run.seed)
        return measure(example_gradients(called, task, walked, run.step), run.step, changed)


class WithReplacement(Random):
    """As many draws as there are examples, each from all of them."""

    def __init__(self, examples: int, seed: int) -> None:
        self._seed = seed
        super().__init__(examples, seed=seed)

    def _first_order(self) -> IntArray:
        return self._draws(0)

    def _close(self) -> IntArray:
        return self._draws(self.epoch + 1)

    def _draws(self, epoch: int) -> IntArray:
        return np.random.default_rng([self._seed, epoch]).integers(self.examples, size=self.examples)


def with_dropout(model: nn.Module) -> nn.Module:
    """The model with its own dropout layers at work, or with dropout of its inputs where it has none."""
    own = [module for module in model.modules() if isinstance(module, nn.Dropout)]
    for module in own:
        module.p = DROPOUT
    return model if own else nn.Sequential(nn.Dropout(DROPOUT), model)


def langevin_sigma(mean_square: float, model: nn.Module) -> float:
    """A coordinate's standard deviation of noise that is as large as a gradient: E‖ξ‖² = E‖g‖²."""
    return float(f"{math.sqrt(mean_square / sum(p.numel() for p in model.parameters())):.4g}")


class Changed:
    """What a step uses in place of the examples' gradients, (b, d): the mechanism's, and weight decay added."""

    def __init__(self, model: nn.Module, mechanism: str, sigma: float, weight_decay: float, seed: int) -> None:
        parameters = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        self._decay = weight_decay * parameters
        self._mechanism, self._sigma = mechanism, sigma
        self._generator = torch.Generator(parameters.device).manual_seed(seed)

    def __call__(self, gradients: Tensor) -> Tensor:
        if self._mechanism == "quantize":
            gradients = quantize(gradients, generator=self._generator)
        elif self._mechanism == "langevin":
            noise = torch.randn(gradients.shape, generator=self._generator, device=gradients.device)
            gradients = gradients + self._sigma * noise
        return gradients + self._decay


def quantize_each_example(model: nn.Module, optimizer: Optimizer, seed: int = 0) -> None:
    """From now on steps use the mean of the examples' quantized gradients, as if each came from a worker of its own."""
    sketcher = Sketcher(model, exact=True, layers="all")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if sketcher.dim != sum(p.numel() for p in parameters):
        raise ValueError("quantizing each example's gradient needs a rule for every layer; see heeler.sketch.register")
    device = parameters[0].device
    generator = torch.Generator(device).manual_seed(seed)

    def replace(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        mean = quantize(sketcher.pop(), generator=generator).mean(0)
        for parameter, part in zip(parameters, mean.split([p.numel() for p in parameters]), strict=True):
            parameter.grad = part.view_as(parameter).to(parameter.dtype)

    optimizer.register_step_pre_hook(replace)
