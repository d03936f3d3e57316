"""Uploads that travel inside the programs of a layer step.

Knows which arrays of which upload go with which call, so that none is copied twice or forgotten; how they are copied is
the business of `programs`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.core import Tracer

from vramjax.errors import VramjaxError
from vramjax.residency import programs
from vramjax.residency.geometry import Geometry, PyTree
from vramjax.residency.host_memory import HostArrays, PinningError
from vramjax.residency.jit_options import JitOptions
from vramjax.residency.pool import Slot
from vramjax.residency.transfer import DeviceTransfer

_MAX_PARTS = 4  # of an upload; a step is compiled once more for each that differs


class FusedTransfer(DeviceTransfer):
    """Uploads that travel inside the programs of a layer step, so that the link is busy while the device computes.

    An upload with `steps` waits in a queue, and the next calls of a function from `jit` take it along: its arrays are
    divided into as many parts of about equal size as there are steps, 4 at most (an array is never divided), and each
    call copies one part into the donated slot while it computes. Whoever needs the layer sooner gets it: `view` queues
    what is still missing as a program of its own, as `DeviceTransfer` does from the start.

    Invariant: a slot that `upload` returned is in the queue exactly as long as arrays of it are not copied yet;
    `free`, and its being used up by another upload, take it out. Otherwise all that `DeviceTransfer` says holds.

    Example, layers of two arrays of 100 and 60 MB, every other layer streamed: `slot = t.upload(layer_4, slot,
    steps=2)` queues the parts (100 MB) and (60 MB). With `step = t.jit(layer_step, JitOptions())`, `step(weights_1,
    x)` takes the first along and `step(weights_2, x)` the second; `t.view(slot)` is layer 4.
    """

    def __init__(self, device: jax.Device | None = None) -> None:
        """Uploads to `device`, or to JAX's first device if None."""
        super().__init__(device)
        self._queue: deque[_Carried] = deque()

    def upload(
        self, host: PyTree, slot: Slot | None, *, steps: int = 0, uploaded: Callable[[jax.Array], None] | None = None
    ) -> Slot:
        """Queues the copy of a layer of pinned arrays into `slot`; with no slot or no steps it starts now."""
        slot = self._taken_out(slot)
        if slot is None or steps < 1:
            return super().upload(host, slot, uploaded=uploaded)
        sizes = [array.nbytes for array in jax.tree.leaves(host)]
        parts = [self._part(indices, sizes) for indices in split(sizes, min(steps, _MAX_PARTS))]
        carried = _Carried(host, slot, parts, uploaded)
        self._queue.append(carried)
        if self._queue[0] is carried:
            self._copy(carried, parts[0].front)
        return carried

    def jit(self, function: Callable[..., Any], options: JitOptions) -> Callable[..., Any]:
        plain, carrying = programs.jitted(function, options), programs.carrying(function, options)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._queue and not _is_traced(args, kwargs):
                carried, along = self._next_part() if options.spread else self._next_whole()
                if along:
                    copied, result = carrying(*carried.pick(along), *args, **kwargs)
                    carried.parts.popleft()  # not before: a call that fails leaves it to the next one
                    self._copied(carried, along, copied)
                    return result
            return plain(*args, **kwargs)

        return call

    def rehearse(self, geometry: Geometry, steps: Iterable[int], call: Callable[[], Any]) -> None:
        """Compiles what `call`, which calls a function of `jit` once, will need for uploads of these steps.

        Takes the memory of one more layer while it runs, on the device and on the host.
        """
        try:
            host_arrays = HostArrays(geometry, self.device)
        except PinningError:
            return  # then the first sweeps compile what they need
        with contextlib.closing(host_arrays) as host:
            for num_steps in steps:
                carried = self.upload(host.arrays, self.make_slot(geometry), steps=num_steps)
                try:
                    while self._queue:
                        jax.block_until_ready(call())
                finally:
                    self.free(carried)

    def view(self, slot: Slot) -> PyTree:
        self.wait(slot)
        return super().view(_arrays_of(slot))

    def wait(self, slot: Slot) -> None:
        """Queues what is not yet copied of the slot's layer; does not block.

        Raises what the copy failed with, every time.
        """
        if slot in self._queue:
            self._copy(slot, slot.missing)
        elif isinstance(slot, _Carried) and slot.missing:
            raise slot.error

    def free(self, slot: Slot) -> None:
        super().free(self._taken_out(slot))

    def is_alive(self, slot: Slot) -> bool:
        return super().is_alive(_arrays_of(slot))

    def forget(self) -> None:
        self._queue.clear()

    def _part(self, indices: Sequence[int], sizes: Sequence[int]) -> Part:
        """How these arrays of an upload, one of its parts, are copied; `sizes` are the bytes of all its arrays."""
        del sizes
        return Part(front=(), along=indices)

    def _next_part(self) -> tuple[_Carried, Sequence[int]]:
        """The next upload, and what the next step takes along of it; what goes in front of that step is queued."""
        carried = self._queue[0]
        part = carried.parts[0]
        self._copy(carried, [i for i in part.front if i in carried.missing])
        if not part.along:
            carried.parts.popleft()
        return carried, part.along

    def _next_whole(self) -> tuple[_Carried, Sequence[int]]:
        """The next upload that is whole, if there is one, and all of it."""
        carried = self._queue[0]
        if carried.is_begun:
            self._copy(carried, carried.missing)  # what is left of it would be one more program to compile
            carried = self._queue[0] if self._queue else carried
        return carried, carried.missing

    def _copy(self, carried: _Carried, indices: Sequence[int]) -> None:
        """Copies these arrays of an upload, if there are any, in a program of its own."""
        if not indices:
            return
        try:
            copied = programs.copy_into(*carried.pick(indices))
        except BaseException as error:
            if isinstance(error, Exception):  # Ctrl-C is not to be raised again by whoever waits for this copy later
                carried.error = error
            self._queue.remove(carried)  # or it would fail again in the next caller's program
            raise
        self._copied(carried, indices, copied)

    def _copied(self, carried: _Carried, indices: Sequence[int], arrays: Iterable[jax.Array]) -> None:
        for i, array in zip(indices, arrays, strict=True):
            carried.arrays[i] = array
        carried.missing = [i for i in carried.missing if i not in indices]
        if not carried.missing:
            self._queue.remove(carried)
            if carried.uploaded is not None:
                carried.uploaded(programs.when_ready(carried.arrays))

    def _taken_out(self, slot: Slot | None) -> PyTree | None:
        """The arrays of a slot that nobody is going to copy anything into any more."""
        if slot in self._queue:
            self._queue.remove(slot)
        return _arrays_of(slot)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a step is to take of an upload, as indices of its arrays: copied in front of the step, or along with it."""

    front: Sequence[int]
    along: Sequence[int]


class _Carried:
    """A slot that is filled by the calls of a step: arrays of the slot, and the host arrays that go into them.

    Invariant: an array that is missing is in one of `parts`, the first of which is that of the next step. A part stays
    until its step has been called, also when all of it has gone in front: that step takes nothing.
    """

    def __init__(
        self, host: PyTree, slot: PyTree, parts: Iterable[Part], uploaded: Callable[[jax.Array], None] | None
    ) -> None:
        self.arrays, self.treedef = jax.tree.flatten(slot)
        self.missing = list(range(len(self.arrays)))  # indices of the arrays that are not copied yet
        self.parts = deque(parts)
        self.uploaded = uploaded
        # What is raised when arrays are missing and nobody is going to copy them.
        self.error: Exception = VramjaxError("the upload of this layer was given up before it had ended")
        self._host: list[jax.Array] = jax.tree.leaves(host)

    @property
    def is_begun(self) -> bool:
        return len(self.missing) < len(self.arrays)

    def pick(self, indices: Sequence[int]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Arrays of the slot, and those that go into them."""
        return [self.arrays[i] for i in indices], [self._host[i] for i in indices]


def split(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `sizes` in at most `num_parts` parts of about the same sum: the largest first, to the least part."""
    parts: list[list[int]] = [[] for _ in range(min(num_parts, len(sizes)))]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(parts, key=lambda part: sum(sizes[j] for j in part)).append(i)
    return [sorted(part) for part in parts]


def _is_traced(*arguments: PyTree) -> bool:
    """Whether a call is inside another program, which is run again and again: it can take along no copy of now."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments))


def _arrays_of(slot: Slot | None) -> PyTree | None:
    return jax.tree.unflatten(slot.treedef, slot.arrays) if isinstance(slot, _Carried) else slot
