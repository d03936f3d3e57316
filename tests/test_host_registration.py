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
from vramjax.residency import host_memory
from vramjax.residency.geometry import geometry_of
from vramjax.residency.host_memory import HostArrays, PinningError, wait_for

GEOMETRY = geometry_of({"w": np.zeros((64, 64), np.float32), "s": np.zeros(64, np.float32)})
DEVICE = jax.devices()[0]


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
        return eventually(lambda: not self.registered)


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


def test_memory_is_registered_until_it_is_closed(waits: list[Any]) -> None:
    driver = FakeDriver()
    host = HostArrays(GEOMETRY, driver.device)
    assert driver.registered == {host.views["s"].ctypes.data: host.num_bytes} and host.num_bytes == 20480
    host.close()
    assert not driver.registered and waits == [driver.device]
    host.close()
    assert waits == [driver.device]


def test_memory_is_registered_as_long_as_jax_holds_an_array(waits: list[Any]) -> None:
    """The last reference goes anywhere; another thread waits for the device and unregisters."""
    driver = FakeDriver()
    host = HostArrays(GEOMETRY, driver.device)
    memory = weakref.ref(host.views["w"].base)
    array = host.arrays["w"]
    del host
    gc.collect()
    time.sleep(0.05)
    assert len(driver.registered) == 1 and not waits
    del array
    assert driver.has_nothing() and waits == [driver.device]
    assert eventually(lambda: memory() is None)


def test_a_driver_that_refuses(waits: list[Any]) -> None:
    driver = FakeDriver(limit_bytes=50_000)
    hosts = [HostArrays(GEOMETRY, driver.device) for _ in range(2)]
    with pytest.raises(PinningError, match=r"^RESOURCE_EXHAUSTED: no more today$") as caught:
        HostArrays(GEOMETRY, driver.device)
    assert isinstance(caught.value, VramjaxError)
    del caught
    hosts.pop().close()
    hosts.append(HostArrays(GEOMETRY, driver.device))
    del hosts
    assert driver.has_nothing()


def test_a_jax_that_cannot_register(waits: list[Any]) -> None:
    device: Any = SimpleNamespace(platform="gpu", local_hardware_id=0, client=SimpleNamespace())
    with pytest.raises(PinningError, match="has no attribute 'dma_map'"):
        HostArrays(GEOMETRY, device)


def test_an_import_that_fails_leaves_nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_fence_of", lambda device: SimpleNamespace(wait=lambda: None))
    driver = FakeDriver()
    with pytest.raises(PinningError):  # there is no CUDA backend here; on a GPU there is no such device
        driver.device.local_hardware_id = 77
        HostArrays(GEOMETRY, driver.device)
    assert driver.has_nothing()


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

        def wait_for(device):
            time.sleep(0.2)
            print("waited for", device, flush=True)

        host_memory.wait_for = wait_for
        host_memory._unregister = lambda buffer, device: print("unregistered", buffer, flush=True)
        host_memory._start_unregistering()
        for i in range(2):
            host_memory._FORSAKEN.put((i, "device"))
    """
    lines = [line for i in range(2) for line in ("waited for device", f"unregistered {i}")]
    assert run_python(script).splitlines() == [*lines, "[]"]
