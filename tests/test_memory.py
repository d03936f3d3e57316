"""How much memory there is: what a fake driver, the allocator and the system say."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from fake_driver import FakeDriver
from own_process import run_python

from vramjax import cuda_driver, memory


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    fake = FakeDriver(free_bytes=600, total_bytes=1000)
    monkeypatch.setattr(cuda_driver, "_load_cuda", lambda: fake)
    return fake


@pytest.mark.parametrize(
    ("stats", "free"),
    [
        ({"bytes_limit": 900, "bytes_in_use": 100, "pool_bytes": 900}, 800),  # a pool that is all there already
        ({"bytes_limit": 900, "bytes_in_use": 100, "pool_bytes": 150}, 650),  # one that grows: others left 600 bytes
        ({"bytes_limit": 500, "bytes_in_use": 100, "pool_bytes": 150}, 400),  # or its own limit comes first
        ({"bytes_limit": 900, "bytes_in_use": 100}, 800),
        ({"bytes_limit": 100, "bytes_in_use": 200, "pool_bytes": 200}, 0),
        ({}, 600),  # no pool at all
        (None, 600),
    ],
)
def test_free_device_memory(cuda: FakeDriver, stats: dict[str, int] | None, free: int) -> None:
    device: Any = SimpleNamespace(platform="gpu", local_hardware_id=1, memory_stats=lambda: stats)
    assert memory.free_device_bytes(device) == free


def test_free_device_memory_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda_driver, "_load_cuda", no_driver)
    stats = {"bytes_limit": 900, "bytes_in_use": 100, "pool_bytes": 150}
    device: Any = SimpleNamespace(platform="gpu", local_hardware_id=0, memory_stats=lambda: stats)
    assert memory.free_device_bytes(device) == 800
    device.memory_stats = lambda: None
    assert memory.free_device_bytes(device) == sys.maxsize


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no driver to ask")
def test_what_another_program_takes_is_not_free() -> None:
    """JAX's own figure does not know of it."""
    script = """
        import json, subprocess, sys
        import jax
        from vramjax.memory import free_device_bytes

        device = jax.devices()[0]
        jax.block_until_ready(jax.numpy.ones(8))
        other = "import jax, sys; x = jax.numpy.ones(1 << 30, 'int8').block_until_ready(); print(1); sys.stdin.read()"
        before, own = free_device_bytes(device), device.memory_stats()["bytes_limit"]
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "1\\n"
        print(json.dumps([before, free_device_bytes(device), own, device.memory_stats()["bytes_limit"]]))
        process.communicate("")
    """
    growing = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": "1"}
    before, after, *own = json.loads(run_python(script, **growing).splitlines()[-1])
    assert own[0] == own[1]
    assert after <= before - (1 << 30)


def test_a_containers_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    2048 kB\n"}
    monkeypatch.setattr(memory, "_read", lambda path: files.get(path, ""))
    assert memory.free_host_bytes() == 2048 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "max\n", "/sys/fs/cgroup/memory.current": "7\n"}
    assert memory.free_host_bytes() == 2048 * 1024
    files |= {"/sys/fs/cgroup/memory.max": "1000\n"}
    assert memory.free_host_bytes() == 993
    # What the system holds of files that were read is in use only until somebody needs it.
    files |= {"/sys/fs/cgroup/memory.current": "900\n"}
    files |= {"/sys/fs/cgroup/memory.stat": "anon 100\nfile 800\ninactive_file 700\nactive_file 100\n"}
    assert memory.free_host_bytes() == 800
    files.clear()
    v1 = "/sys/fs/cgroup/memory/memory"
    files |= {f"{v1}.limit_in_bytes": "1000\n", f"{v1}.usage_in_bytes": "900\n"}
    assert memory.free_host_bytes() == 100
    files |= {f"{v1}.stat": "inactive_file 1\ntotal_inactive_file 30\n"}  # its own, and with that of groups in it
    assert memory.free_host_bytes() == 130
    files.clear()
    assert memory.free_host_bytes() == sys.maxsize
