"""Layers of which the host keeps only those that will be uploaded again and again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from vramjax.residency.geometry import Geometry, PyTree
from vramjax.residency.host_store import HostStore
from vramjax.residency.mapped_buffers import MIN_BUFFERS
from vramjax.residency.mapped_store import MappedStore


class PartlyKeptStore:
    """Some layers in pinned host memory; the others pass through two buffers, once, on their way to the device.

    For schedules under which some layers stay on the device for good: host memory is that of the layers that do not,
    and of two more. Should all have to be uploaded once more, after a sweep that was broken off, what was not kept is
    read again.

    Invariant: as those of the two stores that it is made of.

    Example, layers 0 ... 5, of which 1, 3 and 5 are kept: three layers and two buffers of host memory. Layers 0, 2
    and 4 are read when `expect` says that they will be asked for; 1, 3 and 5 are there from the beginning.
    """

    reuses_memory = True

    def __init__(
        self,
        read_into: Callable[[int, PyTree], None],
        geometries: Sequence[Geometry],
        device: jax.Device | None = None,
        *,
        kept: Iterable[int],
    ) -> None:
        """Reads the layers that are kept; `kept` has at least one of them, and not all.

        Other arguments and errors are those of `HostStore.read`.
        """
        self._geometries = list(geometries)
        kept = sorted(kept)
        passing = sorted(set(range(len(geometries))) - set(kept))
        self._index_kept = {layer_idx: i for i, layer_idx in enumerate(kept)}
        self._index_passing = {layer_idx: i for i, layer_idx in enumerate(passing)}
        self._kept = HostStore.read(
            lambda index, views: read_into(kept[index], views), [geometries[i] for i in kept], device
        )
        try:
            self._passing = MappedStore(
                lambda index, views: read_into(passing[index], views),
                [geometries[i] for i in passing],
                device,
                num_buffers=MIN_BUFFERS,
            )
        except BaseException:
            self._kept.close()
            raise
        self.is_pinned = self._kept.is_pinned and self._passing.is_pinned

    @property
    def num_layers(self) -> int:
        return len(self._geometries)

    def geometry(self, layer_idx: int) -> Geometry:
        return self._geometries[layer_idx]

    def expect(self, order: Iterator[int]) -> None:
        """See `MappedStore.expect`. A layer that is not kept is uploaded once, however long the order is."""
        ahead = (self._index_passing[layer_idx] for layer_idx in order if layer_idx in self._index_passing)
        # The order is endless, and a search in it for one more of these would be too.
        self._passing.expect(itertools.islice(ahead, len(self._index_passing)))

    def layer(self, layer_idx: int) -> PyTree:
        if layer_idx in self._index_kept:
            return self._kept.layer(self._index_kept[layer_idx])
        return self._passing.layer(self._index_passing[layer_idx])

    def uploaded(self, layer_idx: int, done: Any) -> None:
        if layer_idx in self._index_passing:
            self._passing.uploaded(self._index_passing[layer_idx], done)

    def close(self) -> None:
        """Waits for uploads under way and gives the memory back. Closing again does nothing."""
        self._passing.close()
        self._kept.close()
