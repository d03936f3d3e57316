"""Layers that pass from disk through a few host buffers: never another layer's bytes, whatever is slow or fails."""

from __future__ import annotations

import gc
import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramjax.errors import BudgetError, CheckpointError, ConfigError, VramjaxError
from vramjax.residency import (
    Controller,
    DeviceTransfer,
    HostStore,
    geometry_of,
    host_memory,
    mapped_store,
    past_window,
    pinned_ring,
)
from vramjax.residency.host_memory import PinningError
from vramjax.residency.mapped_store import MappedStore, host_buffers
from vramjax.residency.transfer import FusedTransfer

TIMEOUT_S = 30


def make_layer(layer_idx: int, width: int = 8) -> dict[str, np.ndarray]:
    """Every byte of it says which layer it is."""
    return {"w": np.full((width, 16), layer_idx, np.int8), "s": np.full(width, layer_idx, np.float32)}


def geometries_of(kinds: Sequence[int]) -> list[Any]:
    return [geometry_of(make_layer(0, 8 * (kind + 1))) for kind in kinds]


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


class Device:
    """A device that copies when it likes, in the order of dispatch, and looks at every byte when it does."""

    def __init__(self, delays: Callable[[], float]) -> None:
        self.in_flight: dict[int, int] = {}  # address -> copies from it that have not ended
        self.lock = threading.Lock()
        self.errors: list[str] = []
        self.num_copies = 0
        self._delays = delays
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def copy(self, arrays: Any, layer_idx: int) -> Done:
        """Dispatches a copy of one array; the result is ready when it has ended."""
        done, address = Done(), arrays.unsafe_buffer_pointer()
        with self.lock:
            self.in_flight[address] = self.in_flight.get(address, 0) + 1

        def run() -> None:
            time.sleep(self._delays())
            if not (np.asarray(arrays) == layer_idx).all():
                self.errors.append(f"layer {layer_idx} was overwritten before its copy had ended")
            with self.lock:
                self.in_flight[address] -= 1
            self.num_copies += 1
            done.event.set()

        self._queue.put(run)
        return done

    def wait_for(self, device: object) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        assert done.wait(TIMEOUT_S)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (run := self._queue.get()) is not None:
            run()


class Done:
    def __init__(self) -> None:
        self.event = threading.Event()

    def block_until_ready(self) -> None:
        assert self.event.wait(TIMEOUT_S)


class Disk:
    """Reads slowly, and fails on demand; notes writing to memory that the device still copies from."""

    def __init__(self, device: Device, delays: Callable[[], float], failing: set[int]) -> None:
        self.device, self.delays, self.failing = device, delays, failing
        self.reads: list[int] = []
        self.announced: list[int] = []
        self._lock = threading.Lock()

    def read_into(self, layer_idx: int, views: dict[str, np.ndarray]) -> None:
        with self.device.lock:
            if any(self.device.in_flight.get(view.ctypes.data) for view in views.values()):
                self.device.errors.append(f"layer {layer_idx} was read into memory that is being copied")
        for view in views.values():
            view[...] = -1
        time.sleep(self.delays())
        with self._lock:
            self.reads.append(layer_idx)
            n = len(self.reads)
        if n in self.failing:
            raise CheckpointError(f"read {n}, of layer {layer_idx}, failed")
        for view in views.values():
            view[...] = layer_idx


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    num_buffers=st.integers(2, 5),
    num_threads=st.integers(1, 4),
    order=st.lists(st.integers(0, 5), max_size=40),
    sweeps=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=4),
    failing=st.sets(st.integers(1, 30), max_size=3),
    slow=st.sampled_from(["disk", "device", "both", "none"]),
    seed=st.integers(0, 1000),
)
def test_never_another_layers_bytes(
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[int],
    num_buffers: int,
    num_threads: int,
    order: list[int],
    sweeps: list[tuple[int, int]],
    failing: set[int],
    slow: str,
    seed: int,
) -> None:
    """Layers, buffers, threads, orders, aborts at any place with uploads half reported, failing and slow reads."""
    rng = random.Random(seed)

    def delays(what: str) -> Callable[[], float]:
        return lambda: rng.choice([0, 0, 0.0005, 0.002]) if slow in (what, "both") else 0

    device = Device(delays("device"))
    disk = Disk(device, delays("disk"), failing)
    for module in (mapped_store, host_memory):
        monkeypatch.setattr(module, "wait_for", device.wait_for)
    order = [layer_idx % len(kinds) for layer_idx in order] or [0]
    # A transfer that spreads uploads has so many under way: a kind has a buffer more than it has layers at most.
    most_pending = min(num_buffers, *(kinds.count(kind) + 1 for kind in kinds)) - 1

    def run() -> None:
        store = MappedStore(
            disk.read_into,
            geometries_of(kinds),
            num_buffers=num_buffers,
            num_threads=num_threads,
            will_need=disk.announced.append,
        )
        num_asked = num_failed = 0
        for length, unreported in sweeps:
            store.expect(itertools.cycle(order))
            pending: list[tuple[int, list[Done]]] = []  # layers whose upload is spread over later steps
            for layer_idx in itertools.islice(itertools.cycle(order), length):
                if len(pending) == most_pending:
                    reported, copies = pending.pop(0)
                    store.uploaded(reported, copies[-1])
                num_asked += 1
                try:
                    arrays = store.layer(layer_idx)
                except CheckpointError:
                    num_failed += 1
                    break
                assert store.geometry(layer_idx) == geometry_of(arrays)
                for array in arrays.values():
                    assert (np.asarray(array) == layer_idx).all(), "another layer's bytes"
                copies = [device.copy(array, layer_idx) for array in arrays.values()]
                # Uploads of one layer are reported in their order, others in any.
                if rng.random() < 0.5 and layer_idx not in dict(pending):
                    store.uploaded(layer_idx, copies[-1])
                else:
                    pending.append((layer_idx, copies))
            for reported, copies in pending[: len(pending) - unreported]:
                store.uploaded(reported, copies[-1])
        store.close()
        device.wait_for(None)
        assert not device.errors, device.errors[0]
        assert num_failed <= len(failing)
        assert len(disk.reads) >= num_asked - num_failed and device.num_copies == 2 * (num_asked - num_failed)
        with pytest.raises(VramjaxError, match="the store of layers is closed"):
            store.layer(0)

    in_time(run)
    device.close()


