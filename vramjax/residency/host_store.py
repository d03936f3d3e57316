"""Where layers wait on the host until they are uploaded: in pinned memory, or wherever the caller has them.

Knows layers as pytrees of arrays and checks them; not when they are uploaded, nor how.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from vramjax.errors import ConfigError
from vramjax.residency.geometry import Geometry, PyTree, geometry_of


class Store(Protocol):
    """What a controller needs of the host side."""

    @property
    def num_layers(self) -> int: ...

    @property
    def is_pinned(self) -> bool:
        """Whether layers are in pinned memory, from which JAX can copy into a given slot."""
        ...

    @property
    def reuses_memory(self) -> bool:
        """Whether a layer's host arrays are another layer's after its upload; then `uploaded` must be called."""
        ...

    def expect(self, order: Iterator[int]) -> None:
        """What will be asked for from now on, in this order; it may be endless. What was expected before is not."""
        ...

    def layer(self, layer_idx: int) -> PyTree:
        """The layer's host arrays, ready to be uploaded. Nobody writes to them until they are."""
        ...

    def uploaded(self, layer_idx: int, done: jax.Array) -> None:
        """The copy of the layer that was last handed out is queued, and has ended when `done` is ready."""
        ...

    def geometry(self, layer_idx: int) -> Geometry: ...


class _StoreThatKeeps:
    """Of stores to which the order of uploads means nothing, as each layer has its own memory, or none."""

    reuses_memory = False

    def expect(self, order: Iterator[int]) -> None:
        del order

    def uploaded(self, layer_idx: int, done: jax.Array) -> None:
        del layer_idx, done


class HostStore(_StoreThatKeeps):
    """All layers in the pinned host memory of a device, from where the device reads at the full rate of its link.

    Invariant: `layer(i)` is a private copy; whatever happens to the arrays that it was made from, it stays as it is.
    Layers that cannot be pinned (the limit of pinned memory is reached) are kept in pageable memory: the same bytes,
    uploaded several times slower, and one warning says so.

    Example: `HostStore(load(i) for i in range(28))` holds 28 layers having had one or two beside its own copy at a
    time; `store.layer(3)` is layer 3, `store.geometry(3).num_bytes` its size.
    """

    def __init__(self, layers: Iterable[PyTree], device: jax.Device | None = None) -> None:
        """Copies every layer of `layers`, an iterable which is consumed one layer at a time.

        Args:
          layers: pytrees of numpy or JAX arrays, at least one. 64-bit arrays become 32-bit as everywhere in JAX.
          device: the device that the layers will be uploaded to; None is JAX's first device.

        Raises:
          ConfigError: there are no layers, or a layer has no arrays or a leaf that is no array (its path is named).
        """
        target = device if device is not None else jax.devices()[0]
        self._layers: list[PyTree] = []
        self._geometries: list[Geometry] = []
        self.num_pinned_layers = 0
        refused: Exception | None = None
        for layer in layers:  # not enumerate(): it holds on to the last layer while the next one is being made
            arrays = _host_arrays(layer, len(self._layers), copy=target.platform == "cpu")
            del layer
            if refused is None:
                try:
                    arrays = _pin(arrays, target)
                    self.num_pinned_layers += 1
                except (jax.errors.JaxRuntimeError, ValueError, MemoryError) as error:
                    refused = error
            if refused is not None:
                arrays = jax.tree.map(np.array, arrays)
            self._layers.append(arrays)
            self._geometries.append(geometry_of(arrays))
        if not self._layers:
            raise ConfigError("there are no layers; expected at least one pytree of arrays")
        if refused is not None:
            reason = (str(refused).splitlines() or [type(refused).__name__])[0]
            warnings.warn(
                f"{self.num_layers - self.num_pinned_layers} of {self.num_layers} layers could not be put in pinned "
                f"host memory ({reason}); they are uploaded from pageable memory instead, which is 2 to 10 times "
                f"slower; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB raises the limit of pinned memory on a GPU (64 GiB)",
                stacklevel=2,
            )

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def is_pinned(self) -> bool:
        """Whether every layer is in pinned memory."""
        return self.num_pinned_layers == self.num_layers

    def layer(self, layer_idx: int) -> PyTree:
        """The layer's arrays: JAX arrays in pinned memory, or numpy arrays where that was refused."""
        return self._layers[layer_idx]

    def geometry(self, layer_idx: int) -> Geometry:
        return self._geometries[layer_idx]


class LazyStore(_StoreThatKeeps):
    """Layers that nobody keeps: each is fetched by `load(layer_idx)` when it is uploaded, and forgotten.

    For layers that go to the device once and stay there. Pinned memory would only be paid for and never used again.
    A layer whose upload failed is simply fetched again.

    Example: `LazyStore(packed.load_layer, 28)` reads layer 3 from disk on `layer(3)`, and again on the next one.
    """

    is_pinned = False

    def __init__(self, load: Callable[[int], PyTree], num_layers: int) -> None:
        """Layers 0 ... num_layers - 1 of `load`, which returns pytrees of numpy or JAX arrays.

        Raises:
          ConfigError: `num_layers` is 0.
        """
        if num_layers < 1:
            raise ConfigError("there are no layers; expected at least one pytree of arrays")
        self._load = load
        self._geometries: dict[int, Geometry] = {}
        self.num_layers = num_layers

    def layer(self, layer_idx: int) -> PyTree:
        """The layer's arrays, freshly loaded: numpy arrays that are copies of what `load` returned.

        Raises:
          ConfigError: the layer has no arrays or a leaf that is no array (its path is named).
        """
        arrays = _host_arrays(self._load(layer_idx), layer_idx, copy=True)
        self._geometries[layer_idx] = geometry_of(arrays)
        return arrays

    def geometry(self, layer_idx: int) -> Geometry:
        """The layer's geometry; loads the layer if that has never been done."""
        if layer_idx not in self._geometries:
            self.layer(layer_idx)
        return self._geometries[layer_idx]


def _host_arrays(layer: PyTree, layer_idx: int, *, copy: bool) -> PyTree:
    """The layer with numpy arrays as leaves, of dtypes that JAX keeps: copies, or where not needed maybe views."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(layer)
    if not leaves:
        raise ConfigError(f"layers[{layer_idx}] has no arrays; expected a pytree with at least one")
    arrays = []
    for path, leaf in leaves:
        is_array = isinstance(leaf, np.ndarray | np.generic | jax.Array)
        if not is_array or not any(jnp.issubdtype(leaf.dtype, kind) for kind in (np.number, np.bool_)):
            what = f"an array of {leaf.dtype}" if is_array else f"of type {type(leaf).__name__}"
            raise ConfigError(
                f"layers[{layer_idx}]{jax.tree_util.keystr(path)} is {what}; expected a numpy or JAX array of numbers "
                f"(a class of your own that holds arrays must be a registered pytree)"
            )
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        arrays.append(np.array(leaf, dtype, copy=copy or None, order="C"))
    return jax.tree.unflatten(treedef, arrays)


def _pin(arrays: PyTree, device: jax.Device) -> PyTree:
    """The numpy arrays in the pinned memory of `device`.

    On a GPU this copies. A CPU device adopts an aligned numpy array instead, so there the arrays must be private;
    adopted, they are read and never written, as no slot is ever made of pinned memory.
    """
    pinned = jax.device_put(arrays, SingleDeviceSharding(device, memory_kind="pinned_host"))
    # The copy reads `arrays` asynchronously: until it has ended its source must not change, and stays in memory.
    return jax.block_until_ready(pinned)
