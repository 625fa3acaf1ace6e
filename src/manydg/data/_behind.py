"""Work that goes on in a thread of its own, behind the one that hands it over or ahead of the one that takes it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_MOST_BYTES = 1 << 26
_SMALL = 1 << 16
A = TypeVar("A")
T = TypeVar("T")


class HashingThread:
    """Adds bytes to checksums behind the caller's back, in the order given; hashing does not hold the interpreter.

    At most 64 MB wait at a time, or a single piece if it is larger. What waits must not change until :meth:`settle`.
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def add(self, digest: Any, data: memoryview) -> None:
        """Have ``digest.update(data)`` done; waits only for room."""
        if data.nbytes < _SMALL and not self._waiting:
            digest.update(data)
            return
        self._make_room(data.nbytes)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._waiting.append((self._pool.submit(digest.update, data), data.nbytes))
        self._bytes += data.nbytes

    def _make_room(self, coming: int) -> None:
        while self._waiting and (self._waiting[0][0].done() or self._bytes + coming > _MOST_BYTES):
            done, length = self._waiting.popleft()
            done.result()
            self._bytes -= length

    def settle(self) -> None:
        """Wait until all that was given is part of its checksum."""
        self._make_room(_MOST_BYTES + 1)

    def close(self) -> None:
        """End the thread; what still waits is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def made_ahead(make: Callable[[A], T], items: Iterable[A], threads: int = 2) -> Iterator[T]:
    """``map(make, items)``, of which threads make the next few while the caller works on the one it has.

    Worth it where ``make`` does not hold the interpreter, as numpy's sorting does not.
    """
    with ThreadPoolExecutor(threads, thread_name_prefix="ahead") as pool:
        waiting: deque[Future[T]] = deque()
        for item in items:
            waiting.append(pool.submit(make, item))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
