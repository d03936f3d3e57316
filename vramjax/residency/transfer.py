"""Copies from host memory to the device: what a controller asks for, and the plain way to do it.

Knows how bytes get there, and what becomes of the memory they land in; not which layer they are or why they move.

Three ways are known to be fast, and on the link of an H200 (benchmarks/results) they differ in this. Arrays put into
new memory reach its full rate, but a host that runs ahead of the device then takes memory without bound, as memory is
given back only when queued work has run. A program of its own that copies into a donated slot (`DeviceTransfer`) keeps
memory bounded, but waits for the compute before it. A copy into a donated slot inside the program that computes
(`FusedTransfer`, in its own file) does both, and is the default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from vramjax.errors import BudgetError
from vramjax.residency import programs
from vramjax.residency.geometry import Geometry, PyTree, geometry_of
from vramjax.residency.host_memory import wait_for
from vramjax.residency.jit_options import JitOptions
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

    def jit(self, function: Callable[..., Any], options: JitOptions) -> Callable[..., Any]:
        """`jax.jit(function, ...)`, whose calls may take copies along that `upload` was given steps for.

        With `options.spread` a call takes one part of an upload along, for functions that are called once a layer step;
        else all of it.
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

    def forget(self) -> None:
        """Gives up the uploads that calls were still to take along; for after a failure, when nobody needs them."""
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
            slot = self._put(host) if slot is None else programs.copy_into(slot, host)
        if uploaded is not None:
            uploaded(programs.when_ready(slot))
        return slot

    def jit(self, function: Callable[..., Any], options: JitOptions) -> Callable[..., Any]:
        """`jax.jit`: copies are programs of their own here."""
        return programs.jitted(function, options)

    def rehearse(self, geometry: Geometry, steps: Iterable[int], call: Callable[[], Any]) -> None:
        """Nothing: no call of a step takes anything along."""

    def view(self, slot: Slot) -> PyTree:
        """The same arrays in new dicts and lists: what a consumer does to those does not reach the slot."""
        arrays, treedef = jax.tree.flatten(slot)  # once a layer and token: a `map` would take twice the time
        return jax.tree.unflatten(treedef, arrays)

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

    def forget(self) -> None:
        """Nothing: no call was to take anything along."""

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


def _described(geometry: Geometry) -> str:
    return f"a layer of {geometry.num_bytes / 1e6:.1f} MB"
