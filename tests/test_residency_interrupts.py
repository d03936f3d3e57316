"""Ctrl-C at any line of a sweep, and while a sweep that failed is being cleaned up: the next one is right."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_transfer import FakeStore, FakeTransfer
from faults import arrays_left

import vramjax
from vramjax.residency import host_memory
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.host_store import HostStore
from vramjax.residency.multi import MultiController
from vramjax.residency.policy import Schedule, both_sides_window, past_window, pinned_ring, resident
from vramjax.residency.transfer import DeviceTransfer
from vramjax.residency.turn_transfer import TurnTransfer

NUM_LAYERS, WIDTH = 6, 8
SCHEDULES = {
    "pinned_ring": pinned_ring(NUM_LAYERS, 4, ring=2),
    "pinned_ring warm": pinned_ring(NUM_LAYERS, 3, ring=1, warm=True),
    "past": past_window(NUM_LAYERS, 2),
    "both_sides": both_sides_window(NUM_LAYERS, 2),
    "resident": resident(NUM_LAYERS, warm=False),
}
every_schedule = pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)


class ConsumerError(Exception):
    """What the consumer of a sweep fails with."""


class Interrupt:
    """Ctrl-C as the n-th line of `vramjax.residency`, or of what it leaves a `with` by, begins in this thread.

    But not in `host_memory`, which takes a lock: tracing sees a line between the end of a `with` and its letting go,
    where Python does not look for signals.
    """

    def __init__(self, at: int) -> None:
        self._left = at
        self.has_come = False

    def __enter__(self) -> Interrupt:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if frame.f_code.co_filename == contextlib.__file__ and frame.f_back is not None:
            frame = frame.f_back
        file = frame.f_code.co_filename
        return self._line if "/vramjax/residency/" in file and file != host_memory.__file__ else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        self._left -= event == "line"
        if self._left == 0:
            self.has_come = True
            raise KeyboardInterrupt
        return self._line


def broken_off(sweep: Any, how: str, at: int) -> tuple[bool, BaseException | None]:
    """Breaks a sweep off after half of the layers, with Ctrl-C at some line; whether that came, and what was raised.

    The error has everything in its hands that was, as it has in a notebook.
    """
    for _ in range(NUM_LAYERS // 2):
        next(sweep)
    with Interrupt(at) as interrupt:
        try:
            sweep.close() if how == "close" else sweep.throw(ConsumerError)
        except (ConsumerError, KeyboardInterrupt) as error:
            return interrupt.has_come, error
    return interrupt.has_come, None


@every_schedule
@pytest.mark.parametrize("how", ["close", "throw"])
def test_a_sweep_whose_abort_is_interrupted_blocks_nothing(schedule: Schedule, how: str) -> None:
    at, has_come = 0, True
    while has_come:
        at += 1
        transfer = FakeTransfer(seed=at)
        controller = Controller(FakeStore([i % 2 for i in range(NUM_LAYERS)]), schedule, transfer)
        for _ in range(at % 2):
            run(controller)
        sweep = controller.sweep()
        has_come, error = broken_off(sweep, how, at)
        assert (error is None) == (how == "close" and not has_come)
        for _ in range(2):
            run(controller)
        assert controller.stats.sweeps_aborted in (1, 2)  # once more if Ctrl-C came after it had been counted
        controller.close()
    assert at > 30


@pytest.mark.parametrize("how", ["close", "throw"])
def test_nor_does_one_over_several_devices(how: str) -> None:
    at, has_come = 0, True
    while has_come:
        at += 1
        layers = MultiController(
            [Controller(FakeStore([0] * 3), pinned_ring(3, 2, ring=1), FakeTransfer(seed=i)) for i in range(2)]
        )
        has_come, error = broken_off(layers.sweep(), how, at)
        assert (error is None) == (how == "close" and not has_come)
        if at % 3 == 0:
            layers.forget()
        if at % 3 == 1:
            layers.warm_up()
        for _ in range(2):
            assert [weights.memory.content for _, weights in layers.sweep()] == [0, 0, 1, 1, 2, 2]
        layers.close()
    assert at > 60


def run(controller: Controller) -> None:
    assert [weights.memory.content for _, weights in controller.sweep()] == [*range(NUM_LAYERS)]


def layers() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    names = {"w": WIDTH, "v": WIDTH // 2, "u": 1}
    return [
        {name: rng.standard_normal((rows, WIDTH)).astype(np.float32) for name, rows in names.items()}
        for _ in range(NUM_LAYERS)
    ]


def step(weights, x):
    return jnp.tanh(weights["w"] @ x) + weights["v"][0] + weights["u"][0]


@pytest.mark.parametrize("make_transfer", [DeviceTransfer, FusedTransfer, lambda: TurnTransfer(num_devices=1)])
@every_schedule
def test_an_interrupt_at_any_line_of_a_sweep(schedule: Schedule, make_transfer: Callable[[], DeviceTransfer]) -> None:
    with Controller(HostStore(layers()), resident(NUM_LAYERS), DeviceTransfer()) as everything:
        expected = outcome(everything, everything.jit(step))
    with Controller(HostStore(layers()), schedule, make_transfer()) as controller:
        layer_step = controller.jit(step)
        for _ in range(2):
            np.testing.assert_array_equal(outcome(controller, layer_step), expected)
        at, has_come = 0, True
        while has_come:
            at += 1
            error: BaseException | None = None
            with Interrupt(at) as interrupt:
                try:
                    outcome(controller, layer_step)
                except KeyboardInterrupt as raised:
                    error = raised  # which keeps what it has in its hands until the next one
            has_come = interrupt.has_come
            assert (error is None) != has_come
            for _ in range(1 + at % 2):  # the next time a first sweep is interrupted, or a steady one
                np.testing.assert_array_equal(outcome(controller, layer_step), expected)
            assert controller.stats.last_sweep_bytes_uploaded > 0 or not schedule.releases
        assert at > 120


def test_a_stream_whose_close_is_interrupted_is_closed_by_another() -> None:
    before = jax.live_arrays()
    at, has_come = 0, True
    while has_come:
        at += 5  # some of the lines: to see what is left takes its time
        stream = vramjax.stream(layers(), keep=4)
        layer_step = stream.jit(step)
        outcome(stream, layer_step)
        sweep = stream.sweep()
        next(sweep)
        with Interrupt(at) as interrupt:
            try:
                stream.close()
            except KeyboardInterrupt as error:
                error.__traceback__ = None
        has_come = interrupt.has_come
        stream.close()
        assert arrays_left(before) == [], at
    assert at > 60


def outcome(controller: Controller, layer_step: Callable[..., Any]) -> np.ndarray:
    x = jnp.ones(WIDTH)
    for _, weights in controller.sweep():
        x = layer_step(weights, x)
    return np.asarray(x)


@pytest.mark.parametrize("how", ["close", "throw"])
def test_a_stream_whose_abort_is_interrupted(how: str) -> None:
    with vramjax.stream(layers(), keep=3) as stream:
        layer_step = stream.jit(step)
        expected = outcome(stream, layer_step)
        at, has_come = 0, True
        while has_come:
            at += 1
            has_come, error = broken_off(stream.sweep(), how, at)
            assert (error is None) == (how == "close" and not has_come)
            np.testing.assert_array_equal(outcome(stream, layer_step), expected)
    assert at > 60
