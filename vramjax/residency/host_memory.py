"""Host memory that the device reads in place: written by numpy, uploaded by JAX, never copied in between.

On a GPU, memory of our own is registered with the driver and imported into JAX. JAX's allocator of pinned memory would
take up to 1.4 times the bytes, grow to 64 GiB and no further, and copy everything once more. On a CPU device JAX
adopts aligned numpy memory. Knows one geometry at a time, not what is in the arrays.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import mmap
import os
import queue
import threading
import time
import weakref
from typing import Self

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from vramjax.cuda_driver import synchronize
from vramjax.errors import BudgetError, VramjaxError, raise_if_interrupt
from vramjax.residency.dlpack import PinnedArray
from vramjax.residency.geometry import Geometry, PyTree
from vramjax.units import gib

_ALIGNMENT = 256  # bytes; a GPU likes to copy from there, and a CPU device adopts what lies at a multiple of 64


class PinningError(VramjaxError):
    """Host memory was not accepted as a device's pinned memory; the message says why."""


class HostArrays:
    """The arrays of one layer in host memory, twice: `views` for numpy to write, `arrays` for JAX to upload.

    Invariant: both are the same bytes, at the same addresses; `arrays` belong to `device`, in its "pinned_host" memory.
    Who writes to `views` sees to it that no upload of what was there before is still under way. The memory stays as
    long as any of its arrays is referred to, here or inside JAX, or until `close`.

    Example, a layer {"w": int8 [64, 32], "s": float32 [64]}: s at byte 0, w at byte 256, and `num_bytes` 4096, one
    page. `host.views["w"][...] = 1`, and `host.arrays["w"]` is a JAX array of ones.
    """

    def __init__(self, geometry: Geometry, device: jax.Device) -> None:
        """Takes memory for a layer, all of it at once. What is in it is undefined.

        Raises:
          PinningError: the device does not take it; use ordinary memory.
          BudgetError: there is no such memory left at all.
        """
        self.geometry = geometry
        self.num_bytes = host_bytes(geometry)
        self._device = device
        _fence_of(device)  # made now: when it is needed the device may have no memory left for it
        self._memory: _Memory | None = _Memory(self.num_bytes, device)
        views = _views(geometry, self._memory.buffer)
        arrays = [_imported(view, device, self._memory) for view in views]
        self.views: PyTree = jax.tree.unflatten(geometry.treedef, views)  # numpy, writable
        self.arrays: PyTree = jax.tree.unflatten(geometry.treedef, arrays)  # JAX arrays in "pinned_host"

    def close(self) -> None:
        """Deletes `arrays`, waits until no upload reads the memory any more, and unregisters it. Again: does nothing.

        Memory that was taken from the system goes back to it when no numpy array refers to it. Should somebody else
        hold on to what was in `arrays`, it is waited for ten seconds; the memory stays until that is gone.
        """
        if self._memory is None:
            return
        registration = self._memory.registration
        if registration is None:
            wait_for(self._device)
        for array in jax.tree.leaves(self.arrays):
            array.delete()
        self._memory = None
        if registration is not None:
            registration.wait()


