"""Several devices: the CPU as three, which JAX makes of it only when it starts. The tests are in `three_devices.py`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from commands import PROJECT


@pytest.mark.parametrize("which", ["smollm2", "not smollm2"])
def test_three_devices(which: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, "tests/three_devices.py"]
    done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout
