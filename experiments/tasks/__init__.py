"""The papers' tasks, by name: one small file each."""

from experiments.tasks.base import Examples, Task, settings
from experiments.tasks.chargpt import CharGPT, CharGPT96
from experiments.tasks.cifar import CifarLeNet, CifarResNet
from experiments.tasks.digits import Digits, DigitsMLP
from experiments.tasks.glue import (
    Glue,
    GlueCoLA,
    GlueFineTune,
    GlueFineTuneCoLA,
    GlueFineTuneSST,
    GlueMRPC,
    GlueRTE,
)
from experiments.tasks.hmda import Hmda
from experiments.tasks.m4 import M4
from experiments.tasks.wikitext import WikiTextGPT, WikiTextLargeGPT, WikiTextLSTM

_ALL: tuple[type[Task], ...] = (
    *(Digits, DigitsMLP, Hmda, Glue, GlueCoLA, GlueRTE, GlueMRPC, GlueFineTune, GlueFineTuneCoLA, GlueFineTuneSST),
    *(M4, WikiTextLSTM, WikiTextGPT, WikiTextLargeGPT, CharGPT, CharGPT96, CifarLeNet, CifarResNet),
)
TASKS: dict[str, Task] = {task.name: task() for task in _ALL}
"""Name → task. Tasks of your own may be added."""


def get_task(name: str) -> Task:
    """A task by name."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}: choose among {', '.join(TASKS)}")
    return TASKS[name]


__all__ = ["TASKS", "Examples", "Task", "get_task", "settings"]
