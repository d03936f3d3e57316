"""A controller over layers that come from disk: the results of layers that are all in host memory, bit for bit."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import in_time

from vramjax.errors import CheckpointError
from vramjax.residency import (
    Controller,
    DeviceTransfer,
    HostStore,
    geometry_of,
    mapped_buffers,
    past_window,
    pinned_ring,
)
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.host_memory import PinningError
from vramjax.residency.mapped_store import MappedStore


def random_layer(layer_idx: int, width: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([layer_idx, width])
    return {
        "w": rng.standard_normal((width, 32)).astype(np.float32),
        "v": rng.standard_normal((32, width)).astype(np.float32),
        "b": rng.standard_normal(32).astype(np.float32),
    }


class Stack:
    """Eight layers, as a mapped store and as a host store, and a computation through them."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.layers = [random_layer(i, width) for i, width in enumerate(widths)]
        self.failing: set[int] = set()
        self.num_reads = 0

    def read_into(self, layer_idx: int, views: dict[str, np.ndarray]) -> None:
        self.num_reads += 1
        if layer_idx in self.failing:
            raise CheckpointError(f"layer {layer_idx} changed")
        for view in views.values():
            view[...] = 0  # what is read too early is wrong
        time.sleep(0.001)
        for name, view in views.items():
            view[...] = self.layers[layer_idx][name]

    def mapped(self, num_buffers: int = 3) -> MappedStore:
        return MappedStore(self.read_into, [geometry_of(layer) for layer in self.layers], num_buffers=num_buffers)

    def run(self, controller: Controller, num_sweeps: int, leave_after: Callable[[], int] = lambda: 99) -> list[Any]:
        step = controller.jit(layer_step)
        results = []
        for _ in range(num_sweeps):
            x, limit = jnp.ones(32), leave_after()
            for layer_idx, weights in controller.sweep():
                if layer_idx == limit:
                    break
                x = step(weights, x)
            else:
                results.append(np.asarray(x) if len(results) % 4 == 3 else x)
        return [np.asarray(result) for result in results]


def layer_step(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def once(i: int, x: jax.Array) -> jax.Array:
        return jnp.tanh(weights["v"] @ jnp.tanh(weights["w"] @ x) + weights["b"])

    return jax.lax.fori_loop(0, 20, once, x)  # slow enough for uploads to be under way when the host goes on


@pytest.mark.parametrize(
    ("transfer", "release"), [(DeviceTransfer, "free"), (DeviceTransfer, "pool"), (FusedTransfer, "pool")]
)
@pytest.mark.parametrize("schedule", [past_window(8, 3), pinned_ring(8, 2), pinned_ring(8, 6)])
@pytest.mark.parametrize("widths", [[64] * 8, [64, 16] * 4], ids=["uniform", "mixed"])
def test_results_are_those_of_the_host_store(transfer: Any, schedule: Any, widths: list[int], release: Any) -> None:
    stack = Stack(widths)

    def run() -> None:
        with Controller(HostStore(stack.layers), schedule, transfer(), release=release) as controller:
            expected = stack.run(controller, 6)
        store = stack.mapped()
        with Controller(store, schedule, transfer(), release=release) as controller:
            results = stack.run(controller, 6)
            stats = controller.stats
        assert stats.last_sweep_uploads == schedule.uploads_per_sweep > 0
        assert stack.num_reads >= stats.uploads >= 8 + 5 * schedule.uploads_per_sweep
        store.close()
        np.testing.assert_array_equal(np.stack(results), np.stack(expected))

    in_time(run)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_buffers=st.integers(2, 4),
    schedule=st.sampled_from([past_window(8, 1), past_window(8, 3), pinned_ring(8, 2), pinned_ring(8, 6)]),
    fused=st.booleans(),
)
def test_sweeps_may_be_left_anywhere(seed: int, num_buffers: int, schedule: Any, fused: bool) -> None:
    rng, stack = random.Random(seed), Stack([64, 64, 16, 64, 16, 64, 64, 16])

    def run() -> None:
        with Controller(HostStore(stack.layers), schedule, DeviceTransfer()) as controller:
            (expected,) = stack.run(controller, 1)
        store = stack.mapped(num_buffers)
        for _ in range(2):  # a second controller may have the store of the first
            with Controller(store, schedule, FusedTransfer() if fused else DeviceTransfer()) as controller:
                for result in stack.run(controller, 12, lambda: rng.choice([0, 1, 4, 7, 99, 99])):
                    np.testing.assert_array_equal(result, expected)
        store.close()

    in_time(run)


@pytest.mark.parametrize("transfer", [DeviceTransfer, FusedTransfer])
def test_a_failed_read_is_one_error_and_the_next_sweep_goes_on(transfer: Any) -> None:
    stack, schedule = Stack([64] * 8), pinned_ring(8, 4)

    def run() -> None:
        store = stack.mapped()
        with Controller(store, schedule, transfer()) as controller:
            (expected,) = stack.run(controller, 1)
            stack.failing = {schedule.steady_sweep[-1].layer_idx, *range(8)}
            for _ in range(3):
                with pytest.raises(CheckpointError, match=r"^layer \d changed$"):
                    stack.run(controller, 4)
            assert controller.stats.resident_layers_end == 4  # counted at the last end; an abort leaves none
            stack.failing = set()
            for result in stack.run(controller, 4):
                np.testing.assert_array_equal(result, expected)
        store.close()

    in_time(run)


def test_memory_that_cannot_be_pinned_is_pageable(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def limited(geometry: Any, device: Any) -> Any:
        if len(made) == 2:
            raise PinningError("not today")
        made.append(host_arrays(geometry, device))
        return made[-1]

    host_arrays = mapped_buffers.HostArrays
    monkeypatch.setattr(mapped_buffers, "HostArrays", limited)
    stack = Stack([64] * 8)
    with pytest.warns(UserWarning, match=r"^buffers for 8 layers could not be put in pinned host memory \(not today\)"):
        store = stack.mapped()
    assert all(array.is_deleted() for memory in made for array in memory.arrays.values())
    assert not store.is_pinned and isinstance(store.layer(0)["w"], np.ndarray)
    with Controller(HostStore(stack.layers), past_window(8, 1), DeviceTransfer()) as controller:
        expected = stack.run(controller, 1)
    with Controller(store, past_window(8, 1), DeviceTransfer()) as controller:
        results = stack.run(controller, 5)
        assert controller.stats.last_sweep_uploads == 7
    store.close()
    for result in results:
        np.testing.assert_array_equal(result, expected[0])
