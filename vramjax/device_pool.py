"""How much of a GPU JAX reserves. It does so once, when it starts, and so before anything is known of the model.

Left to itself JAX takes three quarters of the GPU: more than a small budget, and less than what is free on an idle one.
Needs no JAX.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from vramjax.cuda_driver import driver_memory
from vramjax.memory_request import MemoryRequest
from vramjax.residency.budget import AUTO_RESERVE_BYTES

VARIABLE = "XLA_CLIENT_MEM_FRACTION"
# Whoever has set one of these has decided. (JAX refuses to start with both names of the fraction.)
_DECIDED_BY = (
    VARIABLE,
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
_MARGIN_BYTES = 256 << 20  # beside a budget: gaps between arrays
_LARGEST = 0.95  # of a GPU; the rest is for the driver's own and for programs on the device


def pool_fraction(request: MemoryRequest, *, free_bytes: int | None, total_bytes: int) -> float | None:
    """The part of a device that JAX should reserve; None: what it does by itself, as layers say nothing of bytes.

    Example: a budget of 4 GiB on a device of 80 GiB is 0.0531, that and 256 MiB; "auto" with 60 GiB of them free is
    0.7438, all but 512 MiB.

    Args:
      request: what was asked for.
      free_bytes: what other programs have left; None if nobody knows.
      total_bytes: of the device.
    """
    if request.device_budget is None:
        return None
    if request.device_budget != "auto":
        num_bytes = int(request.device_budget) + _MARGIN_BYTES
    elif free_bytes is not None:
        num_bytes = free_bytes - AUTO_RESERVE_BYTES
    else:
        return None
    return min(num_bytes / total_bytes, _LARGEST) if num_bytes > 0 else None


def reserve_pool(request: MemoryRequest, ordinals: Sequence[int]) -> None:
    """Has JAX, which has not started yet, reserve what was asked for on the GPUs of these places, and no more.

    Changes nothing where the user has set JAX's own variables, and where there is no CUDA driver that says what there
    is. One figure holds for all devices: for "auto" that of the fullest one, for a budget that of the smallest.
    """
    if any(name in os.environ for name in _DECIDED_BY):
        return
    fractions = []
    for ordinal in ordinals:
        memory = driver_memory(ordinal)
        if memory is None:
            return
        fractions.append(pool_fraction(request, free_bytes=memory[0], total_bytes=memory[1]))
    known = [fraction for fraction in fractions if fraction is not None]
    if known and len(known) == len(fractions):
        fraction = min(known) if request.device_budget == "auto" else max(known)
        os.environ[VARIABLE] = f"{fraction:.4f}"
