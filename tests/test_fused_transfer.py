"""Uploads that travel in the calls of a layer step: the same bits, the same memory, and nothing forgotten."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vramjax.errors import ConfigError
from vramjax.residency import programs
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer, split
from vramjax.residency.geometry import geometry_of
from vramjax.residency.host_store import HostStore
from vramjax.residency.jit_options import JitOptions
from vramjax.residency.policy import Schedule, both_sides_window, past_window, pinned_ring, resident
from vramjax.residency.transfer import DeviceTransfer

WIDTH = 32
SCHEDULES = [
    resident(8),
    *(past_window(8, keep) for keep in (1, 3)),
    both_sides_window(8, 2),
    *(
        pinned_ring(8, keep, ring=ring, warm=warm)
        for keep in range(1, 8)
        for ring in (1, 2, 3)
        for warm in (False, True)
    ),
]


@functools.cache
def make_layers() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "w": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
            "v": rng.standard_normal((WIDTH, WIDTH)).astype(np.float32),
            "b": rng.standard_normal(WIDTH).astype(np.float32),
        }
        for _ in range(8)
    ]


def step(weights, x, *, scale: float):
    return jnp.tanh((weights["w"] @ x + weights["b"]) * scale) + weights["v"][0]


def run(controller: Controller, num_sweeps: int = 4, *, spread: bool = True) -> list[np.ndarray]:
    layer_step = controller.jit(step, static_argnames=("scale",), donate_argnums=(1,), spread=spread)
    results = []
    for _ in range(num_sweeps):
        x = jnp.arange(WIDTH, dtype=jnp.float32)
        for _, weights in controller.sweep():
            x = layer_step(weights, x, scale=0.25)
        results.append(np.asarray(x))
    return results


@functools.cache
def expected() -> np.ndarray:
    with Controller(HostStore(make_layers()), resident(8), DeviceTransfer()) as controller:
        return run(controller, 1)[0]


def name_of(schedule: Schedule) -> str:
    warm = "warm" if schedule.warm_up else "cold"
    return f"{schedule.name}-{schedule.keep}-{schedule.uploads_per_sweep}-{warm}"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=name_of)
def test_bits_and_counts_are_those_of_the_schedule(schedule: Schedule) -> None:
    for spread in (True, False):
        with Controller(HostStore(make_layers()), schedule, FusedTransfer()) as controller:
            for result in run(controller, spread=spread):
                np.testing.assert_array_equal(result, expected())
            stats = controller.stats
            assert stats.last_sweep_uploads == schedule.uploads_per_sweep
            assert stats.peak_resident_layers == schedule.peak_resident_layers
            assert stats.pool_misses == (schedule.peak_resident_layers if schedule.releases else 8)
            if schedule.releases:
                layer_bytes = geometry_of(make_layers()[0]).num_bytes
                assert stats.last_sweep_bytes_uploaded == schedule.uploads_per_sweep * layer_bytes > 0


@pytest.mark.parametrize("keep", [2, 3, 5, 6])
def test_uploads_do_travel_in_the_calls_and_in_no_program_of_their_own(
    keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steady sweeps; and device memory stays where it is."""
    alone: list[int] = []
    copy_into = programs.copy_into
    monkeypatch.setattr(programs, "copy_into", lambda slot, host: alone.append(1) or copy_into(slot, host))
    with Controller(HostStore(make_layers()), pinned_ring(8, keep, ring=2, warm=True), FusedTransfer()) as controller:
        run(controller, 1)
        alone.clear()
        addresses = []
        for _ in range(3):
            seen: set[int] = set()
            layer_step = controller.jit(step, static_argnames=("scale",))
            x = jnp.arange(WIDTH, dtype=jnp.float32)
            for _, weights in controller.sweep():
                seen |= {array.unsafe_buffer_pointer() for array in weights.values()}
                x = layer_step(weights, x, scale=0.25)
            addresses.append(seen)
        assert addresses[0] == addresses[1] == addresses[2]
        assert len(addresses[0]) == 3 * keep
        assert controller.stats.last_sweep_uploads == 8 - keep + 2
        assert not alone


def test_a_step_that_is_not_from_jit_gets_the_same_weights() -> None:
    with Controller(HostStore(make_layers()), pinned_ring(8, 3, ring=2), FusedTransfer()) as controller:
        plain = jax.jit(step, static_argnames="scale")
        for _ in range(3):
            x = jnp.arange(WIDTH, dtype=jnp.float32)
            for _, weights in controller.sweep():
                x = plain(weights, x, scale=0.25)
            np.testing.assert_array_equal(x, expected())


