"""The layers of a store that are on the device or on their way there, and the memory that they leave behind.

Knows how one layer comes and goes; not which one is next, nor what a sweep is.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vramjax.residency.geometry import PyTree
from vramjax.residency.pool import Pool, Slot
from vramjax.residency.stats import ResidencyStats

if TYPE_CHECKING:  # neither is needed to run, and both import JAX
    from vramjax.residency.host_store import Store
    from vramjax.residency.transfer import Transfer


class LayerState(enum.Enum):
    """Where a layer is. It moves down this list and back to the top."""

    ABSENT = "absent"
    LOADING = "loading"  # its upload has been started
    RESIDENT = "resident"


class PresentLayers:
    """Layers that come to the device, are used there, and leave their memory to others.

    Invariant: the slot of a layer that is present is nobody else's. A layer that is in use is never released, and the
    memory of one that is still loading goes to nobody before its copy has ended.

    Example, with an empty pool: `load(0)` uploads layer 0 into new memory, `acquire(0)` is its weights; `end_use()`,
    `release(0)`, and `load(1)` uploads layer 1 into that memory.
    """

    def __init__(self, store: Store, transfer: Transfer, pool: Pool, stats: ResidencyStats, *, recycles: bool) -> None:
        """No layer is present yet.

        Args:
          store: the layers on the host.
          transfer: how they are uploaded.
          pool: where slots wait for the next layer.
          stats: counters to keep.
          recycles: whether slots go to the pool; else they are freed.
        """
        self.recycles = recycles
        self._store, self._transfer, self._pool, self._stats = store, transfer, pool, stats
        self._slots: dict[int, Slot] = {}  # of the layers that are present
        self._loading: set[int] = set()  # those of them that have not arrived
        self._in_use: int | None = None

    @property
    def indices(self) -> frozenset[int]:
        """The layers that are present."""
        return frozenset(self._slots)

    def state(self, layer_idx: int) -> LayerState:
        if layer_idx not in self._slots:
            return LayerState.ABSENT
        return LayerState.LOADING if layer_idx in self._loading else LayerState.RESIDENT

    def reserve(self, peak_slots: Mapping[Any, int]) -> None:
        """Makes slots until there are so many of each geometry, those in which layers are included."""
        for geometry, num_slots in peak_slots.items():
            held = self._pool.count(geometry) + sum(self._store.geometry(i) == geometry for i in self._slots)
            for _ in range(min(num_slots - held, self._pool.cap - self._pool.num_slots)):
                self._pool.stock(geometry, self._transfer.make_slot(geometry))
        self._note_peak()

    def load(self, layer_idx: int, *, steps: int = 0) -> None:
        """Absent -> loading. `steps`: see `Transfer.upload`."""
        host = self._store.layer(layer_idx)
        geometry = self._store.geometry(layer_idx)
        slot = self._pool.take(geometry)
        uploaded = functools.partial(self._store.uploaded, layer_idx) if self._store.reuses_memory else None
        try:
            self._loading.add(layer_idx)
            self._slots[layer_idx] = self._transfer.upload(host, slot, steps=steps, uploaded=uploaded)
        except BaseException:
            self._loading.discard(layer_idx)
            # The slot may or may not have been used up by then.
            if slot is None or not self._transfer.is_alive(slot):
                self._stats.slots_lost += 1
            elif not self._pool.give(geometry, slot):
                self._try_to_free(slot)
            raise
        stats = self._stats
        stats.uploads += 1
        stats.bytes_uploaded += geometry.num_bytes
        stats.peak_resident_layers = max(stats.peak_resident_layers, len(self._slots))
        self._note_peak()

    def acquire(self, layer_idx: int) -> PyTree:
        """The weights of a layer that is present, which is in use from now on."""
        self._arrive(layer_idx)
        self._in_use = layer_idx
        return self._transfer.view(self._slots[layer_idx])

    def end_use(self) -> None:
        self._in_use = None

    def release(self, layer_idx: int) -> None:
        """Anything -> absent, when its copy has ended."""
        assert layer_idx != self._in_use
        self._arrive(layer_idx)  # a copy in transit must not find its memory given to another
        slot = self._detach(layer_idx)
        self._stats.evictions += 1
        if not self.recycles or not self._pool.give(self._store.geometry(layer_idx), slot):
            self._free(slot)

    def drop(self, *, keep_arrived: bool) -> None:
        """Releases all layers after a failure, or those that have not arrived. Interrupted, it can be called again."""
        self.end_use()
        for layer_idx in list(self._slots):
            arrived = self._arrives(layer_idx)
            if arrived and keep_arrived:
                continue
            slot = self._detach(layer_idx)
            # Memory that a copy failed into, or that is gone, is not trusted with another one.
            is_good = arrived and self._transfer.is_alive(slot)
            if not (is_good and self.recycles and self._pool.give(self._store.geometry(layer_idx), slot)):
                self._try_to_free(slot)
        self._transfer.forget()  # an interrupt may have come when a copy was queued, and before its slot was kept here

    def free(self) -> None:
        """Frees all layers and what is in the pool. Should that fail, it frees the rest, and raises the first error."""
        self.end_use()
        errors: list[Exception] = []
        while self._slots:
            layer_idx = next(iter(self._slots))
            self._arrives(layer_idx)  # memory is not freed under a copy
            errors += self._try_to_free(self._detach(layer_idx))
        for slot in self._pool.drain():
            errors += self._try_to_free(slot)
        if errors:
            raise errors[0]

    def note_end(self) -> None:
        """Counts what is present, in the statistics."""
        self._stats.resident_layers_end = len(self._slots)
        self._stats.resident_arrays_end = sum(self._store.geometry(i).num_arrays for i in self._slots)

    def _note_peak(self) -> None:
        layer_bytes = sum(self._store.geometry(i).num_bytes for i in self._slots)
        self._stats.peak_device_bytes = max(self._stats.peak_device_bytes, layer_bytes + self._pool.num_bytes)

    def _arrive(self, layer_idx: int) -> None:
        """Loading -> resident; raises what the copy failed with."""
        if layer_idx in self._loading:
            self._transfer.wait(self._slots[layer_idx])
            self._loading.remove(layer_idx)

    def _arrives(self, layer_idx: int) -> bool:
        """Whether the layer's copy ended well; for the ways out, where a second error would hide the first."""
        with contextlib.suppress(Exception):
            self._arrive(layer_idx)
        return layer_idx not in self._loading

    def _detach(self, layer_idx: int) -> Slot:
        """Anything -> absent: the layer's slot, which is the caller's now."""
        self._loading.discard(layer_idx)
        return self._slots.pop(layer_idx)

    def _free(self, slot: Slot) -> None:
        self._stats.slots_freed += 1  # whatever comes of it: nobody has the slot any more
        self._transfer.free(slot)

    def _try_to_free(self, slot: Slot) -> list[Exception]:
        """What it failed with, if it did."""
        try:
            self._free(slot)
        except Exception as error:
            return [error]
        return []
