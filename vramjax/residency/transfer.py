"""Copies from host memory to the device. The only file of the project that does.

Knows how bytes get there, and what becomes of the memory they land in; not which layer they are or why they move.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from vramjax.errors import BudgetError
from vramjax.residency.geometry import Geometry, PyTree, geometry_of
from vramjax.residency.pool import Slot


class Transfer(Protocol):
    """What a controller needs of a device. Copies may be asynchronous, out of order, and may fail."""

    def make_slot(self, geometry: Geometry) -> Slot:
        """A slot of new memory that holds no layer yet."""
        ...

    def upload(self, host: PyTree, slot: Slot | None) -> Slot:
        """Starts to copy a layer into `slot`, or into new memory if None; the slot that it returns holds the layer.

        `slot` is used up: what it was must not be touched again, and nobody may use it still. When this raises,
        `is_alive(slot)` says whether the memory is still there.
        """
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
        """Whether the slot still has its memory."""
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


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _copy_into(slot: PyTree, host: PyTree) -> PyTree:
    """`host` (pinned arrays), on the device, in the memory of `slot`.

    Donation pairs each result with the argument of equal shape and dtype, but only for an argument that survives
    into the compiled program: nothing reads `slot`, so `keep_unused` it must be. One program for each geometry.
    """
    del slot
    with jax.named_scope("upload"):
        return jax.tree.map(lambda array: jax.device_put(array, jax.memory.Space.Device), host)


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

    def upload(self, host: PyTree, slot: Slot | None) -> Slot:
        """Starts to copy a layer of pinned JAX arrays (or of numpy arrays) to the device; see `Transfer`.

        From pageable (numpy) arrays JAX copies into a slot by way of a staging buffer as large as the layer; so where
        layers are not pinned, controllers are made to free slots instead of recycling them.

        Raises:
          BudgetError: the device has no memory left for a new slot.
        """
        with out_of_memory_is_a_budget_error(self.device, _described(geometry_of(host))):
            return self._put(host) if slot is None else _copy_into(slot, host)

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
        return not any(array.is_deleted() for array in jax.tree.leaves(slot))

    def _put(self, host: PyTree) -> Slot:
        if self.device.platform == "cpu":
            # The CPU device adopts an aligned numpy array as its own memory. A copy made for it to adopt keeps the
            # store's arrays out of the slots.
            host = jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, host)
        return jax.device_put(host, self._sharding)


def _described(geometry: Geometry) -> str:
    return f"a layer of {geometry.num_bytes / 1e6:.1f} MB"
