"""How much memory this machine has left, on the host and on a device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

# (limit, in use) of the group of processes that this one belongs to, in a container: cgroup v2, then v1.
_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_host_bytes() -> int:
    """Host memory that can still be taken without swapping: the machine's, or the container's if that is less.

    Where the system does not say (it is not Linux), there is no limit.
    """
    free = sys.maxsize
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit_file, usage_file in _CGROUP_FILES:
        limit, usage = _read(limit_file).strip(), _read(usage_file).strip()
        if limit.isdigit() and usage.isdigit():  # "max": no limit
            return min(free, max(0, int(limit) - int(usage)))
    return free


def free_device_bytes(device: jax.Device) -> int:
    """Device memory that the allocator of `device` may still hand out; free host memory if it is a CPU."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform == "cpu":
        return free_host_bytes()
    return sys.maxsize  # an allocator that keeps no statistics; what does not fit is noticed when it is made


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
