"""Uploads of a device that takes turns with others: hidden behind its computation, without keeping the others waiting.

Each device computes one layer in N (see `multi`). What a layer step computes is another device's input, and is ready
when all that travels in the step has been copied. So only so much travels in it as takes the device's own share of the
time; the rest goes in front of the step, in a program of its own, while other devices compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from vramjax.errors import ConfigError
from vramjax.residency.geometry import PyTree
from vramjax.residency.pool import Slot
from vramjax.residency.transfer import DeviceTransfer, FusedTransfer, _Carried, _copy_into


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
        self._next_takes_nothing = False  # the next step, as all of its part has gone in front of it

    def upload(
        self, host: PyTree, slot: Slot | None, *, steps: int = 0, uploaded: Callable[[jax.Array], None] | None = None
    ) -> Slot:
        """As that of `FusedTransfer`; what goes in front of the next step starts now."""
        slot = super().upload(host, slot, steps=steps, uploaded=uploaded)
        if isinstance(slot, _Carried):
            slot.parts = [some for part in slot.parts for some in self._divided(part, slot)]
            try:
                if self._queue[0] is slot:
                    self._copy_front()
            except BaseException:
                self._queue.remove(slot)
                raise
        return slot

    def jit(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: Sequence[str] = (),
        donate_argnums: Sequence[int] = (),
        spread: bool = True,
    ) -> Callable[..., Any]:
        options: dict[str, Any] = {"static_argnames": static_argnames, "donate_argnums": donate_argnums}
        plain = DeviceTransfer.jit(self, function, **options)
        carrying = super().jit(function, **options, spread=spread)

        def call(*args: Any, **kwargs: Any) -> Any:
            if spread and not self._next_takes_nothing:
                self._copy_front()
            if spread and self._next_takes_nothing:
                self._next_takes_nothing = False
                return plain(*args, **kwargs)
            return carrying(*args, **kwargs)

        return call

    def _divided(self, part: list[int], carried: _Carried) -> list[list[int]]:
        """The arrays of a part that go in front of a step, and those that go along with it, if there are any."""
        sizes = [array.nbytes for array in carried.host]
        room = sum(sizes[i] for i in part) // (2 * self._num_devices)
        along = []
        for i in sorted(part, key=lambda i: sizes[i]):
            room -= sizes[i]
            if room < 0:
                break
            along.append(i)
        front = _Front(i for i in part if i not in along)
        front.is_all = not along
        return [front, sorted(along)] if along else [front]

    def _copy_front(self) -> None:
        """Copies what goes in front of a step, if that is next. Should it fail, whoever wants the layer finds it."""
        front = self._queue[0].parts[0] if self._queue else None
        if isinstance(front, _Front):
            carried = self._queue[0]
            copied = _copy_into([carried.arrays[i] for i in front], [carried.host[i] for i in front])
            self._copied(carried, front, copied)
            self._next_takes_nothing = front.is_all


class _Front(list[int]):
    """A part, or some of one, that goes in front of a step."""

    is_all: bool  # so that nothing is left to go along
