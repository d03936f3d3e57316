"""What a model reports of itself: the numbers of `LanguageModel.stats()`, as plain JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from vramjax.decode.decoding import DecodingStats
from vramjax.decode.spec import EngineSpec
from vramjax.generation import Generation
from vramjax.model.kv_cache import capacity
from vramjax.planning import MemoryPlan
from vramjax.residency.stats import ResidencyStats


def run_stats(
    *,
    plans: Sequence[MemoryPlan],
    spec: EngineSpec,
    counters: ResidencyStats,
    last: Generation | None,
    decoding: DecodingStats,
    draft_s: float | None,
    is_pinned: bool,
    devices: Sequence[jax.Device],
) -> dict[str, Any]:
    """Everything measured so far.

    Args:
      plans: each device's.
      spec: what runs.
      counters: of all devices.
      last: the generation that ended last, or that is not at its end yet.
      decoding: what the last call that generated has taken, be it of one answer or of many.
      draft_s: what a model takes to draft one more token of every sequence; None: there is none.
      is_pinned: whether host memory is.
      devices: those of the plans.

    Layers, bytes and uploads are those of all devices together; "devices" has each one's. A sweep over the layers gives
    every sequence that is being decoded a token, so that "a token" means one of each where there are several; and one
    more for each of its drafts that is right.
    """
    drafts, accepted = decoding.drafts_by_depth, decoding.accepted_by_depth
    layer_bytes, each = spec.layout.num_bytes, [_of_device(*pair) for pair in zip(devices, plans, strict=True)]
    names = {plan.schedule.name for plan in plans}
    # A first sweep starts from another state than every later one: where there was no other, what will be is known.
    uploads = sum(plan.schedule.uploads_per_sweep for plan in plans)
    bytes_streamed = uploads * layer_bytes
    if counters.last_sweep_is_steady:
        uploads, bytes_streamed = counters.last_sweep_uploads, counters.last_sweep_bytes_uploaded
    return {
        "token_ids": list(last.token_ids) if last else [],
        "text": last.text if last else "",
        "finish_reason": last.finish_reason if last else None,
        "num_prompt_tokens": last.num_prompt_tokens if last else 0,
        "prefill_s": last.prefill_s if last else None,
        "ms_per_token": last.ms_per_token if last else None,
        "batch": spec.num_slots,  # sequences that may be decoded at the same time
        "num_answers": decoding.num_ended,
        "total_prompt_tokens": decoding.num_prompt_tokens,
        "total_new_tokens": decoding.num_tokens,
        "num_sweeps": decoding.num_sweeps,  # that gave a token; so "tokens_per_sweep" is at least 1
        "tokens_per_sweep": decoding.num_tokens / decoding.num_sweeps if decoding.num_sweeps else None,
        "rows_per_sweep": decoding.num_rows / decoding.num_sweeps if decoding.num_sweeps else None,
        "num_drafts": sum(drafts),  # rows that were taken for guesses
        "num_accepted_drafts": sum(accepted),  # of these, the ones that were right, with all before them in the sweep
        "drafts_by_depth": list(drafts),  # how many were the first of their sequence in a sweep, the second, ...
        "acceptance_by_depth": [a / n if n else None for a, n in zip(accepted, drafts, strict=True)],
        "ms_per_draft": None if draft_s is None else 1e3 * draft_s,  # of a model that drafts, for all sequences
        "tokens_per_s": decoding.num_tokens / decoding.seconds if decoding.seconds else None,
        "num_layers": spec.config.num_layers,
        "policy": min(names, key=lambda name: name == "resident"),  # of a device that streams, if any does
        "keep": sum(plan.schedule.keep for plan in plans),
        "device_budget": _sum(each, "device_budget"),  # bytes; None if layers were asked for
        "pinned_layers": sum(plan.num_pinned for plan in plans),  # on a device for good; not pinned host memory
        "uploads_per_token": uploads,
        "bytes_streamed_per_token": bytes_streamed,
        "peak_resident_layers": counters.peak_resident_layers,
        "end_resident_layers": counters.resident_layers_end,
        # Counted as engines without fused matrices would: q, k, v, o, gate, up, down of each layer, and lm_head.
        "resident_entries_end": 7 * counters.resident_layers_end + 1,
        "resident_arrays_end": counters.resident_arrays_end,
        "pool_hits": counters.pool_hits,
        "pool_misses": counters.pool_misses,
        "pool_fallback_frees": counters.pool_fallback_frees,
        "uploads": counters.uploads,
        "bytes_uploaded": counters.bytes_uploaded,
        "evictions": counters.evictions,
        "hits": counters.hits,
        "layer_bytes": layer_bytes,
        "peak_layer_bytes": counters.peak_device_bytes,
        "head_bytes": sum(plan.device.head_bytes for plan in plans),
        "kv_bytes": sum(plan.device.kv_bytes for plan in plans),
        "workspace_bytes": sum(plan.device.workspace_bytes for plan in plans),
        "draft_bytes": sum(plan.device.draft_bytes for plan in plans),  # all of a model that drafts
        "planned_peak_bytes": _sum(each, "planned_peak_bytes"),
        # Of the process, whatever else it had on the device; None if not counted.
        "allocator_peak_bytes": _sum(each, "allocator_peak_bytes"),
        "host": _tier(plans, is_pinned),
        "host_bytes": sum(plan.host.num_bytes for plan in plans),  # of layers that wait, and of buffers
        "host_buffers": sum(plan.host.num_buffers for plan in plans),
        "context": capacity(spec.context),
        "device": devices[0].device_kind,
        "devices": each,
        "backend": spec.backend,
        "jax_version": jax.__version__,
    }


def _of_device(device: jax.Device, plan: MemoryPlan) -> dict[str, Any]:
    return {
        "device": str(device),
        "num_layers": plan.schedule.num_layers,
        "pinned_layers": plan.num_pinned,
        "uploads_per_token": plan.num_streamed,
        "device_budget": plan.device_budget,
        "planned_peak_bytes": plan.device.total_bytes,
        "allocator_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }


def _sum(each: Sequence[dict[str, Any]], name: str) -> int | None:
    """What all devices have of it together; None if one does not say."""
    numbers = [of_device[name] for of_device in each]
    return None if None in numbers else sum(numbers)


def _tier(plans: Sequence[MemoryPlan], is_pinned: bool) -> str:
    """Where layers wait: nowhere if all are resident, and in pageable memory if pinning was refused."""
    tiers = {plan.host.tier for plan in plans} - {"none"}
    if not tiers:
        return "none"
    if not is_pinned:
        return "pageable"
    return "mapped" if "mapped" in tiers else "pinned"
