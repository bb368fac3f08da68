"""Many small jobs on one machine: processes that take the next one when they are done with one."""

from __future__ import annotations

import os
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

Say = Callable[[str], None]


class Job(Protocol):
    """What is handed to a process; it is pickled."""

    @property
    def key(self) -> str:
        """Different for different jobs."""


class Agenda(Protocol):
    """What is still to be done."""

    waiting: deque[Any]
    """Jobs that may begin, the next one first."""

    def done(self, key: str) -> None:
        """The job has ended, well or not; others may be waiting now."""


class Place(Protocol):
    """Who carries a job out, in whichever process; it is pickled."""

    def attempt(self, job: Any, say: Say) -> None:
        """Carry the job out, or note why that was not possible."""


def in_processes(agenda: Agenda, place: Place, jobs: int, deadline: float, say: Say) -> None:
    """`jobs` processes, which keep loaded data from job to job, until nothing waits or the deadline (`time.time`).

    A process that dies takes only its current job with it. `say` is a function of a module.
    """
    import torch.multiprocessing as processes

    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the machine's cores
    context = processes.get_context("spawn")  # a CUDA context does not survive a fork
    ended: Any = context.Queue()
    crew: list[tuple[Any, Any]] = []
    busy: dict[int, str] = {}  # process → the key of its job

    def hand_out(number: int) -> None:
        if agenda.waiting and time.time() < deadline:
            job = agenda.waiting.popleft()
            busy[number] = job.key
            crew[number][1].put(job)

    def hand_out_to_idle() -> None:
        for number, (process, _) in enumerate(crew):
            if number not in busy and process.is_alive():
                hand_out(number)

    for number in range(jobs if agenda.waiting else 0):
        own = context.SimpleQueue()
        process = context.Process(target=_work, args=(number, own, ended, place, say), daemon=True)
        process.start()
        crew.append((process, own))
        hand_out(number)
    while busy:
        try:
            number = ended.get(timeout=1.0)
        except queue.Empty:
            dead = [number for number in busy if not crew[number][0].is_alive()]
        else:
            dead = [number]
        for number in dead:
            if number in busy:
                agenda.done(busy.pop(number))
        if dead:
            hand_out_to_idle()
    for process, own in crew:
        own.put(None)
        process.join()


def _work(number: int, own: Any, ended: Any, place: Place, say: Say) -> None:
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    while (job := own.get()) is not None:
        place.attempt(job, say)
        ended.put(number)
