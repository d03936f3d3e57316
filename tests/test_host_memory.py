"""Host memory that numpy writes and the device reads in place."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import assert_ok_on_two_devices

from vramjax.errors import BudgetError, VramjaxError
from vramjax.residency import host_memory
from vramjax.residency.geometry import Geometry, geometry_of
from vramjax.residency.host_memory import HostArrays, PinningError, host_bytes, wait_for

LAYER = {
    "w": np.ones((48, 64), np.int8),
    "deep": [np.ones((2, 48), np.float32), np.float32(3)],
    "h": np.ones(5, jnp.bfloat16),
    "none": np.zeros((0, 3), np.float32),
}
GEOMETRY = geometry_of(LAYER)
DEVICE = jax.devices()[0]


def fill(views: Any, value: int) -> None:
    for view in jax.tree.leaves(views):
        view[...] = value


def assert_filled(arrays: Any, value: int) -> None:
    for array in jax.tree.leaves(arrays):
        np.testing.assert_array_equal(np.asarray(array), np.full(array.shape, value, array.dtype))


def test_views_and_arrays_are_the_same_memory() -> None:
    host = HostArrays(GEOMETRY, DEVICE)
    assert geometry_of(host.views) == geometry_of(host.arrays) == host.geometry == GEOMETRY
    for view, array in zip(jax.tree.leaves(host.views), jax.tree.leaves(host.arrays), strict=True):
        assert isinstance(view, np.ndarray) and view.flags.writeable
        assert array.sharding.memory_kind == "pinned_host" and array.devices() == {DEVICE}
        if view.size:
            assert array.unsafe_buffer_pointer() == view.ctypes.data
            assert view.ctypes.data % 256 == 0
    for value in (1, 2):
        fill(host.views, value)
        assert_filled(host.arrays, value)
    host.close()


def test_arrays_of_a_layer_do_not_overlap_and_take_whole_pages() -> None:
    host = HostArrays(GEOMETRY, DEVICE)
    for i, view in enumerate(jax.tree.leaves(host.views)):
        view[...] = i
    for i, view in enumerate(jax.tree.leaves(host.views)):
        assert (view == i).all()
    # 512 + 256 aligned bytes of `deep`, 256 of h, 3072 of w
    assert host.num_bytes == host_bytes(GEOMETRY) == 4096
    assert host_bytes(geometry_of({"w": np.zeros(4097, np.int8)})) == 8192
    assert host_bytes(geometry_of({"w": np.zeros(0, np.int8)})) == 4096
    host.close()


def test_jax_keeps_the_memory_and_close_deletes_the_arrays() -> None:
    host = HostArrays(GEOMETRY, DEVICE)
    fill(host.views, 4)
    arrays, views = host.arrays, host.views
    del host
    gc.collect()
    assert_filled(arrays, 4)  # no reference to the HostArrays is needed

    host = HostArrays(GEOMETRY, DEVICE)
    fill(host.views, 5)
    kept, views = host.arrays, host.views
    host.close()
    host.close()
    assert all(array.is_deleted() for array in jax.tree.leaves(kept))
    assert (views["w"] == 5).all()  # numpy's view is still memory
    memory = weakref.ref(views["w"].base)
    del views, host, kept
    gc.collect()
    assert memory() is None


def test_closing_waits_for_a_copy_under_way() -> None:
    geometry = geometry_of({"w": np.zeros((256, 256), np.float32)})

    @jax.jit
    def slow_sum(host):
        w = jax.device_put(host, jax.memory.Space.Device)
        return jax.lax.fori_loop(0, 40, lambda i, y: y @ w / 256, w).sum()

    host = HostArrays(geometry, DEVICE)
    fill(host.views, 1)
    expected = float(slow_sum(host.arrays["w"]))
    results = [slow_sum(host.arrays["w"]) for _ in range(8)]
    host.close()
    assert all(result.is_ready() for result in results)
    fill(host.views, 9)
    assert [float(result) for result in results] == [expected] * 8


def test_memory_that_jax_would_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does is looked at each time and never believed."""
    device_put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda view, sharding: device_put(view.copy(), sharding))
    with pytest.raises(PinningError, match="JAX made a copy on SingleDeviceSharding"):
        HostArrays(GEOMETRY, jax.devices("cpu")[0])


