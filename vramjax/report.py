"""What the command line prints about a run: the plan before it, the summary after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vramjax.residency.budget import DeviceBytes
from vramjax.residency.policy import Schedule
from vramjax.units import gib


def summary(stats: Mapping[str, Any]) -> str:
    """One screen about a finished run, from `LanguageModel.stats()`."""
    num_layers, layer_bytes = stats["num_layers"], stats["layer_bytes"]
    if stats["policy"] == "resident":
        residency = f"all {num_layers} layers ({gib(num_layers * layer_bytes)}): everything fits, nothing is streamed"
        streamed = "nothing"
    else:
        residency = (
            f"{stats['end_resident_layers']} of {num_layers} layers between tokens, {stats['peak_resident_layers']} at "
            f"the peak ({gib(stats['peak_layer_bytes'])}), policy {stats['policy']}, keep {stats['keep']}"
        )
        streamed = f"{stats['uploads_per_token']} layers a token, {gib(stats['bytes_streamed_per_token'])}"
    num_new = len(stats["token_ids"])
    rows = [
        ("tokens", f"{stats['num_prompt_tokens']} in the prompt, {num_new} new ({stats['finish_reason']})"),
        ("speed", _speed(stats)),
        ("resident", residency),
        ("streamed", streamed),
        ("peak", _peak(stats)),
        ("device", f"{stats['device']}, jax {stats['jax_version']}, kernels: {stats['backend']}"),
    ]
    return "\n".join(f"{name:>9}  {text}" for name, text in rows)


def plan(schedule: Schedule, needed: DeviceBytes, context: int) -> str:
    """What a run will do and take, known before anything is loaded."""
    rows = [
        (
            "layers",
            f"{needed.peak_layers} of {schedule.num_layers} at {gib(needed.layer_bytes)}",
            needed.peak_layers * needed.layer_bytes,
        ),
        ("embedding, lm_head", "never leave", needed.head_bytes),
        ("KV cache", f"{context} positions", needed.kv_bytes),
        ("workspace", "at most", needed.workspace_bytes),
        ("device memory", "at the peak", needed.total_bytes),
    ]
    table = [f"  {name:<20}{what:<34}{gib(num_bytes):>12}" for name, what, num_bytes in rows]
    if schedule.releases:
        streamed = schedule.uploads_per_sweep * needed.layer_bytes
        per_token = f"{schedule.uploads_per_sweep} uploads a token, {gib(streamed)} over the link"
    else:
        per_token = "0 uploads a token: every layer stays on the device, nothing is streamed"
    return "\n".join([schedule.describe(), "", *table, "", f"  {per_token}"])


def _speed(stats: Mapping[str, Any]) -> str:
    if stats["prefill_s"] is None:
        return "no token was decoded"
    first = f"first token after {stats['prefill_s']:.2f} s"
    if stats["ms_per_token"] is None:
        return first
    return f"{1e3 / stats['ms_per_token']:.1f} tokens/s ({stats['ms_per_token']:.1f} ms a token), {first}"


def _peak(stats: Mapping[str, Any]) -> str:
    parts = (
        f"layers {gib(stats['peak_layer_bytes'])}, embedding and lm_head {gib(stats['head_bytes'])}, "
        f"KV cache {gib(stats['kv_bytes'])}"
    )
    if stats["allocator_peak_bytes"] is None:  # a CPU has no allocator of its own that would count
        counted = stats["peak_layer_bytes"] + stats["head_bytes"] + stats["kv_bytes"]
        return f"{gib(counted)} counted: {parts}"
    return f"{gib(stats['allocator_peak_bytes'])} measured by the allocator: {parts}, the rest for activations"
