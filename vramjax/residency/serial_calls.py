"""Calls that no interrupt breaks off, for state that several threads share.

KeyboardInterrupt comes to Python's main thread, at any step, and no `with` or `finally` can be relied on there to give
a lock back: some versions of Python leave a block without them if an interrupt comes as a loop inside it begins anew
(3.12 and 3.13), or as the lock is taken (3.14). And locks that are written in Python, such as those with which a thread
is started, stay taken if it comes inside of them. Knows functions; not what they do.
"""

from __future__ import annotations

import _thread
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SerialCalls:
    """Makes calls in threads of its own, to which no interrupt comes: with its lock, in the order they are asked for.

    Invariant: a call is made from its beginning to its end, whatever comes to who asked for it; and before those that
    are asked for after it. Who asks never takes the lock.

    Example: `calls.result_of(count_up)` is what `count_up()` returns. Should an interrupt come meanwhile, it is counted
    up all the same, or not at all if the interrupt was faster than the request; and `calls.result_of(read_count)`
    then waits for that.

    Calls are short and use nothing of JAX: Python does not wait for them when it exits.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()  # for threads to which no interrupt comes, and not for calls, which have it
        self._asked: queue.SimpleQueue[_Call[Any]] = queue.SimpleQueue()

    def make(self, function: Callable[[], T]) -> _Call[T]:
        """Asks for a call, and does not wait for it."""
        call = _Call(function)
        self._asked.put(call)
        try:
            # At this level. An interrupt in `Thread.start` may leave a thread behind that never runs and never ends.
            _thread.start_new_thread(self._make_all, ())
        except RuntimeError:  # Python is about to exit
            self._make_all()
        return call

    def result_of(self, function: Callable[[], T]) -> T:
        """What the call returns or raises."""
        return self.make(function).result()

    def _make_all(self) -> None:
        """All that were asked for: one for which no thread was started, because of an interrupt, is among them."""
        with self.lock:
            while not self._asked.empty():
                self._asked.get().make()


class _Call(Generic[T]):
    """A call that one thread makes for another."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._outcome: queue.SimpleQueue[Callable[[], T]] = queue.SimpleQueue()

    def make(self) -> None:
        try:
            result = self._function()
        except BaseException as error:
            self._outcome.put(_raising(error))
        else:
            self._outcome.put(lambda: result)

    def result(self) -> T:
        """Waits for it; once."""
        return self._outcome.get()()


def _raising(error: BaseException) -> Callable[[], Any]:
    def outcome() -> Any:
        raise error

    return outcome
