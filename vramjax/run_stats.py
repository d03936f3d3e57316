"""What a model reports of itself: the numbers of `LanguageModel.stats()`, as plain JSON values."""

from __future__ import annotations

from typing import Any

import jax

from vramjax.decode.engine import EngineSpec
from vramjax.generation import Generation
from vramjax.model.kv_cache import capacity
from vramjax.planning import MemoryPlan
from vramjax.residency.stats import ResidencyStats


def run_stats(
    *,
    plan: MemoryPlan,
    spec: EngineSpec,
    counters: ResidencyStats,
    last: Generation | None,
    is_pinned: bool,
    device: jax.Device,
) -> dict[str, Any]:
    """Everything measured so far; timings are those of `last`, the last generation."""
    schedule, layer_bytes = plan.schedule, spec.layout.num_bytes
    # A first sweep starts from another state than every later one: where there was no other, what will be is known.
    uploads, bytes_streamed = schedule.uploads_per_sweep, schedule.uploads_per_sweep * layer_bytes
    if counters.last_sweep_is_steady:
        uploads, bytes_streamed = counters.last_sweep_uploads, counters.last_sweep_bytes_uploaded
    return {
        "token_ids": list(last.token_ids) if last else [],
        "text": last.text if last else "",
        "finish_reason": last.finish_reason if last else None,
        "num_prompt_tokens": last.num_prompt_tokens if last else 0,
        "prefill_s": last.prefill_s if last else None,
        "ms_per_token": last.ms_per_token if last else None,
        "num_layers": schedule.num_layers,
        "policy": schedule.name,
        "keep": schedule.keep,
        "device_budget": plan.device_budget,  # bytes; None if layers were asked for
        "pinned_layers": plan.num_pinned,  # on the device for good; not pinned host memory
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
        "head_bytes": plan.device.head_bytes,
        "kv_bytes": plan.device.kv_bytes,
        "workspace_bytes": plan.device.workspace_bytes,
        "planned_peak_bytes": plan.device.total_bytes,
        # Of the process, whatever else it had on the device; None if not counted.
        "allocator_peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "host": _tier(plan, is_pinned),
        "host_bytes": plan.host.num_bytes,  # of layers that wait, and of buffers
        "host_buffers": plan.host.num_buffers,
        "context": capacity(spec.context),
        "device": device.device_kind,
        "backend": spec.backend,
        "jax_version": jax.__version__,
    }


def _tier(plan: MemoryPlan, is_pinned: bool) -> str:
    """Where layers wait: nowhere if all are resident, and in pageable memory if pinning was refused."""
    return plan.host.tier if is_pinned or plan.host.tier == "none" else "pageable"
