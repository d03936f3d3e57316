"""Copies from host memory to the device. The only file of the project that does.

Knows how bytes get there, and what becomes of the memory they land in; not which layer they are or why they move.

Three ways are known to be fast, and on the link of an H200 (benchmarks/results) they differ in this. Arrays put into
new memory reach its full rate, but a host that runs ahead of the device then takes memory without bound, as memory is
given back only when queued work has run. A program of its own that copies into a donated slot (`DeviceTransfer`) keeps
memory bounded, but waits for the compute before it. A copy into a donated slot inside the program that computes
(`FusedTransfer`) does both, and is the default.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import SingleDeviceSharding

from vramjax.errors import BudgetError, ConfigError
from vramjax.residency.geometry import Geometry, PyTree, geometry_of
from vramjax.residency.host_memory import HostArrays, PinningError, wait_for
from vramjax.residency.pool import Slot


class Transfer(Protocol):
    """What a controller needs of a device. Copies may be asynchronous, out of order, and may fail."""

    def make_slot(self, geometry: Geometry) -> Slot:
        """A slot of new memory that holds no layer yet."""
        ...

    def upload(
        self, host: PyTree, slot: Slot | None, *, steps: int = 0, uploaded: Callable[[Any], None] | None = None
    ) -> Slot:
        """Starts to copy a layer into `slot`, or into new memory if None; the slot that it returns holds the layer.

        `slot` is used up: what it was must not be touched again, and nobody may use it still. When this raises,
        `is_alive(slot)` says whether the memory is still there.

        Args:
          host: the layer's host arrays.
          slot: memory of the same geometry, or None.
          steps: layer steps that will be computed before the next upload starts, and before this layer is used: a
            transfer may spread the copy over them. 0: the copy starts now.
          uploaded: called once, when every part of the copy is queued, with something whose `block_until_ready()`
            returns when the host arrays have been read and may change.
        """
        ...

    def jit(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        spread: bool = True,
    ) -> Callable[..., Any]:
        """`jax.jit(function, ...)`, whose calls may take copies along that `upload` was given steps for.

        With `spread` a call takes one part of an upload along, for functions that are called once a layer step; else
        all of it. Static arguments must be given by name.
        """
        ...

    def rehearse(self, geometry: Geometry, steps: Iterable[int], call: Callable[[], Any]) -> None:
        """Compiles what `call`, which calls a function of `jit` once, will need for uploads of these steps."""
        ...

    def view(self, slot: Slot) -> PyTree:
        """The slot's arrays for a consumer, in containers that are the consumer's own."""
        ...

    def wait(self, slot: Slot) -> None:
        """Returns when it is safe to use the slot, or raises what its copy failed with."""
        ...

    def free(self, slot: Slot) -> None:
        """Gives the slot's memory back for good."""
        ...

    def is_alive(self, slot: Slot) -> bool:
        """Whether the slot still has its memory, for another upload. Asked only after a failure, so it may wait."""
        ...


