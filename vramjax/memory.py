"""How much memory this machine has left, on the host and on a device."""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

# Of the group of processes that this one belongs to, in a container: its limit, what it uses, and what of that; and
# there, the name of what the system would give back if it were needed. cgroup v2, then v1.
_CGROUP_FILES = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """What there is, in bytes. On a CPU device and host share their memory.

    Example, two devices of a machine with 64 GiB free: each of them may have 32 of the `host_bytes`.
    """

    device_bytes: int
    host_bytes: int
    is_shared: bool
    process_bytes: int = 0  # of host memory, which this process has taken
    num_devices: int = 1  # that share the host's, each an equal part


def free_host_bytes() -> int:
    """Host memory that can still be taken without swapping: the machine's, or the container's if that is less.

    Where the system does not say (it is not Linux), there is no limit.
    """
    free = sys.maxsize
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for directory, limit_file, usage_file, cached in _CGROUP_FILES:
        limit, usage = (_read(f"{directory}/{name}").strip() for name in (limit_file, usage_file))
        if limit.isdigit() and usage.isdigit():  # "max": no limit
            # Files that were read count as used until somebody needs the memory: the model's own, for instance.
            given_back = [
                int(line.split()[1])
                for line in _read(f"{directory}/memory.stat").splitlines()
                if line.startswith(f"{cached} ")
            ]
            return min(free, max(0, int(limit) - int(usage) + sum(given_back)))
    return free


def process_host_bytes() -> int:
    """Host memory that this process takes now, libraries included; 0 where the system does not say."""
    fields = _read("/proc/self/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def free_device_bytes(device: jax.Device) -> int:
    """Device memory that the allocator of `device` may still hand out; free host memory if it is a CPU.

    An allocator that takes memory as it needs it can hand out no more than other programs have left: what it has taken
    and does not use, and what the driver has.
    """
    if device.platform == "cpu":
        return free_host_bytes()
    stats = device.memory_stats() or {}
    driver_bytes = driver_free_bytes(device.local_hardware_id)
    if "bytes_limit" not in stats:  # an allocator that keeps no statistics, and no memory either
        return sys.maxsize if driver_bytes is None else driver_bytes
    free_bytes = stats["bytes_limit"] - stats["bytes_in_use"]
    if driver_bytes is not None and "pool_bytes" in stats:
        free_bytes = min(free_bytes, stats["pool_bytes"] - stats["bytes_in_use"] + driver_bytes)
    return max(0, free_bytes)


def driver_free_bytes(ordinal: int | None) -> int | None:
    """What the CUDA driver has left on its device `ordinal`, all programs considered; None if it does not say."""
    try:
        cuda = _load_cuda()
    except OSError:  # no driver, or another one
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    free_bytes, total_bytes = ctypes.c_size_t(), ctypes.c_size_t()
    if ordinal is None or cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    # The driver answers for a thread's current context; JAX has made the device's primary one, which this borrows.
    if cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return None
    try:
        if cuda.cuCtxPushCurrent_v2(context):
            return None
        try:
            failed = cuda.cuMemGetInfo_v2(ctypes.byref(free_bytes), ctypes.byref(total_bytes))
        finally:
            cuda.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        cuda.cuDevicePrimaryCtxRelease_v2(device)
    return None if failed else free_bytes.value


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


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
