"""Host memory that numpy writes and the device reads in place."""

from __future__ import annotations

import gc
import re
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from own_process import assert_ok_on_two_devices, resident_bytes
from waiting import eventually

from vramjax.errors import BudgetError
from vramjax.residency.geometry import Geometry, geometry_of
from vramjax.residency.host_memory import HostArrays, PinningError, host_bytes

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


# On a GPU

gpu = pytest.mark.skipif(jax.default_backend() != "gpu", reason="a CPU device adopts any aligned memory")


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
    assert eventually(lambda: resident_bytes() - before <= 16 << 20)


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
@pytest.mark.parametrize("kind", ["in a program", "by itself"])
def test_closing_under_a_copy_on_a_gpu(kind: str) -> None:
    """A program copies on its device's stream of programs; JAX queues what is copied by itself elsewhere, and later."""
    geometry = geometry_of({"w": np.zeros((256, 1 << 20), np.int8)})
    memory = jax.memory.Space.Device if kind == "in a program" else SingleDeviceSharding(DEVICE, memory_kind="device")
    jit = jax.jit if kind == "in a program" else lambda function: function
    copy = jit(lambda array: jax.device_put(array, memory).astype(jnp.int32).sum())
    for _ in range(4):
        host = HostArrays(geometry, DEVICE)
        fill(host.views, 1)
        sums = [copy(host.arrays["w"]) for _ in range(4)]
        host.close()
        fill(host.views, 2)
        assert [int(s) for s in sums] == [1 << 28] * 4


@pytest.mark.gpu
@gpu
def test_closing_after_a_program_that_failed_on_a_gpu() -> None:
    """JAX no longer knows of its copies, which may still be under way."""
    geometry = geometry_of({"w": np.zeros((256, 1 << 20), np.int8)})

    def fail(x: np.ndarray) -> np.ndarray:
        raise RuntimeError("the device fell off")

    @jax.jit
    def copy(array: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.device_put(array, jax.memory.Space.Device), jax.pure_callback(fail, x, x)

    for _ in range(4):
        host = HostArrays(geometry, DEVICE)
        with pytest.raises(jax.errors.JaxRuntimeError, match="the device fell off"):
            jax.block_until_ready(copy(host.arrays["w"], jnp.zeros(4)))
        host.close()
    assert int(jnp.ones(8).sum()) == 8