@contextlib.contextmanager
def out_of_memory_is_a_budget_error(device: jax.Device, what: str) -> Iterator[None]:
    """JAX's error for a device without memory becomes a BudgetError that names `what` there was no room for."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise BudgetError(
            f"{device} has no memory left for {what}; keep fewer layers on the device or free what else is on it"
        ) from error


def _on_device(host: PyTree) -> PyTree:
    """Inside a jit: pinned arrays, copied to the device."""
    with jax.named_scope("upload"):
        return jax.tree.map(lambda array: jax.device_put(array, jax.memory.Space.Device), host)


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _copy_into(slot: PyTree, host: PyTree) -> PyTree:
    """`host` (pinned arrays), on the device, in the memory of `slot`.

    Donation pairs each result with the argument of equal shape and dtype, but only for an argument that survives
    into the compiled program: nothing reads `slot`, so `keep_unused` it must be. One program for each geometry.
    """
    del slot
    return _on_device(host)


@functools.partial(jax.jit, keep_unused=True)
def _when_ready(arrays: PyTree) -> jax.Array:
    """A scalar that is ready when all of `arrays` are; they may be donated or deleted in the meantime."""
    del arrays
    return jnp.zeros((), jnp.bool)


JitOptions = tuple[tuple[str, ...], tuple[int, ...]]  # static_argnames, donate_argnums


def _jit_options(static_argnames: str | Sequence[str], donate_argnums: int | Sequence[int]) -> JitOptions:
    """Both as tuples: one name, or one position, may stand for itself, as for `jax.jit`."""
    names = (static_argnames,) if isinstance(static_argnames, str) else tuple(static_argnames)
    positions = (donate_argnums,) if isinstance(donate_argnums, int) else tuple(donate_argnums)
    if any(position < 0 for position in positions):
        raise ConfigError(f"donate_argnums is {donate_argnums}; expected positions counted from the first argument, 0")
    return names, positions


def _jitted(function: Callable[..., Any], static_argnames: tuple[str, ...], donate_argnums: tuple[int, ...]):
    return jax.jit(function, static_argnames=static_argnames, donate_argnums=donate_argnums)


_CARRYING: weakref.WeakKeyDictionary[Callable[..., Any], dict[JitOptions, Any]] = weakref.WeakKeyDictionary()


def _carrying(function: Callable[..., Any], static_argnames: tuple[str, ...], donate_argnums: tuple[int, ...]):
    """`function` and a copy of `hosts` into the memory of `slots`, as one program: XLA runs the two at once.

    The same for all who ask for the same, as JAX compiles for each function object anew; but it keeps neither the
    function nor what that refers to alive: whoever calls it does.
    """
    programs, get_function = _CARRYING.setdefault(function, {}), weakref.ref(function)

    def carrying(slots: list[jax.Array], hosts: list[jax.Array], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        del slots
        function = get_function()
        assert function is not None  # its caller refers to it
        return _on_device(hosts), function(*args, **kwargs)

    options = static_argnames, donate_argnums
    if options not in programs:
        programs[options] = jax.jit(
            carrying,
            static_argnames=static_argnames,
            donate_argnums=(0, *(argnum + 2 for argnum in donate_argnums)),
            keep_unused=True,  # see `_copy_into`
        )
    return programs[options]


class DeviceTransfer:
    """Uploads to one JAX device. Slots are pytrees of arrays in the device's memory; nothing here blocks.

    Invariant: the memory of a slot belongs to it alone, never to a host array or another slot, and an upload of
    pinned arrays into a slot keeps its addresses.

    Why a slot may be reused while the device still computes with what it held: the layer step that reads it was
    dispatched before the upload that overwrites it. XLA runs programs that share a donated buffer in the order of
    dispatch (one compute stream on a GPU, events on the buffer on a CPU), so the copy begins when the last reader
    has ended, although the host has long gone on. The same holds for `free`: the allocator gets the memory back
    when the last dispatched reader is done. And whoever kept a reference to the old arrays gets an error from JAX
    (the array was deleted), never another layer's weights.

    Example: `a = t.upload(layer_0, None)` makes device arrays; `b = t.upload(layer_1, a)` puts layer 1 where layer 0
    was; `a`'s arrays are deleted, `b`'s have their addresses; `t.free(b)` ends it.
    """

    def __init__(self, device: jax.Device | None = None) -> None:
        """Uploads to `device`, or to JAX's first device if None."""
        self.device = device if device is not None else jax.devices()[0]
        self._sharding = SingleDeviceSharding(self.device, memory_kind="device")

    def make_slot(self, geometry: Geometry) -> Slot:
        """Device arrays of zeros, of the geometry's shapes.

        Raises:
          BudgetError: the device has no memory left for it.
        """
        with out_of_memory_is_a_budget_error(self.device, _described(geometry)):
            arrays = [jnp.zeros(shape, dtype, device=self._sharding) for shape, dtype in geometry.arrays]
            # Memory that is not there must be missed now: JAX would only say so when the arrays are used.
            return jax.tree.unflatten(geometry.treedef, jax.block_until_ready(arrays))

    def upload(
        self, host: PyTree, slot: Slot | None, *, steps: int = 0, uploaded: Callable[[jax.Array], None] | None = None
    ) -> Slot:
        """Starts to copy a layer of pinned JAX arrays (or of numpy arrays) to the device, now; see `Transfer`.

        From pageable (numpy) arrays JAX copies into a slot by way of a staging buffer as large as the layer; so where
        layers are not pinned, controllers free slots instead of recycling them.

        Raises:
          BudgetError: the device has no memory left for a new slot.
        """
        del steps
        with out_of_memory_is_a_budget_error(self.device, _described(geometry_of(host))):
            slot = self._put(host) if slot is None else _copy_into(slot, host)
        if uploaded is not None:
            uploaded(_when_ready(slot))
        return slot

    def jit(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        spread: bool = True,
    ) -> Callable[..., Any]:
        """`jax.jit`: copies are programs of their own here."""
        del spread
        return _jitted(function, *_jit_options(static_argnames, donate_argnums))

    def rehearse(self, geometry: Geometry, steps: Iterable[int], call: Callable[[], Any]) -> None:
        """Nothing: no call of a step takes anything along."""

    def view(self, slot: Slot) -> PyTree:
        """The same arrays in new dicts and lists: what a consumer does to those does not reach the slot."""
        return jax.tree.map(lambda array: array, slot)

    def wait(self, slot: Slot) -> None:
        """Does nothing: a program that is given the slot's arrays starts when they have arrived."""

    def free(self, slot: Slot) -> None:
        """Deletes the slot's arrays.

        That is cheap under JAX's default allocator, which holds on to the memory and gives it to the next array. It
        is a real `cudaFree`, and waits for the device, only with XLA_PYTHON_CLIENT_ALLOCATOR=platform.
        """
        for array in jax.tree.leaves(slot):
            array.delete()  # a second delete is no error

    def is_alive(self, slot: Slot) -> bool:
        """Whether the slot still has its memory, and nothing that was to write to it has failed; waits for that."""
        arrays = jax.tree.leaves(slot)
        if any(array.is_deleted() for array in arrays):
            return False
        try:
            jax.block_until_ready(arrays)
        except jax.errors.JaxRuntimeError:
            return False
        return True

    def _put(self, host: PyTree) -> Slot:
        if self.device.platform == "cpu":
            # The CPU device adopts an aligned numpy array as its own memory. A copy made for it to adopt keeps the
            # store's arrays out of the slots.
            host = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, host)
        elif any(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(host)):
            # Memory that was freed comes back when queued work has run. Where layers are not pinned every upload takes
            # new memory, and a host that ran ahead would take more and more of it.
            wait_for(self.device)
        return jax.device_put(host, self._sharding)


