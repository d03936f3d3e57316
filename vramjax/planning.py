"""What a run will keep on the device, stream and keep on the host, decided before any weight is read.

Knows the model's shapes, what was asked for and how much memory there is; reads no files, puts nothing on a device.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from pallas_kernels import chained_backend
from pallas_kernels.backend import COMPILED
from vramjax.checkpoint.packed import head_bytes
from vramjax.config import ModelConfig
from vramjax.decode.drafting import BYTES_PER_TOKEN
from vramjax.decode.spec import EngineSpec
from vramjax.draft_model import DraftModelShape
from vramjax.errors import BudgetError, ConfigError
from vramjax.host_tier import HostPlan, plan_host
from vramjax.layout import LayerLayout
from vramjax.memory import FreeMemory, free_device_bytes, free_host_bytes, process_host_bytes, start_allocator
from vramjax.memory_request import MemoryRequest
from vramjax.residency.budget import AUTO_RESERVE_BYTES, DeviceBytes, largest_context
from vramjax.residency.byte_policy import window_within
from vramjax.residency.multi import layers_of_device
from vramjax.residency.policy import window
from vramjax.residency.schedule import Schedule
from vramjax.units import gib, gib_or_more
from vramjax.whole_number import is_whole

DEFAULT_CONTEXT = 4096
LONG_BLOCKS = (8, 4, 2)  # chunks of a prompt in a block, where there is memory for it
RESIDENT_COST = 1 / 20  # what a layer that stays on the device takes of the time of one that is streamed, about


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What is on the device and when, where the rest waits, and what that takes.

    Invariant: `device.total_bytes` is at most `device_budget`, if there is one, and at most what was free.
    """

    schedule: Schedule
    device: DeviceBytes
    device_budget: int | None  # bytes; None: layers were asked for
    is_auto: bool  # the budget is what was free
    host: HostPlan
    notes: tuple[str, ...] = ()  # what a user should know who left it to us

    @property
    def num_streamed(self) -> int:
        """Layers that a sweep uploads. The others stay on the device for good."""
        return self.schedule.uploads_per_sweep

    @property
    def num_pinned(self) -> int:
        return self.schedule.num_layers - self.num_streamed


def engine_spec(
    config: ModelConfig,
    groups: Mapping[str, int],
    *,
    context: int | None,
    device: jax.Device,
    num_slots: int = 1,
    depth: int = 0,
) -> EngineSpec:
    """The programs that `device` will run. A CPU decodes in float32 and in smaller tiles: it computes unused rows too.

    Raises:
      ConfigError: the context is not positive or beyond the model's maximum.
    """
    if context is None:
        context = min(DEFAULT_CONTEXT, config.max_positions)
    if not is_whole(context) or not 0 < context <= config.max_positions:
        raise ConfigError(f"context is {context!r}; expected 1 .. {config.max_positions}, the model's maximum")
    on_cpu = device.platform == "cpu"
    return EngineSpec(
        config=config,
        layout=LayerLayout.of(config, groups),
        groups=tuple(sorted(groups.items())),
        backend=chained_backend(device),
        kv_dtype=np.dtype(np.float32) if on_cpu else jax.numpy.dtype("bfloat16"),
        context=int(context),
        num_slots=num_slots,
        depth=depth,
        tile_rows=8 if on_cpu else 16,
        chunk_rows=128 if on_cpu else 256,
    )


def plan_run(
    config: ModelConfig,
    groups: Mapping[str, int],
    request: MemoryRequest,
    *,
    context: int | None,
    devices: Sequence[jax.Device],
    draft: DraftModelShape | None = None,
) -> tuple[EngineSpec, list[MemoryPlan]]:
    """What the devices will run, and what each takes of the memory that is free now. No weights are needed for it.

    A model that drafts is on the first device.

    Raises:
      ConfigError: the context or the request cannot be used.
      BudgetError: it does not fit; the message says what would.
    """
    spec = engine_spec(config, groups, context=context, device=devices[0], num_slots=request.batch, depth=request.depth)
    free = _free_memory(devices)

    def plan(spec: EngineSpec) -> list[MemoryPlan]:
        return _plan_devices(spec, head_bytes(config, groups), request, devices, free, draft)

    def planned(num_slots: int) -> tuple[EngineSpec, list[MemoryPlan]]:
        sized = dataclasses.replace(spec, num_slots=num_slots)
        return sized, plan(sized)

    if request.batch == 1 or not request.batch_or_fewer:
        return _planned_with_long_blocks(*planned(request.batch), plan)
    found = [planned(1)]
    for num_slots in range(2, request.batch + 1):
        try:
            found.append(planned(num_slots))
        except BudgetError:  # more slots take more
            break
    best = max(found, key=lambda pair: (_tokens_per_time(*pair), pair[0].num_slots))
    sized, plans = _planned_with_long_blocks(*best, plan)
    if sized.num_slots < request.batch:
        note = (
            f"{sized.num_slots} of {request.batch} prompts are decoded at a time: the KV cache of more does not fit, "
            "or would take the place of layers that are then streamed"
        )
        plans[0] = dataclasses.replace(plans[0], notes=(*plans[0].notes, note))
    return sized, plans


