"""Ctrl-C at any moment of a load or of a decode, for each place where layers wait: nothing is lost."""

from __future__ import annotations

import functools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
import pytest
from commands import finish, start
from faults import (
    again,
    answer,
    arrays_left,
    assert_streamed,
    every_tier,
    load,
)
from interrupting import described, interrupt, places_of
from waiting import eventually, in_time

from vramjax.language_model import LanguageModel
from vramjax.residency import geometry_of
from vramjax.residency.host_memory import HostArrays

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left"),
    # One that comes as Python finalizes something is lost.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Interrupts:
    """Ctrl-C as the n-th call of a function of this project begins, in this thread: there Python looks for signals."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.num_calls = 0

    def __enter__(self) -> Interrupts:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> None:
        if "/vramjax/" in frame.f_code.co_filename:
            self.num_calls += 1
            if self.num_calls == self._left:
                sys.settrace(None)
                raise KeyboardInterrupt


def moments(function: Callable[[], Any], count: int) -> list[int]:
    """Some of the calls that a call makes, spread over all of it."""
    with Interrupts(at=0) as calls:
        function()
    assert calls.num_calls > 2 * count
    return [1 + calls.num_calls * i // count for i in range(count)]


@every_tier
def test_interrupts_of_a_decode(packed: Path, right_answer: list[int], tier: str) -> None:
    num_interrupted = 0
    with load(packed, tier) as model:
        answer(model)
        for at in moments(lambda: answer(model), 24):
            with Interrupts(at):
                try:
                    answer(model)
                except KeyboardInterrupt:
                    num_interrupted += 1
            assert answer(model) == right_answer, at
            assert_streamed(model)
    assert num_interrupted >= 20  # a moment more or less of waiting for a reader makes them differ


def no_thread_reads() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("vramjax-read")]


@every_tier
def test_interrupts_of_a_load(packed: Path, right_answer: list[int], tier: str) -> None:
    before, num_interrupted = jax.live_arrays(), 0

    def load_and_close() -> None:
        with load(packed, tier):
            pass

    load_and_close()
    for at in moments(load_and_close, 20):
        with Interrupts(at):
            try:
                load_and_close()
            except KeyboardInterrupt as error:
                num_interrupted += 1
                error.__traceback__ = None
        assert eventually(no_thread_reads), at  # an interrupted `close` does not wait for them
        assert arrays_left(before) == [], at  # which threads had in their hands
    assert num_interrupted >= 18
    again(packed, tier, right_answer)


def test_an_interrupt_anywhere_in_jax_is_no_refusal_of_pinned_memory() -> None:
    geometry, device = geometry_of({"w": np.zeros((8, 16), np.int8)}), jax.devices()[0]

    def take_and_give_back() -> None:
        HostArrays(geometry, device).close()

    for place in places_of(take_and_give_back, "/jax/_src/"):
        interrupt(take_and_give_back, place, "/jax/_src/")  # raises everything but an interrupt
        take_and_give_back()


def test_an_interrupt_while_jax_compares_arguments_is_an_interrupt(packed: Path, right_answer: list[int]) -> None:
    """JAX calls methods that a dataclass has made; whatever is raised in one is a ValueError to it."""
    with load(packed, "pinned") as model:
        answer(model)
        places = places_of(lambda: answer(model), "<string>")
        assert "__eq__" in {code.co_name for code, _ in places}
        for place in places:
            interrupt(lambda: answer(model), place, "<string>")  # raises everything but an interrupt
            assert answer(model) == right_answer, described(place)


@every_tier
def test_interrupts_by_signal(
    packed: Path, right_answer: list[int], monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """Real ones, at real moments, in the middle of whatever Python and JAX do then."""
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    # One that comes as Python finalizes something, or in a callback of JAX's, is lost.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    rng, num_interrupted = random.Random(0), 0
    try:
        with load(packed, tier) as model:
            started = time.perf_counter()
            answer(model)
            answer_s = time.perf_counter() - started
            for i in range(20):
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, answer_s))
                try:
                    while signal.getitimer(signal.ITIMER_REAL)[0] > 0:
                        answer(model)
                    time.sleep(0.01)  # it may have gone to another thread first
                except KeyboardInterrupt:
                    num_interrupted += 1
                in_time(functools.partial(check, model, right_answer, i))
    finally:
        signal.signal(signal.SIGALRM, handler)
    assert num_interrupted >= 10


def check(model: LanguageModel, right_answer: list[int], i: int) -> None:
    assert answer(model) == right_answer, i
    assert_streamed(model)


@pytest.mark.parametrize("num_bytes", [0, 1, 400])
def test_an_interrupted_command_on_the_mapped_tier(packed: Path, num_bytes: int) -> None:
    """Before the first token, at it, and in the middle."""
    process = start(
        f"--model={packed}", "--prompt=Hi", "--ignore_stop", "--max_new_tokens=4000", "--host=mapped", "--keep=1"
    )
    assert process.stdout
    if num_bytes:
        assert process.stdout.read(num_bytes)
    else:
        time.sleep(1.3)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.err.strip()) == (130, "interrupted")