@pytest.mark.parametrize("at", range(8))
@pytest.mark.parametrize("keep", [2, 3, 5])
def test_a_sweep_that_is_broken_off_leaves_nothing_in_the_queue(keep: int, at: int) -> None:
    transfer = FusedTransfer()
    with Controller(HostStore(make_layers()), pinned_ring(8, keep, ring=2), transfer) as controller:
        run(controller, 2)
        layer_step = controller.jit(step, static_argnames=("scale",))
        with pytest.raises(ZeroDivisionError):
            for layer_idx, weights in controller.sweep():
                layer_step(weights, jnp.zeros(WIDTH), scale=0.25)
                if layer_idx == at:
                    raise ZeroDivisionError
        assert not transfer._queue
        for result in run(controller, 2):
            np.testing.assert_array_equal(result, expected())
        run(controller, 1)
        list(zip(range(at), controller.sweep(), strict=False))
    assert not transfer._queue


def test_a_step_that_fails_leaves_the_upload_for_the_next() -> None:
    """Also when it fails before or after it has been given the slot's memory."""
    for failure in ("trace", "consumed"):
        transfer = FusedTransfer()
        with Controller(HostStore(make_layers()), pinned_ring(8, 3, ring=2), transfer) as controller:
            run(controller, 2)
            layer_step = controller.jit(step, static_argnames=("scale",))
            with pytest.raises((TypeError, RuntimeError)):
                for layer_idx, weights in controller.sweep():
                    if layer_idx == 4:
                        if failure == "trace":
                            layer_step(weights, jnp.zeros(WIDTH + 1), scale=0.25)
                        transfer._queue[0].arrays[0].delete()  # as a program that failed would have left it
                        layer_step(weights, jnp.zeros(WIDTH), scale=0.25)
                    layer_step(weights, jnp.zeros(WIDTH), scale=0.25)
            assert not transfer._queue
            for result in run(controller, 2):
                np.testing.assert_array_equal(result, expected())


@pytest.mark.parametrize("schedule", SCHEDULES[1:], ids=name_of)
def test_the_store_hears_of_every_upload_once_and_when_it_has_ended(schedule: Schedule) -> None:
    """It overwrites the host arrays as soon as it may: nobody must notice."""

    class Reusing(HostStore):
        reuses_memory = True

        def __init__(self) -> None:
            super().__init__(make_layers())
            self.handed_out: list[int] = []
            self.heard: list[int] = []

        def layer(self, layer_idx: int):
            self.handed_out.append(layer_idx)
            return super().layer(layer_idx)

        def uploaded(self, layer_idx: int, done: jax.Array) -> None:
            done.block_until_ready()
            assert done.shape == ()
            self.heard.append(layer_idx)

    store, transfer = Reusing(), FusedTransfer()
    with Controller(store, schedule, transfer) as controller:
        for result in run(controller, 3):
            np.testing.assert_array_equal(result, expected())
        pending = len(transfer._queue)
        assert store.heard == store.handed_out[: len(store.handed_out) - pending]


def test_a_slot_that_is_freed_or_used_again_is_not_waited_for() -> None:
    transfer = FusedTransfer()
    store = HostStore(make_layers())
    step_0 = transfer.jit(lambda x: x + 1, JitOptions())
    slot = transfer.upload(store.layer(1), transfer.make_slot(store.geometry(0)), steps=3)
    assert transfer.is_alive(slot)
    slot = transfer.upload(store.layer(2), slot, steps=2)  # layer 1 will never be there
    step_0(jnp.zeros(2))
    assert transfer._queue[0].is_begun
    for name, array in transfer.view(slot).items():
        np.testing.assert_array_equal(array, store.layer(2)[name])
    assert not transfer._queue
    slot = transfer.upload(store.layer(3), slot, steps=2)
    step_0(jnp.zeros(2))
    transfer.free(slot)
    assert not transfer._queue
    assert not transfer.is_alive(slot)


def test_rehearsal_compiles_all_that_steady_sweeps_need() -> None:
    def other_step(weights, x):
        return weights["w"] @ x + weights["b"]

    with Controller(HostStore(make_layers()), pinned_ring(8, 5, ring=2), FusedTransfer()) as controller:
        layer_step = controller.jit(other_step)
        # Arrays that are bound to a device, as all are that come out of a program: JAX compiles for that anew.
        weights, zeros = jax.device_put((make_layers()[0], np.zeros(WIDTH, np.float32)), jax.devices()[0])
        layer_step(weights, zeros)
        controller.rehearse(lambda: layer_step(weights, zeros))
        carrying: Any = programs.carrying(other_step, JitOptions())
        before = carrying._cache_size()
        assert before > 0
        for _ in range(4):
            x = zeros
            for _, layer in controller.sweep():
                x = layer_step(layer, x)
        assert controller.stats.last_sweep_uploads > 0
        assert carrying._cache_size() == before


