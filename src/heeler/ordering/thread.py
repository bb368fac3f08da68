"""One background thread that does its tasks in order, and never keeps the process from ending."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Like `ThreadPoolExecutor(1)`, but a daemon: a task that waits for a lost rank must not hold up the exit."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Do `task` after all that were submitted before it."""
        future: Future[T] = Future()
        self._tasks.put((future, task))
        return future

    def __del__(self) -> None:
        self._tasks.put(None)


def _work(tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]) -> None:
    while (item := tasks.get()) is not None:
        future, task = item
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        del future, task, item
