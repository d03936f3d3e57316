"""Uploads of a device that takes turns: the same bits, little of them in the calls of a step, the rest in front."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vramjax.errors import ConfigError
from vramjax.residency import programs
from vramjax.residency.controller import Controller
from vramjax.residency.host_store import HostStore
from vramjax.residency.jit_options import JitOptions
from vramjax.residency.policy import Schedule, pinned_ring, window
from vramjax.residency.transfer import DeviceTransfer
from vramjax.residency.turn_transfer import TurnTransfer

WIDTH = 32
NUM_LAYERS = 8
SCHEDULES = [
    window(NUM_LAYERS, None),
    window(NUM_LAYERS, 2, "past"),
    window(NUM_LAYERS, 2, "both_sides"),
    *(pinned_ring(NUM_LAYERS, keep, ring=ring) for keep in range(1, NUM_LAYERS) for ring in (1, 2, 3)),
]


@functools.cache
def make_layers() -> list[dict[str, np.ndarray]]:
    """Layers of 16, 8, 4, 2 and 1 rows of WIDTH numbers."""
    rng = np.random.default_rng(0)
    names = {"a": 16, "b": 8, "c": 4, "d": 2, "e": 1}
    return [
        {name: rng.standard_normal((rows, WIDTH)).astype(np.float32) for name, rows in names.items()}
        for _ in range(NUM_LAYERS)
    ]


def step(weights, x):
    return sum(jnp.tanh(weights[name] @ x).sum() * (i + 1) for i, name in enumerate("abcde")) + x / 2


def run(controller: Controller, num_sweeps: int = 4, *, spread: bool = True) -> list[np.ndarray]:
    layer_step = controller.jit(step, donate_argnums=(1,), spread=spread)
    results = []
    for _ in range(num_sweeps):
        x = jnp.linspace(0, 1, WIDTH)
        for _, weights in controller.sweep():
            x = layer_step(weights, x)
        results.append(np.asarray(x))
    return results


@functools.cache
def expected() -> np.ndarray:
    with Controller(HostStore(make_layers()), window(NUM_LAYERS, None), DeviceTransfer()) as controller:
        return run(controller, 1)[0]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Programs that copy, in order: "alone" with the names of the arrays, or "along"."""
    log: list[str] = []
    copy_into, carrying = programs.copy_into, programs.carrying
    rows = {16: "a", 8: "b", 4: "c", 2: "d", 1: "e"}

    def names(host: Any) -> str:
        return "".join(rows[len(array)] for array in jax.tree.leaves(host))

    def watched(*args: Any) -> Any:
        program = carrying(*args)

        def call(slots: Any, hosts: Any, *args: Any, **kwargs: Any) -> Any:
            log.append(f"along {names(hosts)}")
            return program(slots, hosts, *args, **kwargs)

        return call

    def copy_alone(slot: Any, host: Any) -> Any:
        log.append(f"alone {names(host)}")
        return copy_into(slot, host)

    monkeypatch.setattr(programs, "carrying", watched)
    monkeypatch.setattr(programs, "copy_into", copy_alone)
    return log


@pytest.mark.parametrize("num_devices", [1, 2, 3, 100])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s.name}-{s.keep}-{s.uploads_per_sweep}")
def test_bits_and_counts_are_those_of_the_schedule(schedule: Schedule, num_devices: int) -> None:
    for spread in (True, False):
        transfer = TurnTransfer(num_devices=num_devices)
        with Controller(HostStore(make_layers()), schedule, transfer) as controller:
            for result in run(controller, spread=spread):
                np.testing.assert_array_equal(result, expected())
            stats = controller.stats
            assert stats.last_sweep_uploads == schedule.uploads_per_sweep
            assert (stats.last_sweep_bytes_uploaded > 0) == schedule.releases
            assert stats.pool_misses == (schedule.peak_resident_layers if schedule.releases else NUM_LAYERS)
        assert not transfer._queue


@pytest.mark.parametrize(
    ("num_devices", "in_front", "along"), [(1, "a", "bcde"), (2, "ab", "cde"), (4, "abc", "de"), (16, "abcde", "")]
)
def test_a_step_takes_the_smallest_arrays_along_and_the_others_go_in_front(
    log: list[str], num_devices: int, in_front: str, along: str
) -> None:
    transfer = TurnTransfer(num_devices=num_devices)
    with Controller(HostStore(make_layers()), pinned_ring(NUM_LAYERS, 2, ring=2, warm=True), transfer) as controller:
        layer_step = controller.jit(step)
        for _ in range(2):
            log.clear()
            for _, weights in controller.sweep():
                log.append("step")
                layer_step(weights, jnp.zeros(WIDTH))
        # What goes along with the first step is left of the last sweep's last upload.
        assert log == ["step", *[f"along {along}"][: len(along)], f"alone {in_front}"] * NUM_LAYERS