def simple_store(num_layers: int = 6, **options: Any) -> tuple[MappedStore, list[int]]:
    reads: list[int] = []

    def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        reads.append(layer_idx)
        for view in views.values():
            view[...] = layer_idx

    options = {"num_buffers": 3, "num_threads": 2} | options
    return MappedStore(read_into, geometries_of([0] * num_layers), **options), reads


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.001)
    return condition()


def test_it_reads_ahead_as_far_as_there_are_buffers() -> None:
    announced: list[int] = []
    store, reads = simple_store(will_need=announced.append)
    assert not reads
    store.expect(itertools.cycle([0, 2, 4]))
    assert eventually(lambda: sorted(reads) == [0, 2, 4])
    assert eventually(lambda: announced == [0]), "the layer that no buffer is free for is announced, once"
    time.sleep(0.02)
    assert len(reads) == 3 and announced == [0]
    assert (np.asarray(store.layer(0)["w"]) == 0).all()
    time.sleep(0.02)
    assert len(reads) == 3, "its upload is not even queued"
    done = Done()
    store.uploaded(0, done)
    time.sleep(0.02)
    assert len(reads) == 3, "its upload has not ended"
    done.event.set()
    assert eventually(lambda: len(reads) == 4) and reads[3] == 0
    store.close()


def test_threads_read_at_the_same_time() -> None:
    together = threading.Barrier(3)

    def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        together.wait(10)

    store = MappedStore(read_into, geometries_of([0] * 6), num_buffers=3, num_threads=3)
    store.expect(iter(range(6)))

    def run() -> None:
        for layer_idx in range(3):
            store.layer(layer_idx)  # raises what the barrier raised, if nobody else came
        store.close()

    in_time(run)


def test_two_uploads_of_one_layer_are_reported_in_their_order() -> None:
    store, reads = simple_store()
    store.expect(itertools.repeat(2))
    first = store.layer(2)["w"].unsafe_buffer_pointer()
    store.layer(2)
    ended = Done()
    ended.event.set()
    store.uploaded(2, ended)
    assert eventually(lambda: len(reads) == 4)
    store.layer(2)  # the third buffer
    assert store.layer(2)["w"].unsafe_buffer_pointer() == first
    store.close()


def test_a_layer_that_could_not_be_read_may_be_asked_for_again() -> None:
    attempts: list[int] = []

    def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        attempts.append(layer_idx)
        if attempts == [0, 1]:
            raise CheckpointError("once")

    store = MappedStore(read_into, geometries_of([0] * 3), num_buffers=2, num_threads=1)
    store.expect(iter([0, 1, 2]))
    store.layer(0)
    with pytest.raises(CheckpointError, match="once"):
        store.layer(1)
    store.layer(1)
    assert attempts == [0, 1, 1]
    store.close()


def test_memory_is_that_of_the_buffers() -> None:
    store, _ = simple_store(num_layers=40, num_buffers=3)
    addresses: set[int] = set()
    ready = Done()
    ready.event.set()
    store.expect(itertools.cycle(range(40)))
    for layer_idx in range(40):
        addresses |= {array.unsafe_buffer_pointer() for array in store.layer(layer_idx).values()}
        store.uploaded(layer_idx, ready)
    assert len(addresses) == 2 * 3 and store.num_host_bytes == 3 * 4096
    store.close()
    assert simple_store(num_layers=1, num_buffers=5)[0].num_host_bytes == 2 * 4096, "more would never be used"


