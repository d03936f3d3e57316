"""`stream`: the whole of `vramjax.residency` for a list of layers of any framework, in one call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax

from vramjax.errors import BudgetError, ConfigError
from vramjax.memory import free_device_bytes
from vramjax.residency.budget import AUTO_RESERVE_BYTES
from vramjax.residency.byte_policy import window_within
from vramjax.residency.controller import Controller, ReleaseMode
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.geometry import PyTree
from vramjax.residency.host_store import HostStore, LazyStore
from vramjax.residency.policy import resident, window
from vramjax.residency.schedule import Schedule
from vramjax.residency.shell import Shell, call_around, take_apart, take_layer_apart
from vramjax.units import gib, parse_bytes

PolicyName = Literal["past", "both_sides", "pinned_ring"]


class LayerStream(Controller):
    """A controller whose layers come back as what they were: dicts, Flax NNX modules, Equinox modules.

    Invariant: a layer of `sweep()` is the layer that was given to `stream`, but that its arrays are on the device. What
    a step changes in it is gone with it.

    Example, layers that are modules::

        with stream(modules, device_budget="6GiB") as layers:
            step = layers.jit(lambda module, x: module(x))
            for _, module in layers.sweep():
                x = step(module, x)
    """

    def __init__(
        self,
        store: HostStore | LazyStore,
        shells: Mapping[int, Shell],
        schedule: Schedule,
        device: jax.Device,
        release: ReleaseMode,
    ) -> None:
        """A stream of the lists of arrays in `store`, each of which `shells` has the rest of once it was fetched.

        The store is this stream's own: it is closed with it.
        """
        super().__init__(store, schedule, FusedTransfer(device), release=release)
        self._shells = shells
        self._close_store = store.close

    def filter_jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`jit` for arguments that hold more than arrays: whatever is none, such as an activation function, is static.

        So a step can be given the modules of Equinox, or be a method of one, as with `equinox.filter_jit`. What is
        static must be hashable; a number that is no array is static too, and another number is another program. The
        step returns arrays.
        """
        step = self.jit(call_around, static_argnames=("shell",))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            arrays, shell = take_apart((function, args, kwargs))
            return step(arrays, shell=shell)

        return call

    def close(self) -> None:
        """Gives all memory back, on the device and on the host; see `Controller.close`."""
        try:
            super().close()
        finally:
            self._close_store()

    def _use(self, layer_idx: int) -> Any:
        """The layer as it was given to `stream`, with its arrays on the device."""
        return self._shells[layer_idx].around(super()._use(layer_idx))


