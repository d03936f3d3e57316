"""How much memory this machine has left, on the host and on a device."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from vramjax.cuda_driver import driver_free_bytes

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


def start_allocator(device: jax.Device) -> None:
    """Has JAX reserve the memory of a GPU that it is going to hand out, if it has not yet.

    It does so when an array is first made, and its records of that memory take 1/32 of it on the host: more than 3 GiB
    for three quarters of 141 GB. Whoever plans host memory has to see them.
    """
    if device.platform != "cpu":
        jax.block_until_ready(jax.device_put(np.zeros(1, np.int8), device))


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


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
