"""What a run will keep on the device, stream and keep on the host, decided before any weight is read.

Knows the model's shapes, what was asked for and how much memory there is; touches neither files nor devices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels import default_backend
from vramjax.config import ModelConfig
from vramjax.decode.engine import EngineSpec
from vramjax.errors import BudgetError, ConfigError
from vramjax.layout import LayerLayout
from vramjax.memory_request import MemoryRequest
from vramjax.model.kv_cache import cache_bytes
from vramjax.residency.budget import AUTO_RESERVE_BYTES, DeviceBytes, largest_context, largest_keep
from vramjax.residency.policy import Schedule, window
from vramjax.units import gib, gib_or_more

DEFAULT_CONTEXT = 4096


@dataclass(frozen=True, kw_only=True)
class FreeMemory:
    """What there is, in bytes. On a CPU the two are the same memory."""

    device_bytes: int
    host_bytes: int
    is_shared: bool


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What is on the device and when, and what that takes.

    Invariant: `device.total_bytes` is at most `device_budget`, if there is one, and at most what was free.
    """

    schedule: Schedule
    device: DeviceBytes
    device_budget: int | None  # bytes; None: layers were asked for
    is_auto: bool  # the budget is what was free
    host_bytes: int  # of layers that wait on the host; 0 if none is streamed
    notes: tuple[str, ...] = ()  # what a user should know who left it to us

    @property
    def num_streamed(self) -> int:
        """Layers that a sweep uploads. The others stay on the device for good."""
        return self.schedule.uploads_per_sweep

    @property
    def num_pinned(self) -> int:
        return self.schedule.num_layers - self.num_streamed


def engine_spec(
    config: ModelConfig, groups: Mapping[str, int], *, context: int | None, device: jax.Device
) -> EngineSpec:
    """The programs that `device` will run. A CPU decodes in float32 and in smaller tiles: it computes unused rows too.

    Raises:
      ConfigError: the context is not positive or beyond the model's maximum.
    """
    if context is None:
        context = min(DEFAULT_CONTEXT, config.max_positions)
    is_whole = isinstance(context, int | np.integer) and not isinstance(context, bool)
    if not is_whole or not 0 < context <= config.max_positions:
        raise ConfigError(f"context is {context!r}; expected 1 .. {config.max_positions}, the model's maximum")
    on_cpu = device.platform == "cpu"
    return EngineSpec(
        config=config,
        layout=LayerLayout.of(config, groups),
        groups=tuple(sorted(groups.items())),
        backend=default_backend(device),
        kv_dtype=np.dtype(np.float32) if on_cpu else jax.numpy.dtype("bfloat16"),
        context=context,
        tile_rows=8 if on_cpu else 16,
        chunk_rows=128 if on_cpu else 256,
    )


def device_bytes(spec: EngineSpec, schedule: Schedule, head_bytes: int) -> DeviceBytes:
    """What a run takes on the device at its peak."""
    return DeviceBytes(
        layer_bytes=spec.layout.num_bytes,
        peak_layers=schedule.peak_resident_layers,
        head_bytes=head_bytes,
        kv_bytes=cache_bytes(spec.config, 1, spec.context, spec.kv_dtype),
        workspace_bytes=spec.workspace_bytes,
    )