def test_a_fork_does_not_move_the_memory() -> None:
    """The system gives a process that writes to a page after a fork a copy of it, where the GPU would not look."""
    host = HostArrays(GEOMETRY, DEVICE)
    address = min(view.ctypes.data for view in jax.tree.leaves(host.views))
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, end = (int(word, 16) for word in mapping.split(" ", 1)[0].split("-"))
        if start <= address < end:
            assert " dc " in mapping.split("VmFlags:")[1]  # do not copy
            break
    else:
        raise AssertionError("the memory is not mapped")
    host.close()


def test_no_memory_at_all() -> None:
    with pytest.raises(BudgetError, match=r"there is no host memory for a layer of 4294967296\.00 GiB"):
        HostArrays(Geometry("tree", (((1 << 62,), np.dtype(np.int8)),)), DEVICE)


def test_arrays_belong_to_the_device_that_was_asked_for() -> None:
    code = """
import jax
from test_host_memory import GEOMETRY, assert_filled, fill
from vramjax.residency.host_memory import HostArrays
devices = jax.devices()
assert len(devices) == 2
for device in (devices[1], devices[0], devices[1]):
    host = HostArrays(GEOMETRY, device)
    fill(host.views, 3)
    assert all(array.devices() == {device} for array in jax.tree.leaves(host.arrays))
    on_device = jax.tree.map(lambda array: jax.device_put(array, jax.memory.Space.Device), host.arrays)
    assert all(array.devices() == {device} for array in jax.tree.leaves(on_device))
    assert_filled(on_device, 3)
    host.close()
print("ok")
"""
    assert_ok_on_two_devices(code)


# Registering, with a driver that only takes notes


