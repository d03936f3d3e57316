"""The buffers that layers pass through on their way from disk: how many there are, and when one may be filled again."""

from __future__ import annotations

import contextlib
import enum
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from vramjax.errors import BudgetError
from vramjax.residency.geometry import Geometry
from vramjax.residency.host_memory import HostArrays, PinningError, wait_for
from vramjax.residency.host_store import PageableArrays, warn_not_pinned
from vramjax.units import gib

MIN_BUFFERS = 2  # one whose upload is under way, one that is read meanwhile
MAX_BUFFERS = 8  # as many as threads can keep a disk busy with; more would only wait


def host_buffers(host_budget: int, layer_bytes: int) -> int:
    """How many buffers a `MappedStore` should have.

    Args:
      host_budget: bytes of host memory for all of them.
      layer_bytes: host memory of one layer (`host_memory.host_bytes`), summed over the kinds of layers there are.

    Raises:
      BudgetError: not even the fewest fit.
    """
    if host_budget < MIN_BUFFERS * layer_bytes:
        raise BudgetError(
            f"host_budget leaves {gib(host_budget)} for layers on their way from disk; expected at least "
            f"{gib(MIN_BUFFERS * layer_bytes)}, {MIN_BUFFERS} layers: raise it by "
            f"{gib(MIN_BUFFERS * layer_bytes - host_budget)}"
        )
    return min(host_budget // layer_bytes, MAX_BUFFERS)


class BufferState(enum.Enum):
    """What a buffer is used for. It moves down this list and back to the top."""

    FREE = enum.auto()  # or will be, when `done` is ready
    READING = enum.auto()  # a thread fills it, or waits for `done` to begin
    READ = enum.auto()  # holds a layer, or the error that reading it ended with
    LENT = enum.auto()  # handed out; its upload may not even be queued yet


class Buffer:
    """Memory for one layer, and what it is used for."""

    def __init__(self, memory: HostArrays | PageableArrays) -> None:
        self.memory = memory
        self.state = BufferState.FREE
        self.layer_idx = -1
        self.ticket = -1  # the place of the read in the order; -1: nobody will ask for it
        self.error: BaseException | None = None
        self.done: Any = None  # ready when what was uploaded from here has been read
        self.freed_at = 0  # tickets given when it became free

    def free(self, done: Any, freed_at: int) -> None:
        self.state, self.ticket, self.error = BufferState.FREE, -1, None
        self.done, self.freed_at = done, freed_at


class AllWork:
    """In place of `done` for an upload that nobody has said the end of."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device

    def block_until_ready(self) -> None:
        wait_for(self._device)


def make_memories(
    geometries: Sequence[Geometry], device: jax.Device, num_buffers: int
) -> list[HostArrays] | list[PageableArrays]:
    """Memory for so many buffers of each geometry, but no more than can be of use: one more than there are layers.

    Raises:
      BudgetError: there is no such memory.
    """
    num_layers = Counter(geometries)
    wanted = [geometry for geometry, count in num_layers.items() for _ in range(min(num_buffers, count + 1))]
    try:
        with contextlib.ExitStack() as closing:  # those that were made before one that is not
            made = (contextlib.closing(HostArrays(geometry, device)) for geometry in wanted)
            pinned = [closing.enter_context(memory) for memory in made]
            closing.pop_all()
    except PinningError as error:
        warn_not_pinned(f"buffers for {len(geometries)} layers", str(error))
        return [PageableArrays(geometry) for geometry in wanted]
    return pinned


def wait_until_read(done: Any, device: jax.Device) -> None:
    """Waits until the copy that ends with `done` has read its buffer, also if that has failed."""
    try:
        done.block_until_ready()
    except Exception:  # what failed tells nothing of copies that were queued before it
        wait_for(device)
