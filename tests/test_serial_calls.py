"""Calls that are made in threads of their own: in order, and whole, whatever comes to who asked for them."""

from __future__ import annotations

import _thread
import threading
from typing import Any

import pytest
from interrupting import described, interrupt, places_of

from vramjax.residency.serial_calls import SerialCalls


def test_results_and_errors_come_back() -> None:
    calls = SerialCalls()
    assert calls.result_of(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        calls.result_of(lambda: 1 // 0)
    assert calls.result_of(threading.get_ident) != threading.get_ident()


def test_calls_are_made_one_at_a_time_in_order() -> None:
    calls, log = SerialCalls(), []
    for i in range(200):
        calls.make(lambda i=i: log.extend([i, -i]))
    assert calls.result_of(lambda: list(log)) == [x for i in range(200) for x in (i, -i)]


def test_an_interrupt_at_every_step() -> None:
    """What was asked for is made whole, or it was not asked for yet; the lock is free again."""
    calls, log = SerialCalls(), []
    names = ("/serial_calls.py", "/threading.py")
    places = places_of(lambda: calls.result_of(lambda: log.append(0)), *names)
    assert len(places) >= 10
    for place in places:
        log.clear()
        assert interrupt(lambda: calls.result_of(lambda: log.append(1)), place, *names)
        assert calls.result_of(lambda: log.append(2) or list(log)) in ([1, 1, 2], [1, 2]), described(place)
    assert not calls.lock.locked()


def test_as_python_exits_there_are_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    assert SerialCalls().result_of(lambda: 7) == 7
