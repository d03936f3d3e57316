"""DLPack capsules: what stands in them, and how long the memory behind them lives."""

from __future__ import annotations

import ctypes
import gc
import struct
import subprocess
import sys
import threading
import weakref
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from vramjax.residency.dlpack import CUDA_HOST, PinnedArray

CPU = 1  # kDLCPU, which JAX takes everywhere


class Owner:
    """Something that a weak reference can watch."""


def aligned(dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Zeros at a 64-byte boundary, where a CPU device adopts them."""
    memory = np.zeros(4096, np.uint8)
    return np.ndarray(shape, dtype, memory, -memory.ctypes.data % 64)


def struct_of(capsule: object) -> tuple[int, ...]:
    """What stands in the struct that a capsule points to, by the layout in dlpack.h on a 64-bit machine.

    data, device type, device id, ndim, dtype's code, bits and lanes, shape, strides, byte offset, context, deleter.
    """
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
        ("PyCapsule_GetPointer", ctypes.pythonapi)
    )
    layout = "<QiiiBBHQQQQQ"
    return struct.unpack(layout, ctypes.string_at(pointer(capsule, b"dltensor"), struct.calcsize(layout)))


@pytest.mark.parametrize(
    ("dtype", "code"),
    [(np.int8, 0), (np.uint16, 1), (np.float32, 2), (ml_dtypes.bfloat16, 4), (np.complex64, 5), (np.bool_, 6)],
)
def test_the_capsule_describes_the_array(dtype: Any, code: int) -> None:
    array = aligned(dtype, (5, 7))
    pinned = PinnedArray(array, 3)
    assert pinned.__dlpack_device__() == (CUDA_HOST, 3)
    capsule = pinned.__dlpack__(stream=None)
    data, *described, shape, strides, byte_offset, context, deleter = struct_of(capsule)
    assert data == array.ctypes.data
    assert described == [CUDA_HOST, 3, 2, code, array.itemsize * 8, 1]
    assert list((ctypes.c_int64 * 2).from_address(shape)) == [5, 7]
    assert (strides, byte_offset) == (0, 0)
    assert context == 0 and deleter


def test_numpy_reads_the_same_memory() -> None:
    """numpy takes pinned memory of CUDA as what it is for the host."""
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    view = np.from_dlpack(PinnedArray(array, 0))  # type: ignore[arg-type]
    assert view.shape == (2, 3, 4) and view.dtype == np.int16
    array[1, 2, 3] = -5
    assert view[1, 2, 3] == -5


@pytest.mark.parametrize("dtype", [np.int8, np.float32, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_jax_reads_the_same_memory(dtype: Any) -> None:
    host = aligned(dtype, (4, 32))
    host[...] = np.arange(128).reshape(4, 32).astype(dtype)
    array = jax.dlpack.from_dlpack(PinnedArray(host, 0, device_type=CPU), copy=False)
    assert array.dtype == dtype and array.shape == (4, 32)
    assert array.unsafe_buffer_pointer() == host.ctypes.data
    np.testing.assert_array_equal(np.asarray(array), host)


def test_a_dtype_that_dlpack_does_not_have() -> None:
    with pytest.raises(ValueError, match="DLPack has no name for int4"):
        PinnedArray(np.zeros(4, ml_dtypes.int4), 0)


def owned(array: np.ndarray) -> tuple[PinnedArray, weakref.ref]:
    owner = Owner()
    return PinnedArray(array, 0, owner=owner, device_type=CPU), weakref.ref(owner)


def test_the_memory_lives_as_long_as_jax_holds_it() -> None:
    host = aligned(np.float32, (8, 8))
    memory = weakref.ref(host.base)  # type: ignore[arg-type]
    pinned, owner = owned(host)
    array = jax.dlpack.from_dlpack(pinned, copy=False)
    del pinned, host
    gc.collect()
    assert owner() is not None and memory() is not None
    same = array + 0  # the array may be used, and what was made from it does not keep the memory
    jax.block_until_ready(same)
    array.delete()
    assert owner() is None and memory() is None
    assert float(same.sum()) == 0

    pinned, owner = owned(aligned(np.float32, (8, 8)))
    array = jax.dlpack.from_dlpack(pinned, copy=False)
    del pinned
    assert owner() is not None
    del array
    gc.collect()
    assert owner() is None


def test_it_lives_until_queued_work_has_read_it() -> None:
    host = aligned(np.float32, (16, 16))
    host[...] = 2
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000, lambda i, y: (y @ x) / 32, x))
    array = jax.dlpack.from_dlpack(PinnedArray(host, 0, device_type=CPU), copy=False)
    expected = np.asarray(slow(jax.device_put(np.full((16, 16), 2, np.float32), jax.devices("cpu")[0])))
    result = slow(array)
    del array, host
    gc.collect()
    trash = [np.full((16, 16), 7.0, np.float32) for _ in range(64)]  # what would lie there if it were free
    np.testing.assert_array_equal(np.asarray(result), expected)
    del trash


def test_a_capsule_that_nobody_consumes_holds_nothing_for_good() -> None:
    pinned, owner = owned(np.zeros(4))
    capsule = pinned.__dlpack__()
    second = pinned.__dlpack__()
    del pinned
    assert owner() is not None
    del capsule
    assert owner() is not None
    del second
    assert owner() is None


def test_a_consumed_capsule_may_go_before_the_array() -> None:
    pinned, owner = owned(np.zeros(4))
    view = np.from_dlpack(pinned)  # type: ignore[arg-type]  # its capsule is gone by now
    del pinned
    gc.collect()
    assert owner() is not None and view.sum() == 0
    thread = threading.Thread(target=lambda views: views.clear(), args=([view],))
    del view
    thread.start()
    thread.join()
    assert owner() is None


def test_arrays_may_outlive_the_interpreters_modules() -> None:
    code = """
import sys, jax, numpy as np
from vramjax.residency.dlpack import PinnedArray
sys.jax_array = jax.dlpack.from_dlpack(PinnedArray(np.zeros((64, 64), np.float32), 0, device_type=1))
sys.numpy_array = np.from_dlpack(PinnedArray(np.zeros(5), 0))
sys.capsule = PinnedArray(np.zeros(5), 0).__dlpack__()
"""
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
