"""One function for many numbers, by several threads, none of which outlives the call, even an interrupted one.

Pools of threads of the standard library start theirs in the caller's thread: an interrupt there may leave a thread
behind that nobody knows of. Knows a function; not what it does.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from vramjax.residency.serial_calls import SerialCalls


def call_each(
    function: Callable[[int], None], count: int, *, num_threads: int, name: str, done: Callable[[int], None]
) -> None:
    """Calls `function(i)` for each i of `range(count)`, and after each of them `done(i)` in this thread.

    Args:
      function: called in the order of the numbers, by any thread.
      count: how many numbers.
      num_threads: calls at the same time, at most.
      name: the name of the threads.
      done: called in the order in which calls end.

    Raises:
      Exception: whatever `function` raised first; calls that have not begun are then not made.
    """
    calls, work = SerialCalls(), _Work(function, range(count))

    def start() -> None:
        for _ in range(min(num_threads, count)):
            thread = threading.Thread(target=work.run, name=name, daemon=False)
            thread.start()
            work.threads.append(thread)

    try:
        calls.result_of(start)
        work.report(done)
    finally:
        calls.result_of(work.stop)
        for thread in work.threads:
            thread.join()


class _Work:
    """What is to be done, and what has been."""

    def __init__(self, function: Callable[[int], None], numbers: range) -> None:
        self.threads: list[threading.Thread] = []
        self._function, self._num_calls = function, len(numbers)
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[int | BaseException] = queue.SimpleQueue()
        for number in numbers:
            self._numbers.put(number)

    def run(self) -> None:
        while (number := self._take()) is not None:
            try:
                self._function(number)
            except BaseException as error:
                self._results.put(error)
            else:
                self._results.put(number)

    def report(self, done: Callable[[int], None]) -> None:
        for _ in range(self._num_calls):
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            done(result)

    def stop(self) -> None:
        while self._take() is not None:
            pass

    def _take(self) -> int | None:
        try:
            return self._numbers.get_nowait()
        except queue.Empty:
            return None
