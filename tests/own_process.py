"""Code that runs in a Python process of its own, and how much memory a process takes: a peak is that of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_python(code: str, *arguments: object, **environment: str) -> str:
    """What `code` prints, which may import what tests import; it must not fail."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    variables = {**os.environ, "PYTHONPATH": ":".join(sys.path), **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_ok_on_two_devices(code: str) -> None:
    """Runs Python code where JAX has two CPU devices; it must print "ok", and nothing else."""
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    assert run_python(code, **flags) == "ok\n"


def resident_bytes() -> int:
    """Bytes of this process that are in memory now."""
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most that it has had in memory. The figure of getrusage begins with that of the process it comes from."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024
