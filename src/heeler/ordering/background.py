"""One background thread that does its tasks in order, and does not keep the process from ending for long."""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_PATIENCE = 10.0
"""Seconds that the process waits at its end for tasks under way: a thread that is cut off in the middle of a transfer
aborts the process. Usually it is the last epoch's exchange, which takes a fraction of a second."""


GRACE = 2.0
"""Seconds that a task of a moment may take on a busy machine."""


def result_of(future: Future[T], wait: float) -> T:
    """The result within `wait` seconds, or TimeoutError.

    A process that was frozen meanwhile finds its time gone and its threads' work not done: there is a moment more.
    """
    try:
        return future.result(wait)
    except FutureTimeout:
        return future.result(GRACE if wait > 0 else 0.0)


def yield_to_training() -> None:
    """This thread runs where nothing else wants to, as far as the system can have it so: on Linux."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


class BackgroundThread:
    """Like `ThreadPoolExecutor(1)`, but a daemon: a task that waits for a lost rank must not hold up the exit.

    ends_last: at the exit, end after the other threads, whose tasks need it.
    """

    def __init__(self, name: str, *, ends_last: bool = False) -> None:
        self._thread = _Thread(name, ends_last)
        self._thread.start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Do `task` after all that were submitted before it."""
        future: Future[T] = Future()
        self._thread.tasks.put((future, task))
        return future

    def close(self, wait: float = 0.0) -> None:
        """End after the tasks that were submitted, and wait for that for up to `wait` seconds."""
        self._thread.tasks.put(None)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join(wait)

    def __del__(self) -> None:
        self.close()


class _Thread(threading.Thread):
    def __init__(self, name: str, ends_last: bool) -> None:
        super().__init__(name=name, daemon=True)
        self.ends_last = ends_last
        self.tasks: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()

    def run(self) -> None:
        while (item := self.tasks.get()) is not None:
            future, task = item
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task, item


@atexit.register
def _finish() -> None:
    threads = [thread for thread in threading.enumerate() if isinstance(thread, _Thread)]
    deadline = time.monotonic() + EXIT_PATIENCE
    for turn in (False, True):
        ending = [thread for thread in threads if thread.ends_last == turn]
        for thread in ending:
            thread.tasks.put(None)
        for thread in ending:
            thread.join(max(0.0, deadline - time.monotonic()))