def test_a_failed_copy_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot that it failed into is not recycled, whether or not its memory is still there."""
    copy_into = programs.copy_into
    for consumed in (True, False):

        def failing(slot, host, consumed: bool = consumed):
            if consumed:
                copy_into(slot, host)
            raise jax.errors.JaxRuntimeError("INTERNAL: cable pulled")

        transfer = FusedTransfer()
        with Controller(HostStore(make_layers()), pinned_ring(8, 3, ring=2), transfer) as controller:
            run(controller, 1)
            plain = jax.jit(step, static_argnames="scale")
            with monkeypatch.context() as patch, pytest.raises(jax.errors.JaxRuntimeError, match="cable pulled"):
                patch.setattr(programs, "copy_into", failing)
                for _, weights in controller.sweep():  # nothing takes uploads along, so they are copied when needed
                    plain(weights, jnp.zeros(WIDTH), scale=0.25)
            assert not transfer._queue
            for result in run(controller, 2):
                np.testing.assert_array_equal(result, expected())


def test_options_are_those_of_jax() -> None:
    with Controller(HostStore(make_layers()), pinned_ring(8, 3, ring=2), FusedTransfer()) as controller:
        layer_step = controller.jit(step, static_argnames="scale", donate_argnums=1)
        for _ in range(2):
            x = jnp.arange(WIDTH, dtype=jnp.float32)
            for _, weights in controller.sweep():
                x = layer_step(weights, x, scale=0.25)
            np.testing.assert_array_equal(x, expected())
        with pytest.raises(ConfigError, match="donate_argnums is -1; expected positions counted from the first"):
            controller.jit(step, donate_argnums=-1)


def test_inside_another_jit_nothing_is_taken_along() -> None:
    with Controller(HostStore(make_layers()), pinned_ring(8, 3, ring=2), FusedTransfer()) as controller:
        layer_step = controller.jit(step, static_argnames=("scale",))
        outer = jax.jit(lambda weights, x: layer_step(weights, x, scale=0.25))
        for _ in range(2):
            x = jnp.arange(WIDTH, dtype=jnp.float32)
            for _, weights in controller.sweep():
                x = outer(weights, x)
            np.testing.assert_allclose(x, expected(), rtol=1e-6)


@pytest.mark.parametrize("spread", [True, False])
def test_an_upload_that_is_begun_is_not_copied_inside_another_jit(spread: bool) -> None:
    transfer, store = FusedTransfer(), HostStore(make_layers())
    slot = transfer.upload(store.layer(1), transfer.make_slot(store.geometry(1)), steps=3)
    transfer.jit(lambda x: x + 1, JitOptions())(jnp.zeros(2))
    inner = transfer.jit(lambda x: x + 2, JitOptions(spread=spread))
    assert jax.jit(lambda x: inner(x))(jnp.zeros(2)).tolist() == [2, 2]
    assert len(transfer._queue[0].parts) == 2
    for name, array in transfer.view(slot).items():
        np.testing.assert_array_equal(array, make_layers()[1][name])
    assert not transfer._queue


def test_a_step_and_what_it_refers_to_are_not_kept() -> None:
    with Controller(HostStore(make_layers()), pinned_ring(8, 3, ring=2), FusedTransfer()) as controller:

        def stream_once() -> weakref.ref[np.ndarray]:
            kept = np.ones(WIDTH, np.float32).view(Weakly)
            layer_step = controller.jit(lambda weights, x: weights["w"] @ x + weights["b"] + kept)
            for _ in range(2):
                x = jnp.arange(WIDTH, dtype=jnp.float32)
                for _, weights in controller.sweep():
                    x = layer_step(weights, x)
            return weakref.ref(kept)

        reference = stream_once()
        gc.collect()
        assert reference() is None


class Weakly(np.ndarray):
    """An array that can be referred to weakly."""


def test_parts_are_about_equal() -> None:
    assert split([25, 17, 100, 50, 6], 1) == [[0, 1, 2, 3, 4]]
    assert split([25, 17, 100, 50, 6], 2) == [[2], [0, 1, 3, 4]]
    assert sorted(split([25, 17, 100, 50, 6], 9)) == [[0], [1], [2], [3], [4]]
    assert split([3], 4) == [[0]]
