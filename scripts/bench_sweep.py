"""What a sweep over streamed layers gives: batches, drafts of a known acceptance, and drafts for real prompts.

    python scripts/bench_sweep.py --geometry=qwen3-8b
    python scripts/bench_sweep.py --model=demo

- batch: so many sequences at a time. A sweep should take the same time, whatever their number.
- drafts: one sequence, in whose rows drafts stand that are right with a known chance. It should be faster than without
  by as much as a sweep gives more tokens.
- draft model (--draft_model, --draft_geometry, --draft_layers): what one more token of it takes.
- prompts (of a model that has a tokenizer): drafts that are looked up, and those of a --draft_model, on 40 prompts of
  several kinds.
- bits (--bits_batches): the same prompts, or random ones, in batches, with drafts of each depth, streamed and resident.
  Ids and logits must be those of each prompt alone.

Ids of a sequence must be the same in all arms. An empty list leaves its arms out.

    python scripts/bench_sweep.py --model=demo --draft_layers=25 --bits_batches=1-40 --batches= --chances=
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from bits_arms import Arm

    from vramjax.checkpoint.packed import Packed
    from vramjax.checkpoint.random_weights import RandomWeights
    from vramjax.host_tier import Weights

_GEOMETRY = flags.DEFINE_string("geometry", "", "random weights of a model's shapes, such as qwen3-8b")
_MODEL = flags.DEFINE_string("model", "", "real weights instead: anything that `vramjax --model` takes")
_KEEP = flags.DEFINE_integer("keep", 2, "layers on the device; the others are streamed", lower_bound=1)
_BATCHES = flags.DEFINE_list("batches", ["1", "16", "64"], "numbers of sequences; 1 is what others are compared with")
_CHANCES = flags.DEFINE_list("chances", ["0", "0.5", "0.8", "1"], "how often a draft is right")
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 32, "of the batches' and the drafts' prompt", lower_bound=1)
_DRAFT_MODEL = flags.DEFINE_string("draft_model", "", "a small model that drafts, as --model")
_DRAFT_GEOMETRY = flags.DEFINE_string("draft_geometry", "", "random weights of one instead")
_DRAFT_LAYERS = flags.DEFINE_integer("draft_layers", 0, "or so many of the model's own first layers", lower_bound=0)
_TOKENS = flags.DEFINE_integer("tokens", 64, "to decode after it", lower_bound=3)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "timed runs of each arm", lower_bound=1)
_PROMPTS = flags.DEFINE_string(
    "prompts", str(Path(__file__).resolve().parent / "data" / "prompts-40.jsonl"), "prompts by kind; empty: none"
)
_PROMPTS_PER_KIND = flags.DEFINE_integer("prompts_per_kind", 10, "of these, at most", lower_bound=1)
_ANSWER_TOKENS = flags.DEFINE_integer("answer_tokens", 128, "of each answer to them, at most", lower_bound=2)
_BITS_BATCHES = flags.DEFINE_list("bits_batches", [], "sequences at a time where bits are compared, such as 1-8,40")
_BITS_DEPTHS = flags.DEFINE_list("bits_depths", ["0-15"], "of their drafts; as many arms as the longer list has")
_BITS_PROMPTS = flags.DEFINE_integer("bits_prompts", 40, "random ones, if the model has no tokenizer", lower_bound=1)
_BITS_TURNS = flags.DEFINE_float("bits_turns", 0.0, "prompts of each arm, in batches; 0: all", lower_bound=0)
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()
    from benchmarking import announce_result, open_weights, write_result

    name, weights = open_weights(_MODEL.value, _GEOMETRY.value)
    prompts, draft = _prompts(weights), _open_draft(weights)
    arms = _bits_arms(len(prompts) or _BITS_PROMPTS.value, has_model=draft is not None)

    import jax
    from bits_arms import random_prompts
    from sweep_bits import BitArms, bits_metrics
    from sweep_prompts import answer_prompts, encoded, prompt_metrics
    from sweep_subject import Subject

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
    if draft is not None:
        timed = list(subject.time_draft_model(draft, [int(batch) for batch in _BATCHES.value], _ROUNDS.value))
        rows += [_shown(row) for row in timed]
        metrics |= {f"draft_ms_batch{row['batch']}": row["ms_per_draft"] for row in timed}
    if isinstance(weights, Packed) and prompts:
        drafting = draft if isinstance(draft, Packed) else None  # others take too long, or have nothing to say
        answered, is_equal = answer_prompts(
            weights, prompts, keep=_KEEP.value, tokens=_ANSWER_TOKENS.value, draft=drafting
        )
        rows += [_shown(row) for row in answered]
        metrics |= prompt_metrics(answered)
        metrics["ids_equal"] &= is_equal
    if arms:
        if isinstance(weights, Packed) and prompts:
            ids = encoded(weights.path, [text for _, text in prompts])
        else:
            ids = random_prompts(_BITS_PROMPTS.value, weights.config.vocab_size)
        bits = BitArms(
            subject.decoder,
            subject.store,
            ids,
            tokens=_ANSWER_TOKENS.value,
            keep=_KEEP.value,
            draft=draft,
            tells=not prompts,
            turns=_BITS_TURNS.value,
        )
        compared = [_shown(row) for row in bits.run(arms)]
        rows += compared
        metrics |= bits_metrics(compared)
        metrics["ids_equal"] &= metrics["bits_equal"]
    path = write_result(
        f"sweep-{name}",
        device,
        ceilings={"pinned_copy_gb_per_s": link / 1e9},
        metrics=metrics,
        rows=rows,
        out=_OUT.value,
    )
    announce_result(path, seconds=time.perf_counter() - start)


def _open_draft(weights: Packed | RandomWeights) -> Weights | None:
    """The model that drafts, if the flags name one."""
    from benchmarking import open_weights
    from first_layers import FirstLayers

    if sum(map(bool, (_DRAFT_MODEL.value, _DRAFT_GEOMETRY.value, _DRAFT_LAYERS.value))) > 1:
        raise app.UsageError("expected one of --draft_model, --draft_geometry and --draft_layers")
    if _DRAFT_LAYERS.value > weights.config.num_layers:
        raise app.UsageError(f"draft_layers is {_DRAFT_LAYERS.value}; expected 1 .. {weights.config.num_layers}")
    if _DRAFT_LAYERS.value:
        return FirstLayers(weights, _DRAFT_LAYERS.value)
    if _DRAFT_MODEL.value or _DRAFT_GEOMETRY.value:
        return open_weights(_DRAFT_MODEL.value, _DRAFT_GEOMETRY.value)[1]
    return None


def _prompts(weights: Packed | RandomWeights) -> list[tuple[str, str]]:
    """Kind and text of prompts, so many of each kind; none if the model has no tokenizer."""
    from vramjax.checkpoint.packed import Packed

    if not _PROMPTS.value or not isinstance(weights, Packed) or not (weights.path / "tokenizer.json").exists():
        return []
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for line in Path(_PROMPTS.value).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        by_kind.setdefault(record["kind"], []).append((record["kind"], record["prompt"]))
    return [pair for of_kind in by_kind.values() for pair in of_kind[: _PROMPTS_PER_KIND.value]]


def _bits_arms(num_prompts: int, *, has_model: bool) -> list[Arm]:
    """The arms that compare bits."""
    from bits_arms import make_arms, numbers

    from vramjax.decode.depth import MAX_DEPTH

    return make_arms(
        numbers("bits_batches", _BITS_BATCHES.value, least=1, most=num_prompts),
        numbers("bits_depths", _BITS_DEPTHS.value, least=0, most=MAX_DEPTH),
        has_model=has_model,
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row, after a line about it."""
    from benchmarking import bits, spread

    if "ms_per_draft" in row:
        print(f"{row['arm']:<24}{spread(row['ms_per_draft_rounds']):>20} ms for one more token of each", flush=True)
        return row
    text = f"{row['arm']:<{52 if 'logits_equal' in row else 28}}{row['tokens_per_sweep']:8.2f} tokens a sweep"
    if "logits_equal" in row:
        drafts = f"{row['num_accepted_drafts']} of {row['num_drafts']} drafts right"
        text += f"{drafts:>32}{row['seconds']:8.1f} s   {bits(row)}"
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


if __name__ == "__main__":
    app.run(main)