def test_what_was_not_announced_is_read_all_the_same() -> None:
    ready = Done()
    ready.event.set()
    store, reads = simple_store()
    for layer_idx in (3, 3, 1):  # nothing was announced at all
        assert (np.asarray(store.layer(layer_idx)["w"]) == layer_idx).all()
        store.uploaded(layer_idx, ready)
    assert reads == [3, 3, 1]
    store.expect(iter([0, 1, 2]))
    for layer_idx in (0, 5, 2):
        assert (np.asarray(store.layer(layer_idx)["w"]) == layer_idx).all()
        store.uploaded(layer_idx, ready)
    store.uploaded(4, ready)  # nobody has asked for it: no effect
    store.close()


def test_one_layer_over_and_over() -> None:
    store, reads = simple_store()
    store.expect(itertools.repeat(2))
    dones = [Done() for _ in range(20)]
    for i, done in enumerate(dones):
        assert (np.asarray(store.layer(2)["w"]) == 2).all()
        store.uploaded(2, done)
        if i:
            dones[i - 1].event.set()
    dones[-1].event.set()
    store.close()
    assert len(reads) >= 20


def test_buffers_that_are_all_lent_are_an_error_and_no_deadlock() -> None:
    store, _ = simple_store()
    store.expect(iter(range(6)))

    def run() -> None:
        for layer_idx in range(3):
            store.layer(layer_idx)
        with pytest.raises(BudgetError, match="layer 3 finds all 3 host buffers taken by uploads"):
            store.layer(3)
        store.expect(iter(range(6)))  # what was never reported is waited for, and free again
        for layer_idx in range(3):
            assert (np.asarray(store.layer(layer_idx)["w"]) == layer_idx).all()
        store.close()

    in_time(run)


def test_an_upload_that_failed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        def block_until_ready(self) -> None:
            raise jax.errors.JaxRuntimeError("INTERNAL: cable pulled")

    waits: list[Any] = []
    monkeypatch.setattr(mapped_store, "wait_for", waits.append)
    store, reads = simple_store()
    store.expect(iter(range(4)))
    store.layer(0)
    store.uploaded(0, Failed())
    assert eventually(lambda: len(reads) == 4) and waits == [jax.devices()[0]]
    store.close()


def test_an_order_that_breaks_is_an_error_and_no_deadlock() -> None:
    def broken() -> Iterator[int]:
        yield 0
        raise RuntimeError("a bug")

    def run() -> None:
        store, _ = simple_store()
        store.expect(broken())
        with pytest.raises(RuntimeError, match="a bug"):
            store.layer(0)
            store.layer(1)
        store.close()

    in_time(run)


def test_closing_ends_the_threads_in_the_middle_of_anything() -> None:
    before = threading.active_count()
    for busy in range(3):
        store, _ = simple_store()
        store.expect(itertools.cycle(range(6)))
        for layer_idx in range(busy):
            store.layer(layer_idx)
        store.close()
        store.close()
        store.uploaded(0, Done())  # a transfer may be late
        with pytest.raises(VramjaxError, match="the store of layers is closed; make a new one"):
            store.layer(0)
        with pytest.raises(VramjaxError, match="the store of layers is closed; make a new one"):
            store.expect(iter([]))
    assert threading.active_count() == before


def test_a_store_that_is_forgotten_goes() -> None:
    before = threading.active_count()
    store, reads = simple_store()
    store.expect(itertools.cycle(range(6)))
    assert eventually(lambda: len(reads) == 3)
    del store
    gc.collect()
    assert eventually(lambda: threading.active_count() == before)


@pytest.mark.parametrize("num_buffers", [-1, 0, 1])
def test_bad_arguments(num_buffers: int) -> None:
    with pytest.raises(ConfigError, match=f"num_buffers is {num_buffers}; expected at least 2"):
        simple_store(num_buffers=num_buffers)
    with pytest.raises(ConfigError, match="there are no layers"):
        simple_store(num_layers=0)


def test_how_many_buffers_a_budget_holds() -> None:
    assert host_buffers(10 << 20, 5 << 20) == 2
    assert host_buffers((15 << 20) - 1, 5 << 20) == 2
    assert host_buffers(17 << 20, 5 << 20) == 3
    assert host_buffers(1 << 40, 5 << 20) == 8
    message = r"host_budget leaves 9\.0 MiB for .*; expected at least 10\.0 MiB, 2 layers: raise it by 1\.0 MiB"
    with pytest.raises(BudgetError, match=message):
        host_buffers(9 << 20, 5 << 20)


# With a real controller


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

    host_arrays = mapped_store.HostArrays
    monkeypatch.setattr(mapped_store, "HostArrays", limited)
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


def test_who_keeps_the_error_of_a_store_does_not_keep_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[jax.Array] = []

    def limited(geometry: Any, device: Any) -> Any:
        if len(made) == 2 * 3:
            raise BudgetError("there is no host memory for a layer")
        host = host_arrays(geometry, device)
        made.extend(host.arrays.values())
        return host

    host_arrays = mapped_store.HostArrays
    monkeypatch.setattr(mapped_store, "HostArrays", limited)
    with pytest.raises(BudgetError) as kept:
        simple_store(num_buffers=4)
    assert len(made) == 6 and all(array.is_deleted() for array in made)
    assert kept.value.__traceback__ is not None
