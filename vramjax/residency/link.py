"""How fast bytes can reach a device: the ceiling of everything that is streamed, measured on the spot."""

from __future__ import annotations

import time

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from vramjax.residency.transfer import out_of_memory_is_a_budget_error

_NUM_IN_FLIGHT = 3


def link_bytes_per_s(
    device: jax.Device, *, chunk_bytes: int = 32 << 20, num_chunks: int = 16, repeats: int = 5
) -> float:
    """The best rate of copies from pinned host memory to `device`, three in flight. On a CPU: of copies in its memory.

    Takes four chunks of device memory and as much of pinned host memory while it runs.

    Args:
      device: where to.
      chunk_bytes: bytes of one copy.
      num_chunks: copies that are timed together.
      repeats: how often; the best is taken.

    Raises:
      BudgetError: the device has no memory left for it.
    """
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    target = SingleDeviceSharding(device, memory_kind="device")
    with out_of_memory_is_a_budget_error(device, f"{(_NUM_IN_FLIGHT + 1) * chunk_bytes / 1e6:.0f} MB of copies"):
        source = np.random.default_rng(0).integers(-127, 128, chunk_bytes, np.int8)
        chunks = jax.block_until_ready([jax.device_put(source.copy(), pinned) for _ in range(_NUM_IN_FLIGHT)])

        def copy_all() -> float:
            start = time.perf_counter()
            in_flight: list[jax.Array] = []
            for i in range(num_chunks):
                if len(in_flight) == _NUM_IN_FLIGHT:
                    in_flight.pop(0).block_until_ready()
                in_flight.append(jax.device_put(chunks[i % len(chunks)], target))
            jax.block_until_ready(in_flight)
            return time.perf_counter() - start

        copy_all()  # the first is slower
        return num_chunks * chunk_bytes / min(copy_all() for _ in range(repeats))
