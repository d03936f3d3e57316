"""Waiting for other threads in tests: for something to be true, for something to end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TIMEOUT_S = 30


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true in time."""
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.001)
    return True


def in_time(function: Callable[[], None]) -> None:
    """Runs `function` in a thread; what does not end is a deadlock."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "deadlock"
    if errors:
        raise errors[0]


class Copy:
    """A copy that has ended when a test says so, as an array that is ready then."""

    def __init__(self, *, has_ended: bool = False) -> None:
        self._event = threading.Event()
        if has_ended:
            self.end()

    def end(self) -> None:
        self._event.set()

    def block_until_ready(self) -> None:
        assert self._event.wait(TIMEOUT_S)
