"""What the CUDA driver and its management library say of a device: memory, and when it has done all it was given.

JAX says neither. Without a driver every question has the answer None.
"""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Iterator
from typing import Any


def driver_free_bytes(ordinal: int | None) -> int | None:
    """What the CUDA driver has left on its device `ordinal`, all programs considered; None if it does not say."""
    free_bytes, total_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    with _primary_context(ordinal) as cuda:
        if cuda is None or cuda.cuMemGetInfo_v2(ctypes.byref(free_bytes), ctypes.byref(total_bytes)):
            return None
    return free_bytes.value


def synchronize(ordinal: int | None) -> None:
    """Waits for everything that was given to the CUDA driver's device `ordinal`, on every stream.

    That includes copies of a program that failed halfway, which JAX no longer waits for. What JAX has accepted but not
    given to the driver yet is not waited for. Returns at once where there is no such device, or a broken one.
    """
    with _primary_context(ordinal) as cuda:
        if cuda is not None:
            cuda.cuCtxSynchronize()


@contextlib.contextmanager
def _primary_context(ordinal: int | None) -> Iterator[Any]:
    """The driver's library, with the context that JAX has made on a device as this thread's; None if there is none."""
    try:
        cuda = _load_cuda()
    except OSError:  # no driver, or another one
        cuda = None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if (
        cuda is None
        or ordinal is None
        or cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), ordinal)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    ):
        yield None
        return
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            yield None
            return
        try:
            yield cuda
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)


def driver_memory(ordinal: int) -> tuple[int | None, int] | None:
    """(free, total) bytes of the CUDA driver's device `ordinal`, before JAX has started there: nothing is put on it.

    Free is None if it cannot be known; all is None if there is no such device.
    """
    try:
        cuda = _load_cuda()
    except OSError:
        return None
    device, total_bytes, identity = ctypes.c_int(), ctypes.c_size_t(), (ctypes.c_ubyte * 16)()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    if cuda.cuDeviceTotalMem_v2(ctypes.byref(total_bytes), device) or not total_bytes.value:
        return None
    # Places are the driver's here, and other ones in the management library, which alone can say what is free.
    if cuda.cuDeviceGetUuid_v2(identity, device):
        return None, total_bytes.value
    return _managed_free_bytes(uuid.UUID(bytes=bytes(identity))), total_bytes.value


def _managed_free_bytes(identity: uuid.UUID) -> int | None:
    """Free bytes of a GPU, or of a part of one that has been divided, all programs considered."""
    try:
        nvml = _load_nvml()
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        handle, total_free_used = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()
        for kind in ("GPU", "MIG"):
            if not nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{identity}".encode(), ctypes.byref(handle)):
                return None if nvml.nvmlDeviceGetMemoryInfo(handle, total_free_used) else total_free_used[1]
        return None
    finally:
        nvml.nvmlShutdown()


def _load_cuda() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _load_nvml() -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")
