"""What a GPU spends its time on, kernel by kernel, from a trace that JAX's profiler takes. Knows nothing of models."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """All calls of one kernel of one program."""

    program: str  # the XLA module, such as jit_layer_step; "" where the trace does not say
    kernel: str
    calls: int
    us: float  # of all calls together, each from when the one before it on its stream had ended


def kernel_times(work: Callable[[], Any], device: jax.Device) -> list[KernelTime]:
    """What `device`, a GPU, runs for `work`, which returns what to wait for; most time first. Nothing for a CPU.

    Copies count as kernels.
    """
    with tempfile.TemporaryDirectory(prefix="vramjax-trace-") as directory:
        with jax.profiler.trace(directory, create_perfetto_trace=True):
            jax.block_until_ready(work())
        (path,) = Path(directory).rglob("perfetto_trace.json.gz")
        with gzip.open(path) as file:
            return parse_trace(json.load(file)["traceEvents"], device.local_hardware_id or 0)


def parse_trace(events: Iterable[dict[str, Any]], device_idx: int) -> list[KernelTime]:
    """The kernels of one GPU among the events of a trace, in the format of Chrome's trace viewer.

    A GPU is a process there, and each of its streams a thread. Its other threads tell of the same time in other words.
    A kernel that was launched early does nothing until the one before it has ended: that time is not its own.
    """
    events = list(events)
    processes, threads = {}, {}
    for event in events:
        if event.get("ph") == "M" and event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        if event.get("ph") == "M" and event["name"] == "thread_name":
            threads[event["pid"], event["tid"]] = event["args"]["name"]
    gpu = f"/device:GPU:{device_idx}"
    sums: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    streams: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") != "X" or processes.get(event["pid"], "").split(" ")[0] != gpu:
            continue
        if threads.get((event["pid"], event["tid"]), "").startswith("Stream"):
            streams[event["pid"], event["tid"]].append(event)
    for stream in streams.values():
        ended_at = float("-inf")
        for event in sorted(stream, key=lambda event: event["ts"]):
            calls_and_us = sums[event.get("args", {}).get("hlo_module", ""), event["name"]]
            ends_at = event["ts"] + event["dur"]
            calls_and_us[0] += 1
            calls_and_us[1] += max(0.0, ends_at - max(event["ts"], ended_at))
            ended_at = max(ended_at, ends_at)
    times = [KernelTime(program=p, kernel=k, calls=int(calls), us=us) for (p, k), (calls, us) in sums.items()]
    return sorted(times, key=lambda time: -time.us)


def kernel_rows(times: Sequence[KernelTime], num_sweeps: int) -> list[dict[str, Any]]:
    """The same as rows of a result file, for each of so many sweeps over the layers."""
    return [
        {
            "program": time.program,
            "kernel": time.kernel,
            "calls_per_sweep": time.calls / num_sweeps,
            "us_each": time.us / time.calls,
            "us_per_sweep": time.us / num_sweeps,
        }
        for time in times
    ]


def print_kernels(title: str, rows: Sequence[dict[str, Any]], *, at_most: int = 30) -> None:
    """One line for each kernel, and their sum."""
    if not rows:
        print(f"{title}: no kernels in the trace")
        return
    print(f"{title}: {sum(row['us_per_sweep'] for row in rows):.0f} us in kernels and copies")
    print(f"  {'kernel':<44}{'program':<24}{'calls':>8}{'us each':>10}{'us':>10}")
    for row in rows[:at_most]:
        print(
            f"  {row['kernel'][:43]:<44}{row['program'][:23]:<24}{row['calls_per_sweep']:>8.1f}"
            f"{row['us_each']:>10.2f}{row['us_per_sweep']:>10.1f}"
        )
    if len(rows) > at_most:
        print(f"  and {len(rows) - at_most} more: {sum(row['us_per_sweep'] for row in rows[at_most:]):.1f} us")
