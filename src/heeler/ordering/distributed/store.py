"""Short notices between ranks in the process group's store: who has come how far, and decisions that stand once made.

The store lives in one process, usually rank 0. While that one is frozen, a call of the store blocks. So all calls are
made in one thread, and whoever waits for one waits for a bounded time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

import torch.distributed as dist

from heeler.ordering.background import GRACE, BackgroundThread, result_of

T = TypeVar("T")


class StoreLost(RuntimeError):
    """The store does not answer, or is gone."""


class BoundedStore:
    """The default process group's store. One per process, see `bounded_store`; its thread ends with its last user."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self._users = 0
        self._thread: BackgroundThread | None = None
        self._overdue: Future[Any] | None = None
        self._gone = False

    def open(self) -> None:
        """One more user."""
        self._users += 1
        if self._thread is None:
            self._thread = BackgroundThread("heeler-store", ends_last=True)

    def close(self) -> None:
        """One fewer."""
        self._users -= 1
        if self._users == 0 and self._thread is not None:
            thread, self._thread = self._thread, None
            thread.close(GRACE)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Do `task` after all before it, whenever the store answers."""
        if self._thread is None:
            failed: Future[T] = Future()
            failed.set_exception(StoreLost("the connection to the process group's store was closed"))
            return failed
        return self._thread.submit(lambda: self._run(task))

    def _run(self, task: Callable[[], T]) -> T:
        if self._gone:  # a lost connection is lost for good, and PyTorch prints a page for every try
            raise StoreLost("the process group's store is gone")
        try:
            return task()
        except RuntimeError:
            self._gone = True
            raise StoreLost("the process group's store is gone") from None

    def call(self, task: Callable[[], T], wait: float) -> T:
        """Do `task` within `wait` seconds, or raise `StoreLost`; at once, while an earlier call is overdue."""
        return self.result(self.submit(task), wait)

    def result(self, future: Future[T], wait: float) -> T:
        """What a submitted task returns; see `call`."""
        if self._overdue is not None and not self._overdue.done():
            wait = 0.0
        try:
            return result_of(future, wait)
        except FutureTimeout:
            if not future.done():
                self._overdue = future
            raise StoreLost("the process group's store does not answer") from None


class Notices:
    """The notices of one group of ranks, under a prefix of its own.

    Each rank has one number under each name, which only grows; a decision is the first text written under a key.
    """

    def __init__(self, store: BoundedStore, prefix: str, rank: int, size: int) -> None:
        self._store, self._prefix = store, prefix
        self._prefixed = dist.PrefixStore(prefix, store.store)
        self.rank, self.size = rank, size

    def under(self, prefix: str) -> Notices:
        """Notices of the same ranks that are apart from these."""
        return Notices(self._store, f"{self._prefix}/{prefix}", self.rank, self.size)

    def post(self, name: str, number: int) -> None:
        """Let the others know this rank's number; waits for nobody."""
        self._store.submit(lambda: self._prefixed.set(f"{name}@{self.rank}", str(number)))

    def numbers(self, name: str) -> list[int]:
        """The number that each rank has posted, -1 for none."""
        return self._store.call(lambda: self._numbers(name, range(self.size)), GRACE)

    def behind(self, name: str, number: int, ranks: Sequence[int], wait: float, stop: str) -> list[int]:
        """Wait until `ranks` have posted at least `number`, up to `wait` seconds; returns those that have not.

        Raises `Stopped` if a decision other than "commit" stands under the key `stop`.
        """
        missing = list(ranks)

        def ask() -> bool:
            nonlocal missing
            missing = [r for r, n in zip(missing, self._numbers(name, missing), strict=True) if n < number]
            word = self._word(stop)
            if word not in (None, "commit"):
                raise Stopped(str(word))
            return not missing

        self._until(ask, wait)
        return missing

    def decide(self, key: str, word: str) -> str:
        """Write `word` unless something stands there; returns what stands there. If the store does not answer now,
        the word is written when it does."""
        return self._store.result(self.decide_later(key, word), GRACE)

    def decide_later(self, key: str, word: str) -> Future[str]:
        """As `decide`, without waiting for it."""
        return self._store.submit(lambda: bytes(self._prefixed.compare_set(key, "", word)).decode())

    def decided(self, key: str, wait: float = 0.0) -> str | None:
        """What stands under `key`, waiting for it up to `wait` seconds."""
        return self._until(lambda: self._word(key), wait) or None

    def wait_for(self, ready: Callable[[], T], wait: float) -> T:
        """Ask again and again until the answer is true or `wait` seconds have passed; returns the last answer."""
        deadline = time.monotonic() + wait
        pause = 0.0005
        while True:
            answer = ready()
            if answer or time.monotonic() >= deadline:  # asked before looked at the clock: this rank may have slept
                return answer
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

    def _until(self, ask: Callable[[], T], wait: float) -> T:
        """As `wait_for`, of what the store's thread is to ask."""
        deadline = time.monotonic() + wait
        return self.wait_for(lambda: self._store.call(ask, max(deadline - time.monotonic(), GRACE)), wait)

    # In the store's thread

    def _word(self, key: str) -> str | None:
        return bytes(self._prefixed.get(key)).decode() if self._prefixed.check([key]) else None

    def _numbers(self, name: str, ranks: Sequence[int]) -> list[int]:
        keys = [f"{name}@{rank}" for rank in ranks]
        if self._prefixed.check(keys):
            return [int(text) for text in self._prefixed.multi_get(keys)]
        return [int(self._word(key) or -1) for key in keys]


class Stopped(Exception):
    """A decision was made that ends what this rank was waiting for."""

    def __init__(self, word: str) -> None:
        super().__init__(word)
        self.word = word


_made: tuple[int, BoundedStore] | None = None


def bounded_store() -> BoundedStore:
    """The one of this process and its default process group."""
    global _made
    store: Any = dist.distributed_c10d._get_default_store()
    if _made is None or _made[0] != os.getpid() or _made[1].store is not store:
        _made = (os.getpid(), BoundedStore(store))
    return _made[1]
