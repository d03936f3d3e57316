"""Uploads of a device that takes turns with others: hidden behind its computation, without keeping the others waiting.

Each device computes one layer in N (see `multi`). What a layer step computes is another device's input, and is ready
when all that travels in the step has been copied. So only so much travels in it as takes the device's own share of the
time; the rest goes in front of the step, in a program of its own, while other devices compute.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from vramjax.errors import ConfigError
from vramjax.residency.geometry import PyTree
from vramjax.residency.pool import Slot
from vramjax.residency.transfer import DeviceTransfer, FusedTransfer, _copy_into, _is_traced


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

    def upload(
        self, host: PyTree, slot: Slot | None, *, steps: int = 0, uploaded: Callable[[jax.Array], None] | None = None
    ) -> Slot:
        """As that of `FusedTransfer`; what goes in front of the next step starts now."""
        slot = super().upload(host, slot, steps=steps, uploaded=uploaded)
        if self._queue and self._queue[-1] is slot:
            carried: Any = self._queue[-1]
            sizes = [array.nbytes for array in carried.host]
            carried.parts = [self._divided(part, sizes) for part in carried.parts]
            if self._queue[0] is slot:
                self._copy_front(carried)
        return slot

    def jit(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        spread: bool = True,
    ) -> Callable[..., Any]:
        options: dict[str, Any] = {"static_argnames": static_argnames, "donate_argnums": donate_argnums}
        plain = DeviceTransfer.jit(self, function, **options)
        carrying = super().jit(function, **options, spread=spread)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not spread or not self._queue or _is_traced(args, kwargs):
                return carrying(*args, **kwargs)
            carried: Any = self._queue[0]
            part: _Part = carried.parts[0]
            self._copy_front(carried)
            if part.along:
                return carrying(*args, **kwargs)
            carried.parts = carried.parts[1:]
            return plain(*args, **kwargs)

        return call

    def _divided(self, part: list[int], sizes: list[int]) -> _Part:
        """The arrays of a part that go in front of a step, and those that go along with it, if any are that small."""
        room = sum(sizes[i] for i in part) // (2 * self._num_devices)
        along: list[int] = []
        for i in sorted(part, key=lambda i: sizes[i]):
            room -= sizes[i]
            if room < 0:
                break
            along.append(i)
        return _Part(front=[i for i in part if i not in along], along=sorted(along))

    def _copy_front(self, carried: Any) -> None:
        """Copies what goes in front of the step that takes the upload's next part, unless that was done already."""
        part: _Part = carried.parts[0]
        front, part.front = part.front, []
        if not front:
            return
        try:
            copied = _copy_into([carried.arrays[i] for i in front], [carried.host[i] for i in front])
        except BaseException as error:
            self._queue.remove(carried)  # or more would be copied into what is left of it
            carried.error = error
            raise
        for i, array in zip(front, copied, strict=True):
            carried.arrays[i] = array
        if not any(carried.parts):
            self._copied(carried, (), ())  # all of it


@dataclasses.dataclass
class _Part:
    """What a step is to take of an upload: indices of the arrays that are not copied yet, before it or along with it.

    It is the next part until the step is called, also when all of it has gone in front: that step takes nothing.
    """

    front: list[int]
    along: list[int]

    def __iter__(self) -> Iterator[int]:
        return iter([*self.front, *self.along])

    def __len__(self) -> int:
        return len(self.front) + len(self.along)
