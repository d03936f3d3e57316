"""Where layers wait on the host until they are uploaded: in pinned memory, or wherever the caller has them.

Knows layers as pytrees of arrays and checks them; not when they are uploaded, nor how.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np

from vramjax.errors import ConfigError
from vramjax.residency.geometry import Geometry, PyTree, geometry_of
from vramjax.residency.host_memory import HostArrays, PinningError
from vramjax.residency.parallel import call_each


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

    def close(self) -> None:
        """Gives back what memory there is."""


class HostStore(_StoreThatKeeps):
    """All layers in the pinned host memory of a device, from where the device reads at the full rate of its link.

    Invariant: `layer(i)` is a private copy; whatever happens to the arrays that it was made from, it stays as it is.
    Host memory is that of the layers, and of the one or few that are being filled nothing more. Layers that cannot be
    pinned are kept in pageable memory: the same bytes, uploaded several times slower, and one warning says so.

    Example: `HostStore(load(i) for i in range(28))` holds 28 layers having had one or two beside its own copy at a
    time; `store.layer(3)` is layer 3, `store.geometry(3).num_bytes` its size. `HostStore.read(packed.read_layer_into,
    28 * [geometry])` does the same at the rate of the disk, with nothing beside its own copy.
    """

    def __init__(self, layers: Iterable[PyTree], device: jax.Device | None = None) -> None:
        """Copies every layer of `layers`, an iterable which is consumed one layer at a time.

        Args:
          layers: pytrees of numpy or JAX arrays, at least one. 64-bit arrays become 32-bit as everywhere in JAX.
          device: the device that the layers will be uploaded to; None is JAX's first device.

        Raises:
          ConfigError: there are no layers, or a layer has no arrays or a leaf that is no array (its path is named).
          BudgetError: there is no host memory for them.
        """
        with self._filling(device):
            for layer in layers:  # not enumerate(): it holds on to the last layer while the next one is being made
                arrays = _host_arrays(layer, self.num_layers, copy=False)
                del layer
                jax.tree.map(np.copyto, self._views_for(self.num_layers, geometry_of(arrays)), arrays)
                del arrays
            self._check_and_warn()

    @classmethod
    def read(
        cls,
        read_into: Callable[[int, PyTree], None],
        geometries: Sequence[Geometry],
        device: jax.Device | None = None,
        *,
        num_threads: int = 8,
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """A store whose layers are read straight into their memory, by several threads.

        Args:
          read_into: `read_into(layer_idx, views)` fills the numpy arrays of a layer; from any thread, once a layer.
          geometries: of every layer, at least one.
          device: the device that the layers will be uploaded to; None is JAX's first device.
          num_threads: layers that are read at the same time, at most.
          progress: told the bytes of each layer that has been read.

        Raises:
          ConfigError: there are no layers.
          BudgetError: there is no host memory for them.
          Exception: whatever `read_into` raised first; layers that were not begun are then not read.
        """
        store = cls.__new__(cls)

        def read(layer_idx: int) -> None:
            read_into(layer_idx, store._views_for(layer_idx, geometries[layer_idx]))

        def count(layer_idx: int) -> None:
            if progress is not None:
                progress(geometries[layer_idx].num_bytes)

        with store._filling(device):
            call_each(read, len(geometries), num_threads=num_threads, name="vramjax-read", done=count)
            store._check_and_warn()
        return store

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_pinned_layers(self) -> int:
        return sum(not isinstance(memory, PageableArrays) for memory in self._layers.values())

    @property
    def is_pinned(self) -> bool:
        """Whether every layer is in pinned memory."""
        return self.num_pinned_layers == self.num_layers

    def layer(self, layer_idx: int) -> PyTree:
        """The layer's arrays: JAX arrays in pinned memory, or numpy arrays where that was refused."""
        return self._layers[layer_idx].arrays

    def geometry(self, layer_idx: int) -> Geometry:
        return self._layers[layer_idx].geometry

    def close(self) -> None:
        """Waits for uploads under way and gives the memory back; there are no layers afterwards."""
        while self._layers:
            self._layers.popitem()[1].close()

    @contextlib.contextmanager
    def _filling(self, device: jax.Device | None) -> Iterator[None]:
        """Whoever keeps the error that filling the store ended with, such as a notebook, does not keep its memory."""
        self._device = device if device is not None else jax.devices()[0]
        self._layers: dict[int, HostArrays | PageableArrays] = {}
        self._refused: str | None = None  # why memory could not be pinned
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _views_for(self, layer_idx: int, geometry: Geometry) -> PyTree:
        """The layer's memory, to be written: pinned, unless that was ever refused. Any thread may call it."""
        self._layers[layer_idx] = memory = self._memory(geometry)
        return memory.views

    def _memory(self, geometry: Geometry) -> HostArrays | PageableArrays:
        if self._refused is None:
            try:
                return HostArrays(geometry, self._device)
            except PinningError as error:
                self._refused = str(error)
        return PageableArrays(geometry)

    def _check_and_warn(self) -> None:
        if not self._layers:
            raise ConfigError("there are no layers; expected at least one pytree of arrays")
        if self._refused is not None:
            warn_not_pinned(f"{self.num_layers - self.num_pinned_layers} of {self.num_layers} layers", self._refused)


class PageableArrays:
    """The arrays of a layer in ordinary host memory, for where it cannot be pinned; the interface of `HostArrays`."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        views = [np.empty(shape, dtype) for shape, dtype in geometry.arrays]
        self.views: PyTree = jax.tree.unflatten(geometry.treedef, views)
        self.arrays: PyTree = self.views

    @property
    def num_bytes(self) -> int:
        return self.geometry.num_bytes

    def close(self) -> None:
        """Nothing: memory goes with the last reference, also JAX's."""


def warn_not_pinned(what: str, reason: str) -> None:
    """One warning for the caller's caller's caller: the user of a store."""
    warnings.warn(
        f"{what} could not be put in pinned host memory ({reason}); they are uploaded from pageable memory instead, "
        "which is 2 to 10 times slower: see what limits locked memory here (`ulimit -l`, the container)",
        stacklevel=4,
    )


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