_MAX_PARTS = 4  # of an upload; a step is compiled once more for each that differs


class FusedTransfer(DeviceTransfer):
    """Uploads that travel inside the programs of a layer step, so that the link is busy while the device computes.

    An upload with `steps` waits in a queue, and the next calls of a function from `jit` take it along: its arrays are
    divided into as many parts of about equal size as there are steps, 4 at most (an array is never divided), and each
    call copies one part into the donated slot while it computes. Whoever needs the layer sooner gets it: `view` queues
    what is still missing as a program of its own, as `DeviceTransfer` does from the start.

    Invariant: a slot that `upload` returned is in the queue exactly as long as parts of it are not copied yet;
    `free`, and its being used up by another upload, take it out. Otherwise all that `DeviceTransfer` says holds.

    Example, layers of two arrays of 100 and 60 MB, every other layer streamed: `slot = t.upload(layer_4, slot,
    steps=2)` queues the parts (100 MB) and (60 MB). With `step = t.jit(layer_step)`, `step(weights_1, x)` takes the
    first along and `step(weights_2, x)` the second; `t.view(slot)` is layer 4.
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
        carried = _Carried(host, slot, steps, uploaded)
        self._queue.append(carried)
        return carried

    def jit(
        self,
        function: Callable[..., Any],
        *,
        static_argnames: str | Sequence[str] = (),
        donate_argnums: int | Sequence[int] = (),
        spread: bool = True,
    ) -> Callable[..., Any]:
        options = _jit_options(static_argnames, donate_argnums)
        plain, carrying = _jitted(function, *options), _carrying(function, *options)

        def call(*args: Any, **kwargs: Any) -> Any:
            if not spread and self._queue and self._queue[0].is_begun:
                self._finish(self._queue[0])  # what is left of it would be one more program to compile
            if not self._queue or _is_traced(args, kwargs):
                return plain(*args, **kwargs)
            carried = self._queue[0]
            part = carried.parts[0] if spread else range(len(carried.arrays))
            copied, result = carrying(
                [carried.arrays[i] for i in part], [carried.host[i] for i in part], *args, **kwargs
            )
            self._copied(carried, part, copied)
            return result

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
            self._finish(slot)
        elif isinstance(slot, _Carried) and slot.error is not None:
            raise slot.error

    def free(self, slot: Slot) -> None:
        super().free(self._taken_out(slot))

    def is_alive(self, slot: Slot) -> bool:
        return super().is_alive(_arrays_of(slot))

    def _finish(self, carried: _Carried) -> None:
        """Copies all that is left, in a program of its own."""
        part = [i for part in carried.parts for i in part]
        try:
            copied = _copy_into([carried.arrays[i] for i in part], [carried.host[i] for i in part])
        except BaseException as error:
            self._queue.remove(carried)  # or it would fail again in the next caller's program
            carried.error = error
            raise
        self._copied(carried, part, copied)

    def _copied(self, carried: _Carried, part: Iterable[int], arrays: Iterable[jax.Array]) -> None:
        for i, array in zip(part, arrays, strict=True):
            carried.arrays[i] = array
        done = set(part)
        carried.parts = [rest for rest in carried.parts if not done.issuperset(rest)]
        if not carried.parts:
            self._queue.remove(carried)
            if carried.uploaded is not None:
                carried.uploaded(_when_ready(carried.arrays))

    def _taken_out(self, slot: Slot | None) -> PyTree | None:
        """The arrays of a slot that nobody is going to copy anything into any more."""
        if slot in self._queue:
            self._queue.remove(slot)
        return _arrays_of(slot)


class _Carried:
    """A slot that is filled by the calls of a step: arrays of the slot, and the host arrays that go into them."""

    def __init__(self, host: PyTree, slot: PyTree, steps: int, uploaded: Callable[[jax.Array], None] | None) -> None:
        self.arrays, self.treedef = jax.tree.flatten(slot)
        self.host = jax.tree.leaves(host)
        sizes = [array.nbytes for array in self.host]
        self.parts = _split(sizes, min(steps, _MAX_PARTS))  # indices of the arrays that are not copied yet
        self.uploaded = uploaded
        self.error: BaseException | None = None  # what the copy failed with

    @property
    def is_begun(self) -> bool:
        return sum(map(len, self.parts)) < len(self.arrays)


def _is_traced(*arguments: PyTree) -> bool:
    """Whether a call is inside another program, which is run again and again: it can take along no copy of now."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(arguments))


def _arrays_of(slot: Slot | None) -> PyTree | None:
    return jax.tree.unflatten(slot.treedef, slot.arrays) if isinstance(slot, _Carried) else slot


def _split(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices of `sizes` in at most `num_parts` parts of about the same sum: the largest first, to the least part."""
    parts: list[list[int]] = [[] for _ in range(min(num_parts, len(sizes)))]
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        min(parts, key=lambda part: sum(sizes[j] for j in part)).append(i)
    return [sorted(part) for part in parts]


def _described(geometry: Geometry) -> str:
    return f"a layer of {geometry.num_bytes / 1e6:.1f} MB"