def stream(
    layers: Iterable[PyTree],
    *,
    device_budget: int | str | None = None,
    keep: int | None = None,
    policy: PolicyName = "pinned_ring",
    release: ReleaseMode = "pool",
    warm_up: bool = False,
    device: jax.Device | None = None,
) -> LayerStream:
    """Layers that do not fit on the device together: `sweep()` brings them there one after the other.

    Example::

        with vramjax.stream(layers, device_budget="6GiB") as layers_on_device:  # layers: a list of dicts of arrays
            step = layers_on_device.jit(layer_step)
            for layer_idx, weights in layers_on_device.sweep():
                x = step(weights, x)

    A layer is any pytree: containers of arrays, a Flax NNX module or its state, an Equinox module. Its arrays are
    streamed; what else is in it (functions, numbers, random keys) is handed out as it is. Any function may compute with
    the layers; one that was made by `jit` or `filter_jit` of the result computes while uploads go on beside it.

    Args:
      layers: the layers, of one kind or of several (those of one kind have the same shapes and dtypes). They are
        copied to pinned host memory one at a time, so a generator may make them as they are needed; JAX arrays that
        are on the device already stay there for as long as somebody has them. Where everything becomes resident
        nothing is copied on the host: a list is then read layer by layer, and a generator, if there is no budget, is
        made a list.
      device_budget: bytes that the layers may take on the device at the peak, those in transit included: a number, a
        text such as "6GiB" or "500MB", or "auto": what is free now, less 512 MiB in reserve. Everything else that you
        have on the device is not counted. With neither this nor `keep` every layer is uploaded once and stays.
      keep: instead of a budget, layers on the device (the "past" policy holds up to twice as many at its peak). Of
        several kinds, each gets the memory of the most of its layers that are there at once: better give a budget.
      policy: "pinned_ring", which uploads least; "past", or "both_sides", for comparison. See
        `vramjax.residency.policy`.
      release: "pool" recycles the memory of layers that leave; "free" frees it, a slower one for comparison, and what
        is done where layers cannot be pinned.
      warm_up: upload what a sweep begins with now, and not in the first sweep.
      device: where the layers go; None is JAX's first device.

    Raises:
      ConfigError: an argument has a value that cannot be used, or a layer is no pytree of arrays.
      BudgetError: the budget has no room for one layer of each kind (the smallest that has is named), or the device has
        no memory left for a new layer (also from the sweep).
    """
    if isinstance(layers, Mapping) or not isinstance(layers, Iterable):
        raise ConfigError(
            f"layers is of type {type(layers).__name__}; expected a list or an iterator of pytrees of arrays"
        )
    if keep is not None and device_budget is not None:
        raise ConfigError(f"keep is {keep!r} and device_budget is {device_budget!r}; expected one of the two")
    window(1, keep, policy)  # what cannot be used is refused before any layer is copied
    if not isinstance(device, jax.Device | None):
        raise ConfigError(f"device is {device!r}; expected one of jax.devices(), or None for the first")
    target = device if device is not None else jax.devices()[0]
    is_auto = device_budget == "auto"
    name = "device_budget"
    if is_auto:
        name += f" 'auto' (what is free on {target}, less {gib(AUTO_RESERVE_BYTES)} in reserve)"
        budget = max(0, free_device_bytes(target) - AUTO_RESERVE_BYTES)
    else:
        budget = None if device_budget is None else parse_bytes(device_budget, name=name)
    apart = _TakenApart()
    if keep is None and budget is None and not isinstance(layers, Sequence):
        layers = list(layers)
    if isinstance(layers, Sequence) and _fits(layers, keep, budget):
        store = LazyStore(lambda layer_idx: apart.arrays_of(layers[layer_idx], layer_idx), len(layers))
    else:
        store = HostStore(apart.each(layers), target)
    with contextlib.ExitStack() as if_it_fails:
        if_it_fails.callback(store.close)
        try:
            schedule = _schedule(store, keep, budget, name, policy, warm_up)
        except BudgetError as error:
            raise BudgetError(f"{error}: {'free some' if is_auto else 'raise it to that'}") from None
        controller = if_it_fails.enter_context(LayerStream(store, apart.shells, schedule, target, release))
        if warm_up:
            controller.warm_up()
        if_it_fails.pop_all()
    return controller


class _TakenApart:
    """Fetches layers for a store: their arrays go there, what else they are made of stays in `shells`."""

    def __init__(self) -> None:
        self.shells: dict[int, Shell] = {}

    def arrays_of(self, layer: PyTree, layer_idx: int) -> list[Any]:
        arrays, self.shells[layer_idx] = take_layer_apart(layer, layer_idx)
        return arrays

    def each(self, layers: Iterable[PyTree]) -> Iterator[list[Any]]:
        """The arrays of one layer after the other; nothing is held while the next one is made."""
        for layer in layers:
            arrays = self.arrays_of(layer, len(self.shells))
            del layer
            yield arrays
            del arrays


def _fits(layers: Sequence[PyTree], keep: int | None, budget: int | None) -> bool:
    """Whether all layers can be on the device together."""
    if budget is None:
        return keep is None or keep >= len(layers)
    num_bytes = 0
    for layer_idx, layer in enumerate(layers):
        arrays, _ = take_layer_apart(layer, layer_idx)
        num_bytes += sum(array.size * jax.dtypes.canonicalize_dtype(array.dtype).itemsize for array in arrays)
    return num_bytes <= budget


def _schedule(
    store: HostStore | LazyStore, keep: int | None, budget: int | None, name: str, policy: PolicyName, warm_up: bool
) -> Schedule:
    if isinstance(store, LazyStore):
        return resident(store.num_layers, warm=warm_up)
    if budget is None:
        return window(store.num_layers, keep, policy, warm=warm_up)
    kinds = [store.geometry(layer_idx) for layer_idx in range(store.num_layers)]
    layer_bytes = [geometry.num_bytes for geometry in kinds]
    return window_within(layer_bytes, budget, policy, kinds=kinds, warm=warm_up, name=name)
