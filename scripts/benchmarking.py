"""What the benchmarks share: ceilings of this machine, and the one form of result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"


def pinned_copy_gb_per_s(device: jax.Device, *, chunk_bytes: int = 32 << 20, num_chunks: int = 64) -> float:
    """The best rate of copies from pinned host memory to the device, three in flight."""
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    target = SingleDeviceSharding(device, memory_kind="device")
    source = np.random.default_rng(0).integers(-127, 128, chunk_bytes, np.int8)
    chunks = [jax.device_put(source, pinned) for _ in range(4)]
    jax.block_until_ready(chunks)

    def copy_all() -> list[jax.Array]:
        in_flight: list[jax.Array] = []
        for i in range(num_chunks):
            if len(in_flight) == 3:
                in_flight.pop(0).block_until_ready()
            in_flight.append(jax.device_put(chunks[i % len(chunks)], target))
        return in_flight

    return num_chunks * chunk_bytes / best_seconds(copy_all) / 1e9


def device_read_gb_per_s(device: jax.Device, *, num_bytes: int = 4 << 30) -> float:
    """The rate at which a sum over a large array reads device memory."""
    if device.platform == "cpu":
        num_bytes = 1 << 28
    array = jnp.ones(num_bytes // 4, jnp.float32, device=device)
    total = jax.jit(jnp.sum)
    return num_bytes * 8 / best_seconds(lambda: [total(array) for _ in range(8)]) / 1e9


def best_seconds(work: Callable[[], Any], *, repeats: int = 5) -> float:
    """The shortest time of `work`, which returns what to wait for."""
    jax.block_until_ready(work())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return min(times)


def spread(values: Sequence[float]) -> str:
    """Median, and how far the values lie apart, in percent of it."""
    median = statistics.median(values)
    return f"{median:.2f} (+-{(max(values) - min(values)) / 2 / median * 100:.1f} %)"


def write_result(
    benchmark: str,
    device: jax.Device,
    *,
    ceilings: Mapping[str, float],
    metrics: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    directory: Path,
) -> Path:
    """Writes one result file into `directory`, prints its headlines as the last line, and returns its path."""
    now = datetime.datetime.now(datetime.UTC)
    result = {
        "schema": 1,
        "benchmark": benchmark,
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        # A copy of the tree without its history is told its commit.
        "commit": _output("git", "-C", str(RESULTS.parent.parent), "rev-parse", "HEAD") or os.environ.get("GIT_COMMIT"),
        "device": device.device_kind,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "ceilings": dict(ceilings),
        "metrics": dict(metrics),
        "rows": list(rows),
    }
    path = directory / f"{benchmark}-{now:%Y-%m-%d}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    return path


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return (done.stdout.splitlines() or [None])[0]
