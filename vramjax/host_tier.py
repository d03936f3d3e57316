"""Where layers wait on the host until they are uploaded: which of the ways there are fits, and making it.

Host memory is planned as a whole: what the process has taken already counts, and what is left is for layers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import jax
import numpy as np

from vramjax.checkpoint.packed import head_shapes
from vramjax.config import ModelConfig
from vramjax.errors import BudgetError
from vramjax.layout import LayerLayout
from vramjax.memory import FreeMemory
from vramjax.memory_request import MemoryRequest
from vramjax.residency.budget import DeviceBytes
from vramjax.residency.geometry import Geometry, geometry_of
from vramjax.residency.host_memory import HostArrays, PinningError, host_bytes
from vramjax.residency.host_store import HostStore, LazyStore
from vramjax.residency.mapped_buffers import MIN_BUFFERS, host_buffers
from vramjax.residency.mapped_store import MappedStore
from vramjax.residency.partly_kept import PartlyKeptStore
from vramjax.residency.schedule import Schedule
from vramjax.residency.transfer import DeviceTransfer
from vramjax.units import gib, gib_or_more

OVERHEAD_BYTES = 256 << 20  # what a process that has JAX in it takes beside layers: compiled programs, a tokenizer
_ROUND_BYTES = 64 << 20


class Weights(Protocol):
    """Where layers come from: a packed directory, or weights made on the spot for a benchmark."""

    config: ModelConfig
    groups: dict[str, int]
    layout: LayerLayout

    def load_layer(self, layer_idx: int) -> dict[str, np.ndarray]: ...
    def read_layer_into(
        self, layer_idx: int, arrays: Mapping[str, np.ndarray], *, drop_pages: bool = False
    ) -> None: ...
    def will_need_layer(self, layer_idx: int) -> None: ...
    def load_head(self) -> dict[str, np.ndarray]: ...
    def read_head_into(self, arrays: Mapping[str, np.ndarray]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class HostPlan:
    """Where layers that are streamed wait.

    Example: 36 layers, of which 20 stay on the device, wait "pinned" as 16 layers and 2 buffers for the others, or
    "mapped" in 8 buffers.
    """

    tier: Literal["none", "pinned", "mapped"]  # "none": no layer is streamed
    num_layers: int = 0  # that are kept in pinned memory
    num_buffers: int = 0  # that layers pass through on their way from disk
    num_bytes: int = 0  # of these layers and buffers


def layer_geometry(layout: LayerLayout) -> Geometry:
    """The geometry of a layer's arrays, before there are any."""
    return geometry_of({name: jax.ShapeDtypeStruct(*shape) for name, shape in layout.shapes.items()})


