"""What a sweep over streamed layers gives: batches, drafts of a known acceptance, and drafts for real prompts.

    python scripts/bench_sweep.py --geometry=qwen3-8b
    python scripts/bench_sweep.py --model=demo

- batch: so many sequences at a time. A sweep should take the same time, whatever their number.
- drafts: one sequence, in whose rows drafts stand that are right with a known chance. It should be faster than without
  by as much as a sweep gives more tokens.
- draft model (--draft_model, --draft_geometry): what one more token of it takes.
- prompts (of a model that has a tokenizer): drafts that are looked up, or of the draft model, on 40 prompts of several
  kinds.

Ids of a sequence must be the same in all arms.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from vramjax.checkpoint.packed import Packed

_GEOMETRY = flags.DEFINE_string("geometry", "", "random weights of a model's shapes, such as qwen3-8b")
_MODEL = flags.DEFINE_string("model", "", "real weights instead: anything that `vramjax --model` takes")
_KEEP = flags.DEFINE_integer("keep", 2, "layers on the device; the others are streamed", lower_bound=1)
_BATCHES = flags.DEFINE_list("batches", ["1", "16", "64"], "numbers of sequences; 1 is what others are compared with")
_CHANCES = flags.DEFINE_list("chances", ["0", "0.5", "0.8", "1"], "how often a draft is right")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 32, "of the batches' and the drafts' prompt", lower_bound=1)
_DRAFT_MODEL = flags.DEFINE_string("draft_model", "", "a small model that drafts, as --model")
_DRAFT_GEOMETRY = flags.DEFINE_string("draft_geometry", "", "random weights of one instead, which is only timed")
_TOKENS = flags.DEFINE_integer("tokens", 64, "to decode after it", lower_bound=3)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "timed runs of each arm", lower_bound=1)
_PROMPTS = flags.DEFINE_string(
    "prompts", str(Path(__file__).resolve().parent / "data" / "prompts-40.jsonl"), "prompts by kind; empty: none"
)
_PROMPTS_PER_KIND = flags.DEFINE_integer("prompts_per_kind", 10, "of these, at most", lower_bound=1)
_ANSWER_TOKENS = flags.DEFINE_integer("answer_tokens", 128, "of each answer to them, at most", lower_bound=2)
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")

_COPYING = ("edit", "extract")  # kinds of prompts whose answers are mostly in them


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()
    from benchmarking import announce_result, open_weights, write_result

    name, weights = open_weights(_MODEL.value, _GEOMETRY.value)

    import jax
    from sweep_subject import Subject, answer_prompts

    from vramjax.checkpoint.packed import Packed
    from vramjax.residency.link import link_bytes_per_s

    device = jax.devices()[0]
    link = link_bytes_per_s(device)
    subject = Subject(weights, device, keep=_KEEP.value, prompt_tokens=_PROMPT_TOKENS.value, tokens=_TOKENS.value)
    print(
        f"{device.device_kind}: {link / 1e9:.1f} GB/s from pinned memory; {subject.bytes_per_sweep / 1e6:.0f} MB a "
        f"sweep of {name} take at least {subject.bytes_per_sweep / link * 1e3:.1f} ms",
        flush=True,
    )
    rows = [_shown(subject.time_batch(int(batch), _ROUNDS.value)) for batch in _BATCHES.value]
    rows += [_shown(row) for row in subject.time_drafts([float(each) for each in _CHANCES.value], _ROUNDS.value)]
    metrics = _metrics(name, rows) | {"ids_equal": subject.ids_equal}
    benchmark, draft = f"sweep-{name}", None
    if _DRAFT_MODEL.value or _DRAFT_GEOMETRY.value:
        draft_name, draft = open_weights(_DRAFT_MODEL.value, _DRAFT_GEOMETRY.value)
        benchmark += f"-draft-{draft_name}"
        timed = list(subject.time_draft_model(draft, [int(batch) for batch in _BATCHES.value], _ROUNDS.value))
        rows += [_shown(row) for row in timed]
        metrics |= {f"draft_ms_batch{row['batch']}": row["ms_per_draft"] for row in timed}
    if isinstance(weights, Packed) and (prompts := _prompts(weights)):
        drafting = draft if isinstance(draft, Packed) else None
        answered, is_equal = answer_prompts(
            weights, prompts, keep=_KEEP.value, tokens=_ANSWER_TOKENS.value, draft=drafting
        )
        rows += [_shown(row) for row in answered]
        metrics |= _prompt_metrics(answered, suffix="" if drafting is None else "_draft_model")
        metrics["ids_equal"] &= is_equal
    path = write_result(
        benchmark,
        device,
        ceilings={"pinned_copy_gb_per_s": link / 1e9},
        metrics=metrics,
        rows=rows,
        out=_OUT.value,
    )
    announce_result(path, seconds=time.perf_counter() - start)


def _prompts(packed: Packed) -> list[tuple[str, str]]:
    """Kind and text of prompts, so many of each kind; none if the model has no tokenizer."""
    if not _PROMPTS.value or not (packed.path / "tokenizer.json").exists():
        return []
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for line in Path(_PROMPTS.value).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        by_kind.setdefault(record["kind"], []).append((record["kind"], record["prompt"]))
    return [pair for of_kind in by_kind.values() for pair in of_kind[: _PROMPTS_PER_KIND.value]]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row, after a line about it."""
    from benchmarking import spread

    if "ms_per_draft" in row:
        print(f"{row['arm']:<24}{spread(row['ms_per_draft_rounds']):>20} ms for one more token of each", flush=True)
        return row
    text = f"{row['arm']:<20}{row['tokens_per_sweep']:8.2f} tokens a sweep"
    if "ms_per_sweep" in row:
        text += f"{spread(row['ms_per_sweep_rounds']):>20} ms a sweep{row['tok_per_s']:10.1f} tokens/s"
    print(text, flush=True)
    return row


def _metrics(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The headlines of what was timed, against one sequence without drafts."""
    from benchmarking import size_suffix

    one = next((row for row in rows if row["arm"] == "batch 1"), None)
    if one is None:
        return {}
    size, metrics = size_suffix(name), {}
    for row in rows:
        if row["batch"] > 1:
            metrics[f"batch{row['batch']}_gain{size}"] = row["tok_per_s"] / one["tok_per_s"]
            metrics[f"batch{row['batch']}_sweep_over_one{size}"] = row["ms_per_sweep"] / one["ms_per_sweep"]
    gains = [
        row["tok_per_s"] / one["tok_per_s"] / row["tokens_per_sweep"] for row in rows if row["arm"].startswith("drafts")
    ]
    if gains:
        metrics["spec_wall_over_sweeps"] = min(gains)
    return metrics


def _prompt_metrics(rows: list[dict[str, Any]], *, suffix: str) -> dict[str, Any]:
    """The mean over prompts, of all kinds and of those that copy; no `suffix` if all drafts were looked up."""

    def mean(kinds: list[dict[str, Any]]) -> float | None:
        each = [value for row in kinds for value in row["tokens_per_sweep_each"]]
        return statistics.mean(each) if each else None

    copying = [row for row in rows if row["arm"].removeprefix("prompts: ") in _COPYING]
    return {f"tokens_per_sweep_mean{suffix}": mean(rows), f"tokens_per_sweep_copy{suffix}": mean(copying)}


if __name__ == "__main__":
    app.run(main)
