"""`stream`: the whole of `vramjax.residency` for a list of pytrees, in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import jax

from vramjax.errors import ConfigError
from vramjax.residency.controller import Controller, ReleaseMode
from vramjax.residency.geometry import PyTree
from vramjax.residency.host_store import HostStore, LazyStore, Store
from vramjax.residency.policy import window
from vramjax.residency.transfer import DeviceTransfer

PolicyName = Literal["past", "both_sides", "pinned_ring"]


def stream(
    layers: Iterable[PyTree],
    *,
    keep: int | None = None,
    policy: PolicyName = "past",
    release: ReleaseMode = "pool",
    warm: bool = False,
    device: jax.Device | None = None,
) -> Controller:
    """A controller whose `sweep()` brings the layers to the device one after the other, `keep` of them staying.

    Example::

        with residency.stream(layers, keep=2) as controller:  # layers: a list of dicts of arrays
            for layer_idx, weights in controller.sweep():
                x = layer_step(weights, x)

    Args:
      layers: pytrees of numpy or JAX arrays, of one geometry or of several. They are copied to pinned host memory
        one at a time, so a generator may make them as they are needed. Where everything becomes resident they are
        not copied on the host; a list is then read layer by layer, and a generator is made a list.
      keep: layers that stay behind the current one (the "past" policy holds up to twice as many at its peak, see
        `vramjax.residency.policy`). None, or as many as there are layers: every layer is uploaded once and stays.
      policy: "past"; "pinned_ring", which holds exactly `keep` layers and uploads least; or "both_sides", a worse one
        for comparison.
      release: "pool" recycles the memory of layers that leave; "free" frees it, a slower one for comparison, and what
        is done where layers cannot be pinned: JAX copies into given memory only from pinned arrays.
      warm: upload what a sweep begins with now, and not in the first sweep.
      device: where the layers go; None is JAX's first device.

    Raises:
      ConfigError: an argument has a value that cannot be used, or a layer is no pytree of arrays.
      BudgetError: the device has no memory left for a new layer (also from the sweep).
    """
    if not isinstance(layers, Iterable):
        raise ConfigError(
            f"layers is of type {type(layers).__name__}; expected a list or an iterator of pytrees of arrays"
        )
    transfer = DeviceTransfer(device)
    window(1, keep, policy)  # what cannot be used is refused before any layer is copied
    if isinstance(layers, Sequence) and (keep is None or keep >= len(layers)):
        store: Store = LazyStore(layers.__getitem__, len(layers))
    elif keep is None:
        collected = list(layers)
        store = LazyStore(collected.__getitem__, len(collected))
    else:
        store = HostStore(layers, transfer.device)
        release = release if store.is_pinned else "free"
    schedule = window(store.num_layers, keep, policy, warm=warm)
    controller = Controller(store, schedule, transfer, release=release)
    if warm:
        try:
            controller.warm_up()
        except BaseException:
            controller.close()
            raise
    return controller
