"""A device that can be tortured: copies arrive late, in any order, or never, and every rule is checked."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vramjax.residency.geometry import Geometry
from vramjax.residency.jit_options import JitOptions


class InjectedError(Exception):
    """What a fake copy or free fails with."""


@dataclass(eq=False)
class Memory:
    """A piece of device memory; `content` is the layer index that it holds, None while nothing right is in it."""

    kind: Hashable
    content: int | None = None


@dataclass(eq=False)
class FakeSlot:
    """A handle to device memory. One upload makes it, one upload or free ends it, as with donated arrays."""

    memory: Memory
    layer_idx: int
    fails: bool = False
    arrived: bool = False
    alive: bool = True


def geometry_of_kind(kind: int) -> Geometry:
    return Geometry("tree", (((10 + kind,), np.dtype(np.int8)),))


class FakeStore:
    """Layer i is the pair (i, its kind). Checks that layers are asked for in the order that was announced."""

    is_pinned = True
    reuses_memory = True

    def __init__(self, kinds: Sequence[int]) -> None:
        self.kinds = kinds
        self.num_layers = len(kinds)
        self.num_uploaded = 0
        self._order: Iterator[int] = iter(())

    def expect(self, order: Iterator[int]) -> None:
        self._order = order

    def layer(self, layer_idx: int) -> tuple[int, int]:
        assert next(self._order) == layer_idx
        return layer_idx, self.kinds[layer_idx]

    def uploaded(self, layer_idx: int, done: Any) -> None:
        assert layer_idx == done
        self.num_uploaded += 1

    def geometry(self, layer_idx: int) -> Geometry:
        return geometry_of_kind(self.kinds[layer_idx])


class FakeTransfer:
    """Asserts on every call that the controller keeps the rules.

    `upload_faults` maps the how-manieth upload from now to how it fails: "before" the slot was used up, "after" it
    was, or "in_flight". `free_faults` are the how-manieth frees from now that fail.
    """

    def __init__(self, seed: int, most_slots: Mapping[Hashable, int] | None = None) -> None:
        self.rng = random.Random(seed)
        self.most_slots = most_slots
        self.in_use: FakeSlot | None = None
        self.upload_faults: dict[int, str] = {}
        self.free_faults: set[int] = set()
        self.live: set[Memory] = set()
        self.uploaded: list[int] = []  # layer indices, in order
        self._in_flight: list[FakeSlot] = []
        self._failing: list[FakeSlot] = []

    def make_slot(self, geometry: Geometry) -> FakeSlot:
        memory = Memory(geometry.arrays[0][0][0] - 10)
        self.live.add(memory)
        self._check_peak(memory.kind)
        return FakeSlot(memory, layer_idx=-1, arrived=True)

    def upload(
        self,
        host: tuple[int, int],
        slot: FakeSlot | None,
        *,
        steps: int = 0,
        uploaded: Callable[[int], None] | None = None,
    ) -> FakeSlot:
        assert steps >= 0
        layer_idx, kind = host
        fault = self.upload_faults.get(0)
        self.upload_faults = {n - 1: how for n, how in self.upload_faults.items() if n > 0}
        if fault == "before":
            raise InjectedError
        if slot is None:
            memory = Memory(kind)
            self.live.add(memory)
        else:
            self._end(slot)
            memory = slot.memory
            memory.content = None
            assert memory.kind == kind
        if fault == "after":
            self.live.discard(memory)
            raise InjectedError
        self._check_peak(kind)
        self.uploaded.append(layer_idx)
        new = FakeSlot(memory, layer_idx, fails=fault == "in_flight")
        self._in_flight.append(new)
        if new.fails:
            self._failing.append(new)
        self.some_arrive()
        if uploaded is not None:
            uploaded(layer_idx)
        return new

    def jit(self, function: Callable[..., Any], options: JitOptions) -> Callable[..., Any]:
        del options
        return function

    def rehearse(self, geometry: Geometry, steps: Iterable[int], call: Callable[[], Any]) -> None:
        del geometry, steps, call

    def _check_peak(self, kind: Hashable) -> None:
        if self.most_slots is not None:
            count = Counter(memory.kind for memory in self.live)[kind]
            assert count <= self.most_slots[kind], "above the peak of the schedule"

    def some_arrive(self) -> None:
        """Any of the copies in flight arrive, in any order."""
        for slot in self.rng.sample(self._in_flight, self.rng.randint(0, len(self._in_flight))):
            self._arrive(slot)

    def has_failing_copy(self) -> bool:
        """Whether a copy in flight, perhaps one that a sweep has started for the next, will turn out to have failed."""
        return any(slot.alive for slot in self._failing)

    def view(self, slot: FakeSlot) -> FakeSlot:
        return slot

    def wait(self, slot: FakeSlot) -> None:
        assert slot.alive
        if slot in self._in_flight:
            self._arrive(slot)
        if slot.fails:
            raise InjectedError

    def free(self, slot: FakeSlot) -> None:
        self._end(slot)
        self.live.remove(slot.memory)
        fails = 0 in self.free_faults
        self.free_faults = {n - 1 for n in self.free_faults if n > 0}
        if fails:
            raise InjectedError

    def is_alive(self, slot: FakeSlot) -> bool:
        return slot.alive

    def forget(self) -> None:
        """No copy waits for a call."""

    def _arrive(self, slot: FakeSlot) -> None:
        self._in_flight.remove(slot)
        slot.arrived = True
        slot.memory.content = None if slot.fails else slot.layer_idx

    def _end(self, slot: FakeSlot) -> None:
        assert slot.alive, "memory given away twice"
        assert slot.arrived, "memory given away while a copy into it is in transit"
        assert slot is not self.in_use, "memory given away while it is in use"
        slot.alive = False
