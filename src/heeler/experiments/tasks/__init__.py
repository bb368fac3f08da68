"""The papers' tasks, by name: one small file each."""

from heeler.experiments.tasks.base import Examples, Task, settings
from heeler.experiments.tasks.digits import Digits, DigitsMLP

TASKS: dict[str, Task] = {task.name: task for task in (Digits(), DigitsMLP())}
"""Name → task. Tasks of your own may be added."""


def get_task(name: str) -> Task:
    """A task by name."""
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}: choose among {', '.join(TASKS)}")
    return TASKS[name]


__all__ = ["TASKS", "Examples", "Task", "get_task", "settings"]
