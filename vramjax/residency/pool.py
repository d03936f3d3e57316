"""Device memory between two layers: slots that the next upload of the same geometry is copied into.

A slot is all device arrays of one layer. Evicting with a real free is slow (it waits for the device, array by
array); putting the slot aside and copying the next layer over it is a list append. Knows nothing of devices: a slot
is whatever the transfer made, and whoever is told that the pool is full frees it.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import Any

from vramjax.errors import ConfigError
from vramjax.residency.geometry import Geometry

Slot = Any  # what a transfer's upload returned; opaque here


class Pool:
    """Slots that are on the device and hold no layer, by geometry.

    Invariant: at most `cap` slots, over all geometries, are in the pool; a slot is never handed out for another
    geometry than the one it was given back with. Taking and giving cost a look at each geometry.

    Example, a cap of 1: `take(g)` is None (a miss: the caller makes a slot), `give(g, slot)` is True, `give(g,
    other)` is False (full: the caller frees `other`), `take(g)` is `slot` (a hit), and the pool is empty again.
    """

    def __init__(self, cap: int = 128) -> None:
        """A pool of at most `cap` slots; with 0 every slot is refused, so every release is a real free.

        Raises:
          ConfigError: `cap` is not a whole number of at least 0.
        """
        try:
            self.cap = operator.index(cap)
        except TypeError:
            raise ConfigError(f"the pool's cap is {cap!r}; expected a whole number of slots, 0 or more") from None
        if self.cap < 0:
            raise ConfigError(f"the pool's cap is {self.cap}; expected 0 or more slots")
        self.hits = 0  # takes that got a slot
        self.misses = 0  # slots that had to be made: takes that got none, and slots made in advance
        self.fallback_frees = 0  # gives that were refused because the pool was full
        self._slots: defaultdict[Geometry, list[Slot]] = defaultdict(list)

    def take(self, geometry: Geometry) -> Slot | None:
        """A slot of this geometry, no longer in the pool, or None where there is none."""
        slots = self._slots[geometry]
        if not slots:
            self.misses += 1
            return None
        self.hits += 1
        return slots.pop()

    @property
    def num_slots(self) -> int:
        return sum(map(len, self._slots.values()))

    @property
    def num_bytes(self) -> int:
        return sum(len(slots) * geometry.num_bytes for geometry, slots in self._slots.items())

    def count(self, geometry: Geometry) -> int:
        """Slots of this geometry in the pool."""
        return len(self._slots[geometry])

    def stock(self, geometry: Geometry, slot: Slot) -> None:
        """Puts in a slot that was made in advance, so that a later take is no miss: this is the miss. Not when full."""
        assert self.num_slots < self.cap
        self.misses += 1
        self._slots[geometry].append(slot)

    def give(self, geometry: Geometry, slot: Slot) -> bool:
        """Takes a slot back; False when the pool is full, and then the slot is still the caller's, who frees it."""
        if self.num_slots >= self.cap:
            self.fallback_frees += 1
            return False
        self._slots[geometry].append(slot)
        return True

    def drain(self) -> list[Slot]:
        """Empties the pool; the slots are the caller's, who frees them. The counters stay."""
        slots = [slot for of_geometry in self._slots.values() for slot in of_geometry]
        self._slots.clear()
        return slots