def plan_memory(spec: EngineSpec, head_bytes: int, request: MemoryRequest, free: FreeMemory) -> MemoryPlan:
    """The plan for what was asked: in layers as it stands, in bytes as many layers as fit.

    Raises:
      ConfigError: `keep` or `policy` is none.
      BudgetError: it does not fit; the message says what would.
    """
    num_layers = spec.config.num_layers
    keep, budget = request.keep, request.device_bytes(free.device_bytes, AUTO_RESERVE_BYTES)
    if budget is not None:
        needed = device_bytes(spec, window(num_layers, 1, request.policy), head_bytes)
        keep = largest_keep(needed, budget, num_layers, lambda k: _peak_layers(spec, request, k))
        if keep is None:
            raise BudgetError(_too_small(spec, head_bytes, request, free, budget))
    schedule = window(num_layers, keep, request.policy, warm=request.warm_up)
    needed = device_bytes(spec, schedule, head_bytes)
    if needed.total_bytes > free.device_bytes:
        raise BudgetError(_too_full(spec, needed, request, free))
    notes = []
    if request.device_budget == "auto" and schedule.releases:
        notes.append(
            f"not all of the {num_layers} layers fit into {gib(free.device_bytes)} of free device memory, less "
            f"{gib(AUTO_RESERVE_BYTES)} in reserve: {schedule.uploads_per_sweep} of them are streamed for each token"
        )
    return MemoryPlan(
        schedule=schedule,
        device=needed,
        device_budget=budget,
        is_auto=request.device_budget == "auto",
        host_bytes=_host_bytes(schedule, needed, request, free),
        notes=tuple(notes),
    )


def _peak_layers(spec: EngineSpec, request: MemoryRequest, keep: int) -> int:
    return window(spec.config.num_layers, keep, request.policy).peak_resident_layers


def _too_small(spec: EngineSpec, head_bytes: int, request: MemoryRequest, free: FreeMemory, budget: int) -> str:
    """What is said of a budget into which not even the smallest window fits."""
    smallest_window = window(spec.config.num_layers, 1, request.policy)

    def bytes_at(context: int) -> int:
        return device_bytes(dataclasses.replace(spec, context=context), smallest_window, head_bytes).total_bytes

    smallest = device_bytes(spec, smallest_window, head_bytes)
    if request.device_budget == "auto":
        what = f"{gib(free.device_bytes)} of device memory are free, of which {gib(AUTO_RESERVE_BYTES)} stay in reserve"
        advice = "free some"
    else:
        what = f"device_budget is {gib(budget)}"
        advice = "raise it to that"
    context = largest_context(bytes_at, budget, spec.context)
    if context:
        advice += f", or lower the context to {context}, which fits"
    return (
        f"{what}; expected at least {gib_or_more(smallest.total_bytes)} for a context of {spec.context} ({smallest}): "
        f"{advice}"
    )


def _too_full(spec: EngineSpec, needed: DeviceBytes, request: MemoryRequest, free: FreeMemory) -> str:
    """What is said of a plan that fits the request, but not the memory that is free."""
    num_layers = spec.config.num_layers
    room = free.device_bytes - (AUTO_RESERVE_BYTES if request.keep is None else 0)
    keep = largest_keep(needed, room, num_layers, lambda k: _peak_layers(spec, request, k))
    if keep is not None:
        advice = "--device_budget=auto takes what is free" if request.keep is None else f"--keep {keep} would fit"
    else:
        smallest = needed.at_peak(_peak_layers(spec, request, 1)).total_bytes
        advice = f"the smallest window, --keep 1, needs {gib(smallest)}: free memory or lower --context"
    return (
        f"{needed.peak_layers} of {num_layers} layers at once, the embedding and the KV cache need "
        f"{gib(needed.total_bytes)} of device memory; {gib(free.device_bytes)} are free: {advice}"
    )


def _host_bytes(schedule: Schedule, needed: DeviceBytes, request: MemoryRequest, free: FreeMemory) -> int:
    """Bytes of the layers that wait on the host."""
    if not schedule.releases:
        return 0
    num_bytes = schedule.num_layers * needed.layer_bytes
    with_one_on_its_way = num_bytes + needed.layer_bytes + (needed.total_bytes if free.is_shared else 0)
    if free.host_bytes < with_one_on_its_way:
        raise BudgetError(
            f"{schedule.num_layers} layers of {gib(needed.layer_bytes)} wait in host memory and need "
            f"{gib(with_one_on_its_way)}; {gib(free.host_bytes)} are free: free some, or take a smaller model"
        )
    return num_bytes
