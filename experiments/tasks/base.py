"""What a task is: data, model, loss and measure, and the settings it was published with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from experiments.folder import Folder

if TYPE_CHECKING:
    from experiments.setup import Run


@dataclass
class Examples:
    """Training and test examples, on the device that trains: tensors with one row per example, inputs before target."""

    train: tuple[Tensor, ...]
    test: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.train[0])

    def to(self, device: str | torch.device) -> Examples:
        return Examples(tuple(t.to(device) for t in self.train), tuple(t.to(device) for t in self.test))


class Task:
    """One experiment. A subclass says what is different about it."""

    name: ClassVar[str]
    summary: ClassVar[str]
    defaults: ClassVar[dict[str, Any]]
    """Settings of `Run` as published; what the caller gives goes before them."""
    metric: ClassVar[str] = "test_accuracy"
    higher_is_better: ClassVar[bool] = True
    published_exact: ClassVar[bool] = True
    """Whether the published rules get full gradients here, or sketches, for full ones would not fit."""
    augments: ClassVar[bool] = False
    """Whether the option `augment` does something here."""
    convex: ClassVar[bool] = False
    """Whether the least objective can be found, so that curves show the distance from it."""
    tf32: ClassVar[bool] = False
    """Whether rounding products to 10 bits on a GPU is good enough here."""
    chunk: ClassVar[int] = 4096
    """Examples in a batch of an evaluation."""

    def load(self, folder: Folder, options: dict[str, Any]) -> Examples:
        """All examples on the CPU, in an order that says nothing of their labels."""
        raise NotImplementedError

    def model(self, examples: Examples, options: dict[str, Any]) -> nn.Module:
        """A new model; its weights come from torch's global generator."""
        raise NotImplementedError

    def losses(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """(B,) each example's loss."""
        *inputs, target = batch
        return nn.functional.cross_entropy(model(*inputs), target, reduction="none")

    def prepare(self, batch: tuple[Tensor, ...], options: dict[str, Any]) -> tuple[Tensor, ...]:
        """What is done to a training batch before the model sees it: augmentation."""
        return batch

    def labels(self, examples: Examples) -> Tensor:
        """(N,) what shards are sorted by to make the workers' data differ."""
        return examples.train[-1]

    def evaluate(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Training loss over all examples, without the L2 term, and the test measures."""
        return {"train_loss": self.mean_loss(model, examples.train), **self.test(model, examples)}

    def test(self, model: nn.Module, examples: Examples) -> dict[str, float]:
        """Test loss and accuracy."""
        sums = torch.zeros(2, dtype=torch.float64, device=examples.test[0].device)  # read once: a GPU is not waited for
        for *inputs, target in chunks(examples.test, self.chunk):
            logits = model(*inputs)
            sums[0] += nn.functional.cross_entropy(logits, target, reduction="sum")
            sums[1] += (logits.argmax(-1) == target).sum()
        loss, accuracy = (sums / len(examples.test[0])).tolist()
        return {"test_loss": loss, "test_accuracy": accuracy}

    def mean_loss(self, model: nn.Module, tensors: tuple[Tensor, ...]) -> float:
        """The mean of `losses` over all rows, summed in double precision."""
        total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
        for batch in chunks(tensors, self.chunk):
            total += self.losses(model, *batch).double().sum()
        return float(total) / len(tensors[0])


def resampled(examples: Examples, options: dict[str, Any]) -> Examples:
    """Options of every task: `examples`, take so many; `replication` r, of them a 1/r-th part r times each.

    As tasks load examples in an order that says nothing of them, the first part is a random one.
    """
    count, times = options.get("examples", len(examples)), options.get("replication", 1)
    if not 1 <= times <= count <= len(examples):
        raise ValueError(f"of {len(examples)} examples, {count} with each of a part {times} times cannot be had")
    train = (torch.cat([t[: count // times]] * times) for t in examples.train)
    return Examples(tuple(train), examples.test) if (count, times) != (len(examples), 1) else examples


def chunks(tensors: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """The same rows of all tensors, `size` at a time."""
    return list(zip(*(t.split(size) for t in tensors), strict=True))


def parameters_l2(model: nn.Module) -> float:
    """Half the sum of all squared parameters."""
    return 0.5 * sum(float(p.detach().double().square().sum()) for p in model.parameters())


def settings(task: Task, rule: str, seed: int = 0, **changes: Any) -> Run:
    """The task's published settings with `changes`."""
    from experiments.setup import Run  # imports Heeler, and a benchmark's plain runs need tasks without it

    options = {**task.defaults.get("options", {}), **changes.pop("options", {})}
    merged = {**task.defaults, **changes, "options": options}
    if merged.get("schedule", "constant") != "constant" and "decay_every" not in changes:
        merged["decay_every"] = 0  # the schedule is in place of the published one
    return Run.from_json({"task": task.name, "rule": rule, "seed": seed, **merged})