def test_uploads_are_spread_over_the_steps_until_the_next(log: list[str]) -> None:
    """Layers 0, 2, 4 and 6 are streamed, each over two steps."""
    schedule = pinned_ring(NUM_LAYERS, 6, ring=2, warm=True)
    assert schedule.streamed_layers == (0, 2, 4, 6)
    with Controller(HostStore(make_layers()), schedule, TurnTransfer(num_devices=2)) as controller:
        layer_step = controller.jit(step)
        for _ in range(2):
            log.clear()
            for _, weights in controller.sweep():
                log.append("step")
                layer_step(weights, jnp.zeros(WIDTH))
        # One part is a, all of it in front of the step; of the other, b, c, d and e, the last two are less than 1/4.
        assert log == ["step", "alone bc", "along de", "alone a", "step"] * 4


@pytest.mark.parametrize("is_prefill", [False, True])
def test_a_step_that_takes_nothing_is_that_of_the_upload(log: list[str], is_prefill: bool) -> None:
    """All of an upload's first part has gone in front of the next step, and then it is needed at once, or given up."""
    transfer, store = TurnTransfer(num_devices=2), HostStore(make_layers())
    weights = jax.tree.map(jnp.asarray, make_layers()[7])
    first, second, third = (
        transfer.upload(store.layer(i), transfer.make_slot(store.geometry(i)), steps=2) for i in range(3)
    )
    assert log == ["alone a"]
    if is_prefill:
        transfer.jit(step, JitOptions(spread=False))(weights, jnp.zeros(WIDTH))
        transfer.wait(second)
        assert log[1:] == ["alone bcde", "along abcde"]
    else:
        transfer.free(first)
        transfer.free(second)
    log.clear()
    for expected_log in (["alone a"], ["alone bc", "along de"], []):
        transfer.jit(step, JitOptions())(weights, jnp.zeros(WIDTH))
        assert log == expected_log
        log.clear()
    for name, array in transfer.view(third).items():
        np.testing.assert_array_equal(array, make_layers()[2][name])
    assert not log and not transfer._queue


def test_inside_another_jit_nothing_is_taken_along() -> None:
    with Controller(
        HostStore(make_layers()), pinned_ring(NUM_LAYERS, 6, ring=2), TurnTransfer(num_devices=2)
    ) as controller:
        outer = jax.jit(controller.jit(step))
        for _ in range(3):
            x = jnp.linspace(0, 1, WIDTH)
            for _, weights in controller.sweep():
                x = outer(weights, x)
            np.testing.assert_allclose(x, expected(), rtol=1e-5)
        assert controller.stats.last_sweep_bytes_uploaded > 0


def test_device_memory_stays_where_it_is() -> None:
    with Controller(
        HostStore(make_layers()), pinned_ring(NUM_LAYERS, 2, ring=2), TurnTransfer(num_devices=2)
    ) as controller:
        layer_step, addresses = controller.jit(step), []
        for _ in range(3):
            seen: set[int] = set()
            for _, weights in controller.sweep():
                seen |= {array.unsafe_buffer_pointer() for array in weights.values()}
                layer_step(weights, jnp.zeros(WIDTH))
            addresses.append(seen)
        assert addresses[0] == addresses[1] == addresses[2]
        assert len(addresses[0]) == 2 * 5


@pytest.mark.parametrize("at", range(NUM_LAYERS))
@pytest.mark.parametrize("keep", [2, 5])
def test_a_sweep_that_is_broken_off_leaves_nothing_in_the_queue(keep: int, at: int) -> None:
    transfer = TurnTransfer(num_devices=2)
    with Controller(HostStore(make_layers()), pinned_ring(NUM_LAYERS, keep, ring=2), transfer) as controller:
        run(controller, 2)
        layer_step = controller.jit(step)
        with pytest.raises(ZeroDivisionError):
            for layer_idx, weights in controller.sweep():
                layer_step(weights, jnp.zeros(WIDTH))
                if layer_idx == at:
                    raise ZeroDivisionError
        assert not transfer._queue
        for result in run(controller, 2):
            np.testing.assert_array_equal(result, expected())


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("keep", [2, 6])
def test_a_copy_in_front_that_fails(keep: int, consumed: bool, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In `upload` or in a call of the step, before or after it was given the slot's memory."""
    copy_into, calls = programs.copy_into, []

    def failing(slot: Any, host: Any) -> Any:
        calls.append(1)
        if len(calls) == at + 1:
            if consumed:
                slot[0].delete()
            raise RuntimeError("no copy")
        return copy_into(slot, host)

    transfer = TurnTransfer(num_devices=2)
    with Controller(HostStore(make_layers()), pinned_ring(NUM_LAYERS, keep, ring=2), transfer) as controller:
        run(controller, 2)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no copy"):
            patch.setattr(programs, "copy_into", failing)
            run(controller, 1)
        assert not transfer._queue
        for result in run(controller, 2):
            np.testing.assert_array_equal(result, expected())
        stats = controller.stats
        assert stats.pool_misses == keep + stats.slots_freed + stats.slots_lost


def test_a_number_of_devices_that_is_none() -> None:
    with pytest.raises(ConfigError, match="num_devices is 0; expected at least 1"):
        TurnTransfer(num_devices=0)
