"""What `benchmarks.clock` trains, as plain values. Without Heeler, since plain runs import this."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Task:
    """One task. It goes to a run's process as JSON, so it holds plain values only."""

    name: str
    data: str
    """A name of `benchmarks.clock_data.LOADERS`."""
    model: str
    """A name of `benchmarks.clock_training.MODELS`."""
    rate: float
    epochs: float
    batch: int
    """Examples of one worker in a step."""
    optimizer: str = "momentum"
    """sgd, momentum (0.9) or adamw."""
    decay: float = 0.0
    """Weight decay; of a convex task it is part of the objective."""
    rates: tuple[float, ...] = (0.5, 1.0, 2.0)
    """What `race` multiplies the rate by, to tune each order."""
    modes: tuple[str, ...] = ("cost",)
    """In which modes it is run unless it is named."""
    devices: tuple[str, ...] = ("cpu",)
    """On which devices it is run unless it is named."""
    threads: int | None = None
    """Of PyTorch; None: its own default."""
    workers: int = 1
    """Processes, each with its own part of the examples, joined by DDP over gloo."""
    labelled: bool = True
    """Whether targets are classes: strata."""
    convex: bool = False
    crops: bool = False
    """Random crops and flips of every batch, on the device."""
    half: bool = False
    """bfloat16 where autocast takes it, on a GPU."""
    compile: str = ""
    """A mode of `torch.compile`; empty: eager."""
    evaluate: bool = True
    """Whether the training loss says something; of random tokens it does not."""
    small_examples: int = 0
    """On a CPU: so many examples, where the task is made for a GPU; 0: all."""
    small_data: str = ""
    small_model: str = ""
    """On a CPU: other data and another model, where the task's own would take hours."""


EVERY = ("cost", "race", "gain")
GPU = ("cuda",)
TASKS = (
    Task("MLP 64-1024-512-10", "digits four times", "mlp", 0.05, 16, 64, modes=("cost", "race"), threads=1),
    Task(
        *("GPT 2×32", "characters 32", "gpt 2×32", 8e-3, 14, 16, "adamw", 0.01),
        modes=EVERY,
        labelled=False,
        threads=1,
    ),
    Task(
        *("mortgages, 4 workers", "16,384 mortgages", "linear", 0.1, 16, 16, "sgd"),
        modes=("cost", "race"),
        threads=1,
        workers=4,
        convex=True,
    ),
    Task(
        *("GPT 3×96", "characters 128", "gpt 3×96", 4e-3, 14, 32, "adamw", 0.01),
        modes=EVERY,
        devices=GPU,
        labelled=False,
    ),
    Task(
        *("ResNet-20", "images", "resnet", 0.1, 20, 64, "momentum", 1e-4),
        modes=EVERY,
        devices=GPU,
        crops=True,
        small_examples=1280,
    ),
    Task(
        *("GPT-2 124M, compiled", "tokens", "gpt-2", 1e-5, 16, 16, "adamw"),
        devices=GPU,
        labelled=False,
        half=True,
        compile="default",
        evaluate=False,
        small_examples=64,
        small_data="few tokens",
        small_model="small gpt-2",
    ),
    Task(
        *("LeNet, CUDA graphs", "random images", "lenet", 1e-3, 16, 64),
        devices=GPU,
        compile="reduce-overhead",
        small_examples=1280,
    ),
    Task(
        *("airbench94", "all images", "airbench", 11.5, 9.9, 1024),
        devices=GPU,
        small_examples=4096,
        small_model="small airbench",
    ),
)
"""Those that `benchmarks.small_tasks` does not have; `benchmarks.clock_data.tasks` adds its convex ones."""


def fitted(task: Task, device: str) -> Task:
    """The task as it is run on this device."""
    if device == "cuda":
        return replace(task, small_examples=0)
    return replace(task, data=task.small_data or task.data, model=task.small_model or task.model)