def _planned_with_long_blocks(
    spec: EngineSpec, plans: list[MemoryPlan], plan: Callable[[EngineSpec], list[MemoryPlan]]
) -> tuple[EngineSpec, list[MemoryPlan]]:
    """The same with the longest blocks of a prompt that take the place of no layer."""
    for longer in with_long_blocks(spec):
        try:
            found = plan(longer)
        except BudgetError:
            continue
        if all(new.num_streamed <= old.num_streamed for new, old in zip(found, plans, strict=True)):
            return longer, found
    return spec, plans


def with_long_blocks(spec: EngineSpec) -> list[EngineSpec]:
    """The same with longer blocks of a prompt than a chunk, the longest first; none on a CPU, which gains nothing.

    Products of more rows are faster, and an upload hides the time of one block only.
    """
    if spec.backend not in COMPILED:
        return []
    longer = [dataclasses.replace(spec, chunks_per_block=chunks) for chunks in LONG_BLOCKS]
    return [each for each in longer if each.block_sizes[-1] <= spec.context]


def _tokens_per_time(spec: EngineSpec, plans: Sequence[MemoryPlan]) -> float:
    """What a plan is worth: tokens of a sweep over its time, in units of an upload. Devices stream side by side."""
    return spec.num_slots / (max(plan.num_streamed for plan in plans) + spec.config.num_layers * RESIDENT_COST)


def _free_memory(devices: Sequence[jax.Device]) -> list[FreeMemory]:
    """What there is for each device now."""
    for device in devices:
        start_allocator(device)
    num_devices, host_bytes, process_bytes = len(devices), free_host_bytes(), process_host_bytes()
    free = []
    for device in devices:
        is_shared, num_bytes = device.platform == "cpu", free_device_bytes(device)
        free.append(
            FreeMemory(
                device_bytes=num_bytes // num_devices if is_shared else num_bytes,
                host_bytes=host_bytes,
                is_shared=is_shared,
                process_bytes=process_bytes,
                num_devices=num_devices,
            )
        )
    return free


def _plan_devices(
    spec: EngineSpec,
    head_nbytes: int,
    request: MemoryRequest,
    devices: Sequence[jax.Device],
    free: Sequence[FreeMemory],
    draft: DraftModelShape | None,
) -> list[MemoryPlan]:
    """Each device's plan; both ends of the model are on the first."""
    num_layers, num_devices, plans = spec.config.num_layers, len(devices), []
    for device_idx, device in enumerate(devices):
        layers = layers_of_device(device_idx, num_layers, num_devices)
        own = dataclasses.replace(spec, config=dataclasses.replace(spec.config, num_layers=len(layers)))
        try:
            ends, drafting = (head_nbytes, draft) if device_idx == 0 else (0, None)
            plans.append(plan_memory(own, ends, request, free[device_idx], drafting))
        except BudgetError as error:
            if num_devices == 1:
                raise
            raise BudgetError(
                f"{device}, with {len(layers)} of {num_layers} layers and 1/{num_devices} of the host memory: {error}"
            ) from error
    return plans


def device_bytes(
    spec: EngineSpec, schedule: Schedule, head_nbytes: int, draft: DraftModelShape | None = None
) -> DeviceBytes:
    """What a run takes on the device at its peak."""
    needed = DeviceBytes(
        layer_bytes=spec.layout.num_bytes,
        peak_layers=schedule.peak_resident_layers,
        head_bytes=head_nbytes,
        kv_bytes=0,
        workspace_bytes=0,
    )
    return _as_compiled(needed, spec, draft)


def _as_compiled(needed: DeviceBytes, spec: EngineSpec, draft: DraftModelShape | None) -> DeviceBytes:
    """The same where sequences may be as many and as long as `spec` says."""
    draft_bytes = draft.num_bytes(spec) if draft is not None else 0
    return dataclasses.replace(
        needed, kv_bytes=spec.kv_bytes, workspace_bytes=spec.workspace_bytes, draft_bytes=draft_bytes
    )