def plan_host(
    schedule: Schedule,
    layout: LayerLayout,
    needed: DeviceBytes,
    request: MemoryRequest,
    free: FreeMemory,
    *,
    drafter_bytes: int = 0,
) -> HostPlan:
    """The tier that was asked for; by default pinned memory if it holds the streamed layers, and the disk if not.

    `drafter_bytes` is what drafts will take of the host's memory at most.

    Raises:
      BudgetError: there is not enough host memory; the message says what would be.
    """
    layer_bytes = host_bytes(layer_geometry(layout))
    others = OVERHEAD_BYTES + drafter_bytes + (needed.total_bytes if free.is_shared else 0)
    budget = request.host_budget_bytes
    room = (sys.maxsize if budget is None else budget - free.process_bytes) // free.num_devices - others
    # The embedding and lm_head come first, and are gone when layers come.
    head = f"the embedding and lm_head, {gib(needed.head_bytes)}"
    if not schedule.releases:
        # Layers that come once are read one after the other, and copied while the one before is on its way.
        if max(2 * layer_bytes, needed.head_bytes) > room:
            what = head if needed.head_bytes > 2 * layer_bytes else f"2 layers of {gib(layer_bytes)} on their way"
            smallest = max(2 * layer_bytes, needed.head_bytes) + others
            raise BudgetError(_too_little(what, smallest, request, free))
        return HostPlan(tier="none")
    room = min(room, free.host_bytes // free.num_devices - others)
    num_kept = schedule.uploads_per_sweep
    num_passing = MIN_BUFFERS if num_kept < schedule.num_layers else 0
    pinned_bytes = max((num_kept + num_passing) * layer_bytes, needed.head_bytes)
    mapped_bytes = max(MIN_BUFFERS * layer_bytes, needed.head_bytes)
    if request.host != "mapped" and pinned_bytes <= room:
        num_bytes = (num_kept + num_passing) * layer_bytes
        return HostPlan(tier="pinned", num_layers=num_kept, num_buffers=num_passing, num_bytes=num_bytes)
    if request.host != "pinned" and mapped_bytes <= room:
        num_buffers = host_buffers(room, layer_bytes)
        return HostPlan(tier="mapped", num_buffers=num_buffers, num_bytes=num_buffers * layer_bytes)
    smallest = pinned_bytes if request.host == "pinned" else mapped_bytes
    if smallest == needed.head_bytes:
        what = head
    elif request.host != "pinned":
        what = f"{MIN_BUFFERS} buffers of {gib(layer_bytes)}, through which layers come from disk"
    else:
        passing = f" and {num_passing} buffers of that size for the others" if num_passing else ""
        what = f"{num_kept} pinned layers of {gib(layer_bytes)}{passing}"
    advice = ", or choose host=mapped, which needs less" if mapped_bytes < smallest else ""
    raise BudgetError(_too_little(what, smallest + others, request, free) + advice)


def _too_little(what: str, needed_bytes: int, request: MemoryRequest, free: FreeMemory) -> str:
    """What is said where a device's part of host memory has no room for `what`, which makes it so many bytes."""
    budget, needed_bytes = request.host_budget_bytes, needed_bytes * free.num_devices
    each = " for each device" if free.num_devices > 1 else ""
    if budget is not None and budget - free.process_bytes < needed_bytes:
        # In round figures: what a process takes differs a little from run to run.
        smallest = -(-(needed_bytes + free.process_bytes) // _ROUND_BYTES) * _ROUND_BYTES
        return (
            f"host_budget is {gib(budget)}, of which the process has taken {gib(free.process_bytes)} already, and has "
            f"no room for {what}{each}; expected at least {gib_or_more(smallest)}: raise it to that"
        )
    return (
        f"{gib(free.host_bytes)} of host memory are free, no room for {what}{each}; expected at least "
        f"{gib_or_more(needed_bytes)}: free some, or take a smaller model"
    )


def upload_head(weights: Weights, transfer: DeviceTransfer) -> dict[str, jax.Array]:
    """The arrays that never leave the device: embedding, final norm and lm_head, which take their bytes of host memory.

    From ordinary memory JAX would copy them once more on the host, into pinned memory that it keeps.
    """
    shapes = head_shapes(weights.config, weights.groups)
    geometry = geometry_of({name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()})
    try:
        host = HostArrays(geometry, transfer.device)
    except PinningError:
        return transfer.upload(weights.load_head(), None)
    with contextlib.closing(host):  # which waits for the copy
        weights.read_head_into(host.views)
        return transfer.upload(host.arrays, None)


def make_store(
    weights: Weights,
    layers: Sequence[int],
    schedule: Schedule,
    plan: HostPlan,
    device: jax.Device,
    advance: Callable[[int], None],
) -> HostStore | PartlyKeptStore | MappedStore | LazyStore:
    """The store that was planned, of some layers of the model: layer i of the store is layer `layers[i]`.

    `advance` is told the bytes of each of `layers_read_first`, once.
    """
    geometries, to_count = (
        [layer_geometry(weights.layout)] * schedule.num_layers,
        set(layers_read_first(schedule, plan)),
    )

    def count(index: int) -> None:
        if index in to_count:  # a layer may be read again: by every sweep, or after one that was broken off
            to_count.remove(index)
            advance(weights.layout.num_bytes)

    if plan.tier == "none":

        def load_layer(index: int) -> dict[str, np.ndarray]:
            layer = weights.load_layer(layers[index])
            count(index)
            return layer

        return LazyStore(load_layer, schedule.num_layers)

    # The system's cache of the files would hold more and more of the model, for nothing, where all of it does not fit.
    drop_pages = plan.tier == "mapped"

    def read_into(index: int, arrays: Mapping[str, np.ndarray]) -> None:
        weights.read_layer_into(layers[index], arrays, drop_pages=drop_pages)
        count(index)

    def will_need(index: int) -> None:
        weights.will_need_layer(layers[index])

    if plan.tier == "mapped":
        return MappedStore(read_into, geometries, device, num_buffers=plan.num_buffers, will_need=will_need)
    if plan.num_layers == schedule.num_layers:
        return HostStore.read(read_into, geometries, device)
    return PartlyKeptStore(read_into, geometries, device, kept=schedule.streamed_layers)


def layers_read_first(schedule: Schedule, plan: HostPlan) -> frozenset[int]:
    """The layers that are read before the first sweep: those that are kept on the host, and those of the warm-up."""
    kept = schedule.streamed_layers if plan.tier == "pinned" else ()
    return frozenset(kept) | {op.layer_idx for op in schedule.warm_up}
