"""What the command line prints about a run: the plan before it, the summary after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vramjax.residency.budget import AUTO_RESERVE_BYTES
from vramjax.units import gib

if TYPE_CHECKING:
    from vramjax.planning import MemoryPlan


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
        sweep = "sweep" if stats["num_drafts"] else _sweep(stats["batch"])
        streamed = f"{stats['uploads_per_token']} layers a {sweep}, {gib(stats['bytes_streamed_per_token'])}"
    rows = [
        ("tokens", _tokens(stats)),
        ("speed", _speed(stats)),
        *([("drafts", _drafts(stats))] if stats["num_drafts"] else []),
        ("resident", residency),
        ("streamed", streamed),
        ("peak", _peak(stats)),
        ("device", f"{_devices(stats)}, jax {stats['jax_version']}, kernels: {stats['backend']}"),
    ]
    return "\n".join(f"{name:>9}  {text}" for name, text in rows)


def plan_table(plan: MemoryPlan, context: int, *, where: str, link_bytes_per_s: float | None, batch: int = 1) -> str:
    """What a run will do and take, known before anything is loaded: the schedule, then a table.

    Args:
      plan: what was planned.
      context: positions that prompt and answer may take.
      where: the device's name, or "a CPU".
      link_bytes_per_s: the rate of the link that layers are streamed over; None if it was not measured.
      batch: sequences that may be decoded at the same time.
    """
    needed, num_layers = plan.device, plan.schedule.num_layers
    num_passing = needed.peak_layers - plan.num_pinned
    rows = [(f"{plan.num_pinned} of {num_layers} layers", "stay for good", plan.num_pinned * needed.layer_bytes)]
    if plan.num_streamed:
        passing = f"streamed, {num_passing} at a time"
        rows.append((f"{plan.num_streamed} of {num_layers} layers", passing, num_passing * needed.layer_bytes))
    rows += [
        ("embedding, lm_head", "stay for good", needed.head_bytes),
        ("KV cache", f"{context} positions" if batch == 1 else f"{batch} x {context} positions", needed.kv_bytes),
        ("workspace", "at most", needed.workspace_bytes),
        *([("draft model", "stays for good, with all of its own", needed.draft_bytes)] if needed.draft_bytes else []),
        ("device memory", "at the peak", needed.total_bytes),
    ]
    if plan.device_budget is not None:
        asked = f"auto: free now, less {gib(AUTO_RESERVE_BYTES)}" if plan.is_auto else "as asked"
        rows.append(("budget", asked, plan.device_budget))
    if plan.host.tier != "none":
        kept = f"{plan.host.num_layers} layers, pinned" if plan.host.num_layers else "no layer"
        buffers = f"{plan.host.num_buffers} buffers from disk" if plan.host.num_buffers else "no buffers"
        rows.append(("host memory", f"{kept}; {buffers}", plan.host.num_bytes))
    table = [f"  {name:<20}{what:<34}{gib(num_bytes):>12}" for name, what, num_bytes in rows]
    lines, a_token = [plan.schedule.describe(), "", *table, ""], f"a {_sweep(batch)}"
    if not plan.num_streamed:
        return "\n".join([*lines, f"  0 uploads a token: every layer stays on {where}, nothing is streamed"])
    streamed = plan.num_streamed * needed.layer_bytes
    lines.append(f"  {plan.num_streamed} uploads {a_token}, {gib(streamed)}")
    if link_bytes_per_s is None:
        return "\n".join([*lines, f"  link not measured: {where} has no memory left to copy into"])
    rate = f"{link_bytes_per_s / 1e9:.1f} GB/s"
    if where == "a CPU":
        link = f"no link: the device is {where}; copies within its memory ran at {rate} just now"
    else:
        link = f"link of {where}: copies from pinned memory ran at {rate} just now"
    time = f"{streamed / link_bytes_per_s * 1e3:.1f} ms {a_token}"
    if plan.host.tier == "mapped":  # the disk was not measured
        expected = f"at least {time}, as the disk is likely to be slower than that"
    else:
        expected = f"{time}, unless computing takes longer"
    return "\n".join([*lines, f"  {link}", f"  expected: {expected}"])


def plan_tables(
    plans: Sequence[MemoryPlan],
    context: int,
    *,
    where: str,
    links_bytes_per_s: Sequence[float | None],
    batch: int = 1,
) -> str:
    """`plan_table` of each device, and what they do together; the table alone if there is but one."""
    tables = [
        plan_table(plan, context, where=where, link_bytes_per_s=rate, batch=batch)
        for plan, rate in zip(plans, links_bytes_per_s, strict=True)
    ]
    if len(plans) == 1:
        return tables[0]
    num_layers = sum(plan.schedule.num_layers for plan in plans)
    blocks = []
    for i, table in enumerate(tables):
        layers = ", ".join(map(str, range(i, num_layers, len(plans))))
        blocks.append(
            f"device {i + 1} of {len(plans)}, with layers {layers}, which are numbered from 0 here\n{table}\n"
        )
    streaming = [
        (plan.num_streamed * plan.device.layer_bytes, rate)
        for plan, rate in zip(plans, links_bytes_per_s, strict=True)
        if plan.num_streamed
    ]
    seconds = [num_bytes / rate for num_bytes, rate in streaming if rate is not None]
    uploads = sum(plan.num_streamed for plan in plans)
    a_token = f"a {_sweep(batch)}"
    together = f"all devices: {uploads} uploads {a_token}, {gib(sum(num_bytes for num_bytes, _ in streaming))}"
    if len(seconds) < len(streaming):
        together += "; link not measured"
    elif seconds:
        at_least = "at least " if any(plan.host.tier == "mapped" for plan in plans) else ""
        together += (
            f"; expected: {at_least}{max(seconds) * 1e3:.1f} ms {a_token}, as all links are used at the same time"
        )
    return "\n".join([*blocks, together])


def _devices(stats: Mapping[str, Any]) -> str:
    num_devices = len(stats["devices"])
    return stats["device"] if num_devices == 1 else f"{num_devices} x {stats['device']}"


def _sweep(batch: int) -> str:
    """What a sweep over the layers gives."""
    return "token" if batch == 1 else f"sweep, which gives up to {batch} tokens"


def _tokens(stats: Mapping[str, Any]) -> str:
    if stats["num_answers"] > 1:
        return (
            f"{stats['total_prompt_tokens']} in {stats['num_answers']} prompts, {stats['total_new_tokens']} new in "
            f"{stats['num_sweeps']} sweeps: {stats['tokens_per_sweep']:.1f} a sweep, which had "
            f"{stats['rows_per_sweep']:.1f} rows in use"
        )
    num_new = len(stats["token_ids"])
    return f"{stats['num_prompt_tokens']} in the prompt, {num_new} new ({stats['finish_reason']})"


def _drafts(stats: Mapping[str, Any]) -> str:
    first = stats["acceptance_by_depth"][0]
    model = "" if stats["ms_per_draft"] is None else f"; {stats['ms_per_draft']:.1f} ms to draft one more"
    return (
        f"{stats['num_accepted_drafts']} of {stats['num_drafts']} were right, of the first ones {100 * first:.0f} %: "
        f"{stats['tokens_per_sweep']:.2f} tokens a sweep, {stats['rows_per_sweep']:.1f} rows{model}"
    )


def _speed(stats: Mapping[str, Any]) -> str:
    if stats["prefill_s"] is None:
        return "no token was decoded"
    if stats["num_answers"] > 1:
        return f"{stats['tokens_per_s']:.1f} tokens/s, those of all prompts together"
    first = f"first token after {stats['prefill_s']:.2f} s"
    if stats["ms_per_token"] is None:
        return first
    return f"{1e3 / stats['ms_per_token']:.1f} tokens/s ({stats['ms_per_token']:.1f} ms a token), {first}"


def _peak(stats: Mapping[str, Any]) -> str:
    parts = (
        f"layers {gib(stats['peak_layer_bytes'])}, embedding and lm_head {gib(stats['head_bytes'])}, "
        f"KV cache {gib(stats['kv_bytes'])}"
    )
    if stats["draft_bytes"]:
        parts += f", draft model {gib(stats['draft_bytes'])}"
    budget = "" if stats["device_budget"] is None else f" of a budget of {gib(stats['device_budget'])}"
    if stats["allocator_peak_bytes"] is None:  # a CPU has no allocator of its own that would count
        counted = sum(stats[name] for name in ("peak_layer_bytes", "head_bytes", "kv_bytes", "draft_bytes"))
        return f"{gib(counted)} counted{budget}: {parts}"
    return f"{gib(stats['allocator_peak_bytes'])} measured by the allocator{budget}: {parts}, the rest for activations"