class FakeDriver:
    """A JAX client's part in this: what is registered, and every call. Like a GPU's, it refuses what does not fit."""

    def __init__(self, limit_bytes: int = sys.maxsize) -> None:
        self.registered: dict[int, int] = {}
        self.limit_bytes = limit_bytes
        self.device: Any = SimpleNamespace(platform="gpu", local_hardware_id=1, client=self)

    def dma_map(self, address: int, num_bytes: int) -> None:
        if sum(self.registered.values()) + num_bytes > self.limit_bytes:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more today\nstack of no interest")
        assert address % 4096 == 0 and num_bytes % 4096 == 0 and address not in self.registered
        self.registered[address] = num_bytes

    def dma_unmap(self, address: int) -> None:
        del self.registered[address]

    def has_nothing(self) -> bool:
        """Whether all memory was unregistered, which a thread may still be doing."""
        deadline = time.monotonic() + 10
        while self.registered and time.monotonic() < deadline:
            time.sleep(0.001)
        return not self.registered


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The devices that were waited for; a CPU stands in for the import."""
    waits: list[Any] = []
    monkeypatch.setattr(host_memory, "_fence_of", lambda device: SimpleNamespace(wait=lambda: waits.append(device)))

    def imported(view: np.ndarray, device: Any, owner: object) -> jax.Array:
        pinned = host_memory.PinnedArray(view, 0, owner=owner, device_type=1)
        return jax.dlpack.from_dlpack(pinned, copy=False)

    monkeypatch.setattr(host_memory, "_imported", imported)
    return waits


FULL = geometry_of({"w": np.zeros((64, 64), np.float32), "s": np.zeros(64, np.float32)})


def test_memory_is_registered_until_it_is_closed(waits: list[Any]) -> None:
    driver = FakeDriver()
    host = HostArrays(FULL, driver.device)
    assert driver.registered == {host.views["s"].ctypes.data: host.num_bytes} and host.num_bytes == 20480
    host.close()
    assert not driver.registered and waits == [driver.device]
    host.close()
    assert waits == [driver.device]


def test_memory_is_registered_as_long_as_jax_holds_an_array(waits: list[Any]) -> None:
    """The last reference goes anywhere; another thread waits for the device and unregisters."""
    driver = FakeDriver()
    host = HostArrays(FULL, driver.device)
    memory = weakref.ref(host.views["w"].base)
    array = host.arrays["w"]
    del host
    gc.collect()
    time.sleep(0.05)
    assert len(driver.registered) == 1 and not waits
    del array
    assert driver.has_nothing() and waits == [driver.device]
    deadline = time.monotonic() + 10
    while memory() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert memory() is None


def test_a_driver_that_refuses(waits: list[Any]) -> None:
    driver = FakeDriver(limit_bytes=50_000)
    hosts = [HostArrays(FULL, driver.device) for _ in range(2)]
    with pytest.raises(PinningError, match=r"^RESOURCE_EXHAUSTED: no more today$") as caught:
        HostArrays(FULL, driver.device)
    assert isinstance(caught.value, VramjaxError)
    del caught
    hosts.pop().close()
    hosts.append(HostArrays(FULL, driver.device))
    del hosts
    assert driver.has_nothing()


def test_a_jax_that_cannot_register(waits: list[Any]) -> None:
    device: Any = SimpleNamespace(platform="gpu", local_hardware_id=0, client=SimpleNamespace())
    with pytest.raises(PinningError, match="has no attribute 'dma_map'"):
        HostArrays(FULL, device)


def test_an_import_that_fails_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_fence_of", lambda device: SimpleNamespace(wait=lambda: None))
    driver = FakeDriver()
    with pytest.raises(PinningError):  # there is no CUDA backend here; on a GPU there is no such device
        driver.device.local_hardware_id = 77
        HostArrays(FULL, driver.device)
    assert driver.has_nothing()


# On a GPU

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="a CPU device adopts any aligned memory")


def resident_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


@pytest.mark.gpu
@gpu
def test_a_gpu_reads_what_numpy_wrote() -> None:
    for device in jax.local_devices():
        host = HostArrays(GEOMETRY, device)
        assert all(array.devices() == {device} for array in jax.tree.leaves(host.arrays))
        copy = jax.jit(lambda arrays: jax.tree.map(lambda a: jax.device_put(a, jax.memory.Space.Device), arrays))
        for value in (1, 2, 3):
            fill(host.views, value)
            on_device = jax.block_until_ready(copy(host.arrays))
            assert {array.sharding.memory_kind for array in jax.tree.leaves(on_device)} == {"device"}
            assert all(array.devices() == {device} for array in jax.tree.leaves(on_device))
            assert_filled(on_device, value)
        host.close()


@pytest.mark.gpu
@gpu
def test_registered_memory_takes_its_bytes_and_gives_them_back() -> None:
    geometry = geometry_of({"w": np.zeros((256, 1 << 20), np.int8)})  # 256 MiB
    HostArrays(geometry, DEVICE).close()
    before = resident_bytes()
    hosts = [HostArrays(geometry, DEVICE) for _ in range(4)]
    for host in hosts:
        fill(host.views, 1)
    taken = resident_bytes() - before
    assert 4 << 28 <= taken <= (4 << 28) + (8 << 20)
    hosts[0].close()
    host = None
    del hosts[:]  # the others by their last reference, in the thread that unregisters
    deadline = time.monotonic() + 30
    while resident_bytes() - before > 16 << 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert resident_bytes() - before <= 16 << 20


@pytest.mark.gpu
@gpu
def test_a_gpu_copies_registered_memory_at_the_rate_of_the_link() -> None:
    """Against JAX's own pinned memory; pageable memory would be several times slower."""
    geometry = geometry_of({"w": np.zeros((1024, 1 << 18), np.int8)})  # 256 MiB
    host = HostArrays(geometry, DEVICE)
    fill(host.views, 1)
    own = jax.device_put(host.views["w"], jax.sharding.SingleDeviceSharding(DEVICE, memory_kind="pinned_host"))
    copy = jax.jit(lambda array: jax.device_put(array, jax.memory.Space.Device))

    def seconds(array: jax.Array) -> float:
        start = time.perf_counter()
        jax.block_until_ready(copy(array))
        return time.perf_counter() - start

    for array in (own, host.arrays["w"]):
        seconds(array)
    assert min(seconds(host.arrays["w"]) for _ in range(5)) < 1.2 * min(seconds(own) for _ in range(5))
    host.close()


