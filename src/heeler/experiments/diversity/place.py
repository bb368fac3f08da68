"""How a run of these experiments differs from others: mechanisms act on its steps, and its epochs are measured."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heeler.diversity import add_langevin_noise, quantize
from heeler.experiments.diversity.point import example_gradients, measure
from heeler.experiments.setup import Run
from heeler.experiments.tasks import Examples, Task
from heeler.experiments.training import OneProcess
from heeler.ordering import Sampler
from heeler.sketch import Sketcher


class DiversityPlace(OneProcess):
    """Options of a run that it heeds: `mechanism` (with `sigma` for Langevin noise), and `measure`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._called: nn.Module | None = None
        self._sampler: Sampler | None = None

    def sampler(self, run: Run, examples: int) -> Sampler:
        self._sampler = super().sampler(run, examples)
        return self._sampler

    def wrap(self, model: nn.Module) -> nn.Module:
        """With dropout: of the inputs, where the model has none of its own."""
        self._called = model
        own = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
        if self._run.options.get("mechanism") == "dropout" and not own:
            self._called = nn.Sequential(nn.Dropout(self._run.options["dropout"]), model)
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
        order = torch.from_numpy(self._sampler.indices.copy()).to(examples.train[0].device)
        walked = tuple(t[order] for t in examples.train)
        handle = self._sampler.collector
        with handle.paused() if handle is not None else nullcontext():
            gradients = example_gradients(self._called, task, walked, run.step)
            return {"diversity": measure(gradients, run.step, Changed(run, model))}


class Changed:
    """What a step uses in place of the examples' gradients, (b, d): the mechanism's, and weight decay added."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        parameters = torch.cat([p.detach().flatten() for p in model.parameters() if p.requires_grad])
        self._decay = run.weight_decay * parameters
        self._mechanism, self._sigma = run.options.get("mechanism"), run.options.get("sigma", 0.0)
        self._generator = torch.Generator(parameters.device).manual_seed(run.seed)

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
