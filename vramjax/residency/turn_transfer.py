"""Uploads of a device that takes turns with others: hidden behind its computation, without keeping the others waiting.

Each device computes one layer in N (see `multi`). What a layer step computes is another device's input, and is ready
when all that travels in the step has been copied. So only so much travels in it as takes the device's own share of the
time; the rest goes in front of the step, in a program of its own, while other devices compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from vramjax.errors import ConfigError
from vramjax.residency.fused_transfer import FusedTransfer, Part


class TurnTransfer(FusedTransfer):
    """A `FusedTransfer` for one of `num_devices` devices that compute in turns.

    Of each part of an upload, which a step of `FusedTransfer` would take along whole, the step takes only the smallest
    arrays, at most 1 / (2 num_devices) of the part's bytes: half of the time between two layer steps of this device is
    then enough for the steps of all devices, and the other half is left for hops, and for steps that compute longer
    than that. The part's other arrays are copied in front of the step. Where no array is that small, all of them are,
    as by a `DeviceTransfer`.

    Example, 2 devices, layers of arrays of 100, 50, 25, 17 and 6 MB that are all streamed: `upload` starts to copy 150
    MB at once, behind the layer step that was dispatched last, and the next layer step takes 48 MB along. At 55 GB/s
    the first takes 2.7 ms and the second 0.9, in which the layer is computed too. Each device has a turn every 3.6 ms,
    and its link is never idle.
    """

    def __init__(self, device: jax.Device | None = None, *, num_devices: int) -> None:
        """Uploads to `device`, one of `num_devices`; None is JAX's first device.

        Raises:
          ConfigError: `num_devices` is less than 1.
        """
        super().__init__(device)
        if num_devices < 1:
            raise ConfigError(f"num_devices is {num_devices}; expected at least 1")
        self._num_devices = num_devices

    def _part(self, indices: Sequence[int], sizes: Sequence[int]) -> Part:
        """The smallest arrays go along with the step, if any are that small, and the others in front of it."""
        room = sum(sizes[i] for i in indices) // (2 * self._num_devices)
        along: list[int] = []
        for i in sorted(indices, key=lambda i: sizes[i]):
            room -= sizes[i]
            if room < 0:
                break
            along.append(i)
        return Part(front=[i for i in indices if i not in along], along=sorted(along))