@pytest.mark.gpu
@gpu
def test_closing_under_a_copy_on_a_gpu() -> None:
    geometry = geometry_of({"w": np.zeros((256, 1 << 20), np.int8)})
    copy = jax.jit(lambda array: jax.device_put(array, jax.memory.Space.Device).astype(jnp.int32).sum())
    for _ in range(4):
        host = HostArrays(geometry, DEVICE)
        fill(host.views, 1)
        sums = [copy(host.arrays["w"]) for _ in range(4)]
        host.close()
        fill(host.views, 2)
        assert [int(s) for s in sums] == [1 << 28] * 4


def test_waiting_for_an_idle_device_returns() -> None:
    wait_for(DEVICE)


def failing_copies(monkeypatch: pytest.MonkeyPatch, message: str, num_failing: int) -> list[int]:
    """The next so many copies to a device fail; how many were tried."""
    device_put, calls = jax.device_put, []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) <= num_failing:
            raise jax.errors.JaxRuntimeError(message)
        return device_put(*args, **kwargs)

    monkeypatch.setattr(jax, "device_put", fail)
    return calls


@pytest.mark.parametrize("num_failing", [0, 1, 5])
def test_a_device_without_memory_is_waited_for(monkeypatch: pytest.MonkeyPatch, num_failing: int) -> None:
    """Else memory would be unregistered, or written to, under a copy."""
    ended: list[int] = []

    def note(x: np.ndarray) -> np.ndarray:
        time.sleep(0.05)
        ended.append(1)
        return x

    step, x = jax.jit(lambda x: jax.pure_callback(note, x, x) + 1), jax.block_until_ready(jnp.zeros(8))
    wait_for(DEVICE)
    for num_steps in range(1, 4):
        with monkeypatch.context() as patch:
            result = step(x)
            calls = failing_copies(patch, "RESOURCE_EXHAUSTED: out of memory", num_failing)
            wait_for(DEVICE)
            assert len(ended) == num_steps and len(calls) == num_failing + 1
        assert int(result[0]) == 1


def test_a_device_that_failed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for(DEVICE)
    with monkeypatch.context() as patch:
        calls = failing_copies(patch, "INTERNAL: cable pulled", sys.maxsize)
        wait_for(DEVICE)
        wait_for(DEVICE)
        assert len(calls) == 2
    wait_for(DEVICE)


def test_waiting_takes_no_more_than_a_scalar() -> None:
    wait_for(DEVICE)
    num_arrays = len(jax.live_arrays())
    threads = [threading.Thread(target=wait_for, args=(DEVICE,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(jax.live_arrays()) <= num_arrays


def test_a_device_that_has_no_memory_to_wait_with_pins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_FENCES", {})
    with monkeypatch.context() as patch, pytest.raises(PinningError, match=r"^RESOURCE_EXHAUSTED: full$"):
        failing_copies(patch, "RESOURCE_EXHAUSTED: full\nstack of no interest", sys.maxsize)
        HostArrays(GEOMETRY, DEVICE)
    HostArrays(GEOMETRY, DEVICE).close()


def test_nothing_is_unregistered_while_python_ends() -> None:
    """Its thread has gone by then, whatever it was doing; what is forsaken later is left to the driver."""
    script = """
        import atexit, threading, time
        atexit.register(lambda: print([t.name for t in threading.enumerate() if t.name.startswith("vramjax")]))
        from vramjax.residency import host_memory

        def wait_for(device):
            time.sleep(0.2)
            print("waited for", device, flush=True)

        host_memory.wait_for = wait_for
        host_memory._unregister = lambda buffer, device: print("unregistered", buffer, flush=True)
        host_memory._start_unregistering()
        for i in range(2):
            host_memory._FORSAKEN.put((i, "device"))
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    lines = [line for i in range(2) for line in ("waited for device", f"unregistered {i}")]
    assert done.stdout.splitlines() == [*lines, "[]"]
