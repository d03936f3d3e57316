"""Ceilings of this machine: the best rates at which it can do what a benchmark then does in earnest."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from vramjax.residency.geometry import PyTree, geometry_of
from vramjax.residency.host_memory import HostArrays

_CHUNK_BYTES = (32 << 20, 128 << 20, 512 << 20)
_NUM_IN_FLIGHT = (2, 4)


def pinned_copy_gb_per_s(device: jax.Device, layers: Sequence[PyTree] = (), *, repeats: int = 4) -> float:
    """The best rate of copies from pinned host memory to the device, several in flight.

    The memory is registered as that of streamed layers is. Copies of several sizes, small to large, are tried, and so
    are `layers`, host arrays as they will be streamed: the ceiling is the best of all that.
    """
    on_cpu = device.platform == "cpu"
    rates = [together_gb_per_s([device], [layers], repeats=repeats)] if layers else []
    for chunk_bytes in _CHUNK_BYTES[:1] if on_cpu else _CHUNK_BYTES:
        num_chunks = max(2, (64 << 20 if on_cpu else 1 << 30) // chunk_bytes)  # more than a processor's cache holds
        chunks = [jax.ShapeDtypeStruct((chunk_bytes,), np.int8)] * num_chunks
        with contextlib.closing(HostArrays(geometry_of(chunks), device)) as host:
            for view in host.views:
                view[...] = 1  # pages that nobody wrote to are all one page
            sources = [(array,) for array in host.arrays]
            for num_in_flight in _NUM_IN_FLIGHT:
                num_bytes = num_chunks * chunk_bytes * (1 if on_cpu else 4)
                rates.append(_copies_gb_per_s([device], sources, num_in_flight, repeats, num_bytes))
    return max(rates)


def quick_copy_gb_per_s(device: jax.Device, layer: PyTree) -> float:
    """About the rate of the link, from copies of one array of a layer: takes a few MB and milliseconds."""
    arrays = sorted(jax.tree.leaves(layer), key=lambda array: array.nbytes)
    return _copies_gb_per_s([device], [(arrays[len(arrays) // 2],)], 1, 2, 256 << 20)


def together_gb_per_s(devices: Sequence[jax.Device], layers: Sequence[Sequence[PyTree]], *, repeats: int = 4) -> float:
    """The best rate of copies to all devices at once, summed; `layers` are host arrays of each device."""
    sources = list(zip(*layers, strict=False))
    num_bytes = len(devices) * (64 << 20 if devices[0].platform == "cpu" else 4 << 30)
    return max(
        _copies_gb_per_s(devices, sources, num_in_flight, repeats, num_bytes) for num_in_flight in _NUM_IN_FLIGHT
    )


def _copies_gb_per_s(
    devices: Sequence[jax.Device],
    sources: Sequence[tuple[PyTree, ...]],
    num_in_flight: int,
    repeats: int,
    num_bytes: int,
) -> float:
    """The best rate of copying `sources` in turn, each to all devices, one part for each; about `num_bytes` in all."""
    targets = tuple(SingleDeviceSharding(device, memory_kind="device") for device in devices)
    source_bytes = geometry_of(sources[0]).num_bytes
    num_copies = max(num_in_flight + 1, num_bytes // source_bytes)

    def copy_all() -> list[PyTree]:
        in_flight: deque[PyTree] = deque()
        for source in itertools.islice(itertools.cycle(sources), num_copies):
            if len(in_flight) == num_in_flight:
                jax.block_until_ready(in_flight.popleft())
            in_flight.append(jax.device_put(source, targets))
        return list(in_flight)

    return num_copies * source_bytes / best_seconds(copy_all, repeats=repeats) / 1e9


def device_read_gb_per_s(device: jax.Device) -> float:
    """The rate at which a sum over a large array reads device memory."""
    num_bytes = 1 << 26 if device.platform == "cpu" else 4 << 30
    array = jnp.ones(num_bytes // 4, jnp.float32, device=device)
    total = jax.jit(jnp.sum)
    return num_bytes * 8 / best_seconds(lambda: [total(array) for _ in range(8)]) / 1e9


def bf16_matmul_tflop_per_s(device: jax.Device) -> float:
    """The rate of a product of two large square bfloat16 matrices of random numbers, added up in float32."""
    size = 256 if device.platform == "cpu" else 8192
    with jax.default_device(device):
        a, b = (jax.random.normal(jax.random.key(i), (size, size), jnp.bfloat16) for i in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 * 8 / best_seconds(lambda: [product(a, b) for _ in range(8)]) / 1e12


def tell_ceilings(device: jax.Device, *, since: float) -> dict[str, float]:
    """What kernels cannot be faster than, measured and printed; `since` is when the benchmark began."""
    ceilings = {
        "device_read_gb_per_s": device_read_gb_per_s(device),
        "bf16_matmul_tflop_per_s": bf16_matmul_tflop_per_s(device),
    }
    print(
        f"{device.device_kind}: reads {ceilings['device_read_gb_per_s']:.0f} GB/s, multiplies bfloat16 at "
        f"{ceilings['bf16_matmul_tflop_per_s']:.1f} TFLOP/s, after {time.perf_counter() - since:.0f} s",
        flush=True,
    )
    return ceilings


def best_seconds(work: Callable[[], Any], *, repeats: int = 5) -> float:
    """The shortest time of `work`, which returns what to wait for."""
    jax.block_until_ready(work())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(work())
        times.append(time.perf_counter() - start)
    return min(times)
