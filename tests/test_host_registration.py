"""Host memory that is registered with a device, which is waited for before it is unregistered.

A driver that only takes notes stands in for that of a GPU.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_process import run_python
from waiting import eventually

from vramjax.errors import VramjaxError
from vramjax.residency import dlpack, host_memory
from vramjax.residency.geometry import geometry_of
from vramjax.residency.host_memory import HostArrays, PinningError, wait_for

GEOMETRY = geometry_of({"w": np.zeros((64, 64), np.float32), "s": np.zeros(64, np.float32)})
DEVICE = jax.devices()[0]


class FakeDriver:
    """A JAX client's part in this: what is registered, and every call. Like a GPU's, it refuses what does not fit."""

    def __init__(self, limit_bytes: int = sys.maxsize) -> None:
        self.registered: dict[int, int] = {}
        self.waits: list[int] = []  # of which device all copies were waited for
        self.limit_bytes = limit_bytes
        self.device: Any = SimpleNamespace(platform="gpu", local_hardware_id=1, client=self)

    def dma_map(self, address: int, num_bytes: int) -> None:
        if sum(self.registered.values()) + num_bytes > self.limit_bytes:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no more today\nstack of no interest")
        assert address % 4096 == 0 and num_bytes % 4096 == 0 and address not in self.registered
        self.registered[address] = num_bytes

    def dma_unmap(self, address: int) -> None:
        assert self.waits, "copies may be under way"
        del self.registered[address]

    def has_nothing(self) -> bool:
        """Whether all memory was unregistered, which a thread may still be doing."""
        return eventually(lambda: not self.registered)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver; a CPU stands in for the import."""
    driver = FakeDriver()

    def imported(view: np.ndarray, device: Any, owner: object) -> jax.Array:
        pinned = host_memory.PinnedArray(view, 0, owner=owner, device_type=1)
        return jax.dlpack.from_dlpack(pinned, copy=False)

    monkeypatch.setattr(host_memory, "synchronize", driver.waits.append)
    monkeypatch.setattr(host_memory, "_fence_of", lambda device: None)
    monkeypatch.setattr(host_memory, "_imported", imported)
    return driver


def test_memory_is_registered_until_it_is_closed(driver: FakeDriver) -> None:
    host = HostArrays(GEOMETRY, driver.device)
    assert driver.registered == {host.views["s"].ctypes.data: host.num_bytes} and host.num_bytes == 20480
    host.close()
    assert not driver.registered and driver.waits == [1]
    host.close()
    assert driver.waits == [1]


def test_memory_is_registered_as_long_as_jax_holds_an_array(driver: FakeDriver) -> None:
    """The last reference goes anywhere; another thread waits for the driver and unregisters."""
    host = HostArrays(GEOMETRY, driver.device)
    memory = weakref.ref(host.views["w"].base)
    array = host.arrays["w"]
    del host
    gc.collect()
    time.sleep(0.05)
    assert len(driver.registered) == 1 and not driver.waits
    del array
    assert driver.has_nothing() and driver.waits == [1]
    assert eventually(lambda: memory() is None)


def test_closing_waits_for_what_jax_holds(driver: FakeDriver) -> None:
    """Copies that were only accepted so far are on no stream that could be waited for."""
    host = HostArrays(GEOMETRY, driver.device)
    address = host.views["s"].ctypes.data
    held = [export for export in dlpack._EXPORTS.values() if export.managed.dl_tensor.data == address]
    assert len(held) == 1
    thread = threading.Thread(target=host.close)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive() and driver.registered and all(a.is_deleted() for a in jax.tree.leaves(host.arrays))
    del held[:]
    thread.join(10)
    assert not thread.is_alive() and not driver.registered


def test_closing_does_not_wait_for_ever(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_PATIENCE_S", 0.1)
    host = HostArrays(GEOMETRY, driver.device)
    held = list(dlpack._EXPORTS.values())
    host.close()
    assert driver.registered
    del held
    assert driver.has_nothing()


def test_an_interrupt_leaves_nothing_registered(driver: FakeDriver) -> None:
    """Wherever it comes while JAX lets go of an array: JAX would only print an error of ours."""

    def interrupt(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename in (host_memory.__file__, dlpack.__file__):
            raise KeyboardInterrupt
        return interrupt

    host = HostArrays(GEOMETRY, driver.device)
    arrays = jax.tree.leaves(host.arrays)
    del host
    sys.settrace(interrupt)
    try:
        while arrays:
            arrays.pop().delete()
    finally:
        sys.settrace(None)
    assert driver.has_nothing()


def test_a_driver_that_refuses(driver: FakeDriver) -> None:
    driver.limit_bytes = 50_000
    hosts = [HostArrays(GEOMETRY, driver.device) for _ in range(2)]
    with pytest.raises(PinningError, match=r"^RESOURCE_EXHAUSTED: no more today$") as caught:
        HostArrays(GEOMETRY, driver.device)
    assert isinstance(caught.value, VramjaxError)
    del caught
    hosts.pop().close()
    hosts.append(HostArrays(GEOMETRY, driver.device))
    del hosts
    assert driver.has_nothing()


def test_a_jax_that_cannot_register(driver: FakeDriver) -> None:
    device: Any = SimpleNamespace(platform="gpu", local_hardware_id=0, client=SimpleNamespace())
    with pytest.raises(PinningError, match="has no attribute 'dma_map'"):
        HostArrays(GEOMETRY, device)


def test_an_import_that_fails_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_fence_of", lambda device: None)
    driver = FakeDriver()
    monkeypatch.setattr(host_memory, "synchronize", driver.waits.append)
    with pytest.raises(PinningError):  # there is no CUDA backend here; on a GPU there is no such device
        driver.device.local_hardware_id = 77
        HostArrays(GEOMETRY, driver.device)
    assert driver.has_nothing()


def test_one_thread_unregisters() -> None:
    """Many threads fill a store, and all need it at the same time; a second one would be waited for in vain at exit."""
    script = """
        import os, sys, threading
        from vramjax.residency import host_memory

        start = threading.Thread.start

        def start_slowly(thread):
            start(thread)
            if thread.name == "vramjax-unregister":
                threading.Event().wait(0.05)

        threading.Thread.start = start_slowly
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=host_memory._unregistering_thread) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(sum(thread.name == "vramjax-unregister" for thread in threading.enumerate()), flush=True)
        os._exit(0)  # which waits for none
    """
    assert run_python(script).strip() == "1"


# Waiting for a device


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

        class Slow:
            def end(self):
                time.sleep(0.2)
                print("unregistered", flush=True)

        host_memory._unregistering_thread()
        for _ in range(2):
            host_memory._FORSAKEN.put(Slow())
    """
    assert run_python(script).splitlines() == ["unregistered", "unregistered", "[]"]
