"""How a run of these experiments differs from others: mechanisms act on its steps, and its epochs are measured."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from heeler.diversity import add_langevin_noise, quantize
from heeler.experiments.diversity.point import Change, example_gradients, measure
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
        gradients = example_gradients(self._called, task, walked, run.step)
        return {"diversity": measure(gradients, run.step, change(run, walked[0].device))}


def change(run: Run, device: torch.device) -> Change | None:
    """What the mechanism does to a table of gradients."""
    generator = torch.Generator(device).manual_seed(run.seed)
    mechanism = run.options.get("mechanism")
    if mechanism == "quantize":
        return partial(quantize, generator=generator)
    if mechanism == "langevin":
        return partial(_with_noise, sigma=run.options["sigma"], generator=generator)
    return None


def _with_noise(gradients: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(gradients.shape, generator=generator, device=gradients.device)
    return gradients + sigma * noise


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