def plan_memory(
    spec: EngineSpec, head_nbytes: int, request: MemoryRequest, free: FreeMemory, draft: DraftModelShape | None = None
) -> MemoryPlan:
    """The plan for what was asked: in layers as it stands, in bytes as many layers as fit.

    Raises:
      ConfigError: `keep` or `policy` is none.
      BudgetError: it does not fit; the message says what would.
    """
    num_layers, budget = spec.config.num_layers, request.device_budget_bytes(free.device_bytes)
    if budget is None:
        schedule = window(num_layers, request.keep, request.policy, warm=request.warm_up)
    else:
        smallest = device_bytes(spec, window(num_layers, 1, request.policy), head_nbytes, draft)
        found = _largest_window(smallest, budget, num_layers, request)
        if found is None:
            raise BudgetError(_too_small(spec, smallest, request, free, budget, draft))
        schedule = found
    needed = device_bytes(spec, schedule, head_nbytes, draft)
    if needed.total_bytes > free.device_bytes:
        raise BudgetError(_too_full(spec, needed, request, free))
    drafter_bytes = spec.num_slots * spec.context * BYTES_PER_TOKEN if request.may_draft else 0
    host = plan_host(schedule, spec.layout, needed, request, free, drafter_bytes=drafter_bytes)
    notes = []
    if request.device_budget == "auto" and schedule.releases:
        notes.append(
            f"not all of the {num_layers} layers fit into {gib(free.device_bytes)} of free device memory, less "
            f"{gib(AUTO_RESERVE_BYTES)} in reserve: {schedule.uploads_per_sweep} of them are streamed for each token"
        )
    if request.host == "auto" and host.tier == "mapped":
        notes.append("the layers that are streamed do not fit into host memory: they are read from disk for each token")
    return MemoryPlan(
        schedule=schedule,
        device=needed,
        device_budget=budget,
        is_auto=request.device_budget == "auto",
        host=host,
        notes=tuple(notes),
    )


def _largest_window(needed: DeviceBytes, budget_bytes: int, num_layers: int, request: MemoryRequest) -> Schedule | None:
    """Of the windows that fit into the budget beside all else, the one that streams least; None if there is none."""
    layer_bytes, kinds = [needed.layer_bytes] * num_layers, [0] * num_layers
    room = budget_bytes - needed.fixed_bytes
    try:
        return window_within(layer_bytes, room, request.policy, kinds=kinds, warm=request.warm_up)
    except BudgetError:
        return None


def _too_small(
    spec: EngineSpec,
    smallest: DeviceBytes,
    request: MemoryRequest,
    free: FreeMemory,
    budget_bytes: int,
    draft: DraftModelShape | None,
) -> str:
    """What is said of a budget into which not even the smallest window fits."""

    def bytes_at(**changes: int) -> int:
        return _as_compiled(smallest, dataclasses.replace(spec, **changes), draft).total_bytes

    if request.device_budget == "auto":
        what = f"{gib(free.device_bytes)} of device memory are free, of which {gib(AUTO_RESERVE_BYTES)} stay in reserve"
        advice = "free some"
    else:
        what = f"device_budget is {gib(budget_bytes)}"
        advice = "raise it to that"
    batch = bisect.bisect_right(range(1, spec.num_slots), budget_bytes, key=lambda n: bytes_at(num_slots=n))
    if batch:
        advice += f", or lower the batch to {batch}, which fits"
    elif context := largest_context(lambda n: bytes_at(context=n), budget_bytes, spec.context):
        advice += f", or lower the context to {context}, which fits"
    if draft is not None and smallest.total_bytes - smallest.draft_bytes <= budget_bytes:
        advice += f", or do without the draft model, which takes {gib(smallest.draft_bytes)} of it"
    room = f"a context of {spec.context}" if spec.num_slots == 1 else f"{spec.num_slots} contexts of {spec.context}"
    return f"{what}; expected at least {gib_or_more(smallest.total_bytes)} for {room} ({smallest}): {advice}"


def _too_full(spec: EngineSpec, needed: DeviceBytes, request: MemoryRequest, free: FreeMemory) -> str:
    """What is said of a plan that is what was asked for, but takes more than is free."""
    num_layers = spec.config.num_layers
    draft = f", the draft model ({gib(needed.draft_bytes)})" if needed.draft_bytes else ""
    room = free.device_bytes - (AUTO_RESERVE_BYTES if request.keep is None else 0)
    found = _largest_window(needed, room, num_layers, request)
    if found is not None:
        advice = "device_budget=auto takes what is free" if request.keep is None else f"keep={found.keep} would fit"
    else:
        smallest = needed.at_peak(window(num_layers, 1, request.policy).peak_resident_layers).total_bytes
        batch = "" if spec.num_slots == 1 else "the batch or "
        advice = f"the smallest window, keep=1, needs {gib(smallest)}: free memory, or lower {batch}the context"
    return (
        f"{needed.peak_layers} of {num_layers} layers at once, the embedding{draft} and the KV cache need "
        f"{gib(needed.total_bytes)} of device memory; {gib(free.device_bytes)} are free: {advice}"
    )
