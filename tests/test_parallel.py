"""One function for many numbers, by several threads: all of them, the first error, and no thread that is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from interrupting import described, interrupt, places_of
from waiting import eventually

from vramjax.residency.parallel import call_each


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.enumerate()
    yield
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_each_is_called_once_several_at_the_same_time() -> None:
    together, called, done = threading.Barrier(3, timeout=10), [], []

    def function(i: int) -> None:
        together.wait()
        called.append(i)

    call_each(function, 12, num_threads=3, name="test", done=done.append)
    assert sorted(called) == sorted(done) == list(range(12))
    call_each(function, 0, num_threads=3, name="test", done=done.append)


def test_the_first_error_comes_out_and_nothing_more_is_begun() -> None:
    called: list[int] = []

    def function(i: int) -> None:
        called.append(i)
        if i == 1:
            raise ValueError("one")
        time.sleep(0.05)

    with pytest.raises(ValueError, match="one"):
        call_each(function, 100, num_threads=2, name="test", done=lambda i: None)
    assert len(called) < 10


def test_an_interrupt_at_every_step_leaves_no_call_under_way() -> None:
    """One that was left would go on to read into memory that is somebody else's by then."""
    names = ("/parallel.py", "/serial_calls.py", "/threading.py", "/concurrent/")
    threads, begun, ended = set(threading.enumerate()), [], []

    def function(i: int) -> None:
        begun.append(i)
        time.sleep(0.002)
        ended.append(i)

    def run() -> None:
        call_each(function, 6, num_threads=3, name="test", done=lambda i: None)

    places = places_of(run, *names)
    assert len(places) > 20
    for place in places:
        interrupt(run, place, *names)
        if "/threading.py" not in place[0].co_filename:  # where it waits for the threads: a second one may leave them
            assert len(begun) == len(ended), described(place)
        assert eventually(lambda: set(threading.enumerate()) <= threads), described(place)
    assert len(begun) == len(ended)