def host_bytes(geometry: Geometry) -> int:
    """Host memory that `HostArrays` takes for a layer: its arrays at aligned places, in whole pages."""
    return -(-_offsets(geometry)[-1] // mmap.PAGESIZE) * mmap.PAGESIZE or mmap.PAGESIZE


def wait_for(device: jax.Device) -> None:
    """Returns when all that was queued on the device has run, also if its memory is full. Any thread may call it.

    A device that fails has nothing left to wait for.
    """
    _fence_of(device).wait()


class _Fence:
    """Waits for a device by what it queues there last: a program and a copy, as the two are queued apart.

    Invariant: between two waits it holds a scalar on the device, so that there is memory to wait with. The program runs
    in the memory of the scalar, and when it has ended the copy takes that memory over.
    """

    def __init__(self, device: jax.Device) -> None:
        self._sharding = SingleDeviceSharding(device)
        self._lock = threading.Lock()
        try:
            self._scalar = self._copy()
            self._program = jax.jit(lambda scalar: scalar + 1, donate_argnums=0).lower(self._scalar).compile()
        except jax.errors.JaxRuntimeError as error:
            raise PinningError(_reason(error)) from error

    def wait(self) -> None:
        with self._lock:
            while True:
                try:
                    if not self._scalar.is_deleted():
                        jax.block_until_ready(self._program(self._scalar))
                    self._scalar = self._copy()
                    return
                except jax.errors.JaxRuntimeError as error:
                    if "RESOURCE_EXHAUSTED" not in str(error):
                        return
                time.sleep(0.001)  # another thread was faster to take the memory: the copy has not been waited for

    def _copy(self) -> jax.Array:
        """A scalar that has been copied to the device."""
        return jax.block_until_ready(jax.device_put(np.zeros((), np.float32), self._sharding))


_FENCES: dict[jax.Device, _Fence] = {}
_making_one = threading.Lock()  # of what there is one of: the threads that fill a store all need it at once


def _fence_of(device: jax.Device) -> _Fence:
    """The only one of the device.

    Raises:
      PinningError: there is none yet, and none can be made.
    """
    with _making_one:
        if device not in _FENCES:
            _FENCES[device] = _Fence(device)
        return _FENCES[device]


class _Memory:
    """Page-aligned memory, registered with the driver of a GPU until nothing refers to this object any more.

    JAX refers to it, through what it imported, until all copies have ended that it knows of. They may be on any of its
    streams, or not even given to the driver yet, so that nothing else tells when that is.
    """

    def __init__(self, num_bytes: int, device: jax.Device) -> None:
        try:
            pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise BudgetError(f"there is no host memory for a layer of {gib(num_bytes)}: {error.strerror}") from error
        # A fork would leave the next write to a page of this process a copy of it, and the GPU the old one.
        pages.madvise(mmap.MADV_DONTFORK)
        _PAGES.add(pages)
        self.buffer = np.frombuffer(pages, np.uint8)
        self.registration: _Registration | None = None
        if device.platform == "cpu":
            return  # there is nobody to register it with
        self.registration = _Registration(self, device)
        try:
            device.client.dma_map(self.buffer.ctypes.data, num_bytes)
        except (AttributeError, jax.errors.JaxRuntimeError) as error:
            self.registration.is_mapped = False
            raise PinningError(_reason(error)) from error


class _Registration(weakref.ref[_Memory]):
    """That memory is registered, which a thread ends when nothing refers to the `_Memory` any more.

    The last to do so may have been JAX, in a thread that must neither wait for the device nor call its driver. What
    happens there is only that this is put in a queue, by code in C that no interrupt breaks off.
    """

    def __new__(cls, memory: _Memory, device: jax.Device) -> Self:
        del device
        return super().__new__(cls, memory, _FORSAKEN.put)

    def __init__(self, memory: _Memory, device: jax.Device) -> None:
        super().__init__(memory, _FORSAKEN.put)  # pyright: ignore[reportCallIssue] (as C code sees it)
        self.is_mapped = True
        self._thread, self._device = _unregistering_thread(), device
        self._buffer: np.ndarray | None = memory.buffer  # stays until it is unregistered
        self._ended = threading.Event()
        _REGISTERED[id(self)] = self  # a weak reference that is gone itself calls nobody

    def wait(self) -> None:
        """Until it has ended, if there still is the thread that ends it, and no longer than ten seconds."""
        if self._thread.is_alive():
            self._ended.wait(_PATIENCE_S)

    def end(self) -> None:
        """Unregisters the memory. In that thread."""
        assert self._buffer is not None
        if self.is_mapped:
            # JAX forgets the copies of a program that failed halfway; the driver does not.
            synchronize(self._device.local_hardware_id)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # a device that failed took its registrations along
                self._device.client.dma_unmap(self._buffer.ctypes.data)
        self._buffer = None
        _REGISTERED.pop(id(self), None)
        self._ended.set()


_PATIENCE_S = 10.0
_PAGES: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_NOT_OURS: list[mmap.mmap] = []
# In a child process there is nothing at their addresses, or soon something else, which must not be unmapped with them.
os.register_at_fork(after_in_child=lambda: _NOT_OURS.extend(_PAGES))
_REGISTERED: dict[int, _Registration] = {}
_FORSAKEN: queue.SimpleQueue[_Registration | None] = queue.SimpleQueue()


def _unregistering_thread() -> threading.Thread:
    """The only one; it is started when it is first asked for."""
    with _making_one:
        return _start_unregistering()


@functools.cache
def _start_unregistering() -> threading.Thread:
    thread = threading.Thread(target=_unregister_the_forsaken, name="vramjax-unregister", daemon=True)
    thread.start()
    # A thread that is inside JAX when Python ends takes the process down with it. What is forsaken after this stays
    # registered; the driver forgets it with the process. (Registered after JAX's own, so it runs before it.)
    atexit.register(_stop_unregistering, thread)
    return thread


def _stop_unregistering(thread: threading.Thread) -> None:
    _FORSAKEN.put(None)
    thread.join()


def _unregister_the_forsaken() -> None:
    while (registration := _FORSAKEN.get()) is not None:
        registration.end()
        del registration  # or it would stay until the next one comes
    _FORSAKEN.put(None)  # for another such thread, which an interrupt of the start of the first may have led to


def _offsets(geometry: Geometry) -> list[int]:
    """Where each array begins, and where the last one ends, aligned."""
    offsets = [0]
    for shape, dtype in geometry.arrays:
        num_bytes = math.prod(shape) * dtype.itemsize
        offsets.append(offsets[-1] + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _views(geometry: Geometry, buffer: np.ndarray) -> list[np.ndarray]:
    """The arrays of a layer in `buffer`, uint8 [num_bytes]."""
    return [
        np.ndarray(shape, dtype, buffer, offset)
        for (shape, dtype), offset in zip(geometry.arrays, _offsets(geometry), strict=False)
    ]


def _imported(view: np.ndarray, device: jax.Device, owner: object) -> jax.Array:
    """A JAX array in the pinned memory of `device`, in the very memory of `view`; it keeps `owner` alive."""
    try:
        if device.platform == "cpu" or not view.size:  # nothing lies in an empty array
            array = jax.device_put(view, SingleDeviceSharding(device, memory_kind="pinned_host"))
        else:
            array = jax.dlpack.from_dlpack(PinnedArray(view, device.local_hardware_id, owner=owner), copy=False)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, TypeError) as error:
        raise_if_interrupt(error)
        raise PinningError(_reason(error)) from error
    is_there = not view.size or array.unsafe_buffer_pointer() == view.ctypes.data
    if not is_there or array.sharding.memory_kind != "pinned_host" or array.devices() != {device}:
        raise PinningError(f"JAX made a copy on {array.sharding} of what lies in pinned memory of {device}")
    return array


def _reason(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).splitlines() or [type(error).__name__])[0]
