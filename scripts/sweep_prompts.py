"""What drafts give on prompts of several kinds: tokens a sweep, where each is answered alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramjax.language_model import LanguageModel
from vramjax.loading import open_tokenizer
from vramjax.progress import progress_bar
from vramjax.text.prompt import encode_prompt

if TYPE_CHECKING:
    from vramjax.checkpoint.packed import Packed
    from vramjax.host_tier import Weights

Row = dict[str, Any]

_LOOKUP, _MODEL = "prompts", "prompts, draft model"
_COPYING = ("edit", "extract")  # kinds of prompts whose answers are mostly in them


def encoded(model_path: Path, texts: Sequence[str]) -> list[list[int]]:
    """The ids of prompts, by the tokenizer of a packed directory."""
    tokenizer = open_tokenizer(model_path)
    return [encode_prompt(tokenizer, text) for text in texts]


def answer_prompts(
    packed: Packed,
    prompts: Sequence[tuple[str, str]],
    *,
    keep: int,
    tokens: int,
    batch: int = 8,
    draft: Weights | None = None,
) -> tuple[list[Row], bool]:
    """Tokens per sweep of each kind of prompts; and whether ids are those without drafts.

    Each is answered alone, streamed, with drafts that are looked up; again with those of a model too, if there is one;
    then all of them together, without drafts and streaming.
    """
    rows, is_equal, tokenizer = [], True, open_tokenizer(packed.path)
    plain: dict[int, list[int]] = {}
    with LanguageModel(packed, tokenizer, keep=packed.config.num_layers, batch=batch, progress=False) as model:
        for answer in model.generate_many([prompt for _, prompt in prompts], max_new_tokens=tokens):
            plain[answer.index] = answer.token_ids
    for arm, drafting in ((_LOOKUP, None), (_MODEL, draft)) if draft is not None else ((_LOOKUP, None),):
        found: list[tuple[str, Row]] = []
        with (
            LanguageModel(packed, tokenizer, keep=keep, speculate="auto", draft=drafting, progress=False) as model,
            progress_bar("Answering", total=len(prompts), unit="items") as advance,
        ):
            for i, (kind, prompt) in enumerate(prompts):
                ids = model.generate(prompt, max_new_tokens=tokens).finish().token_ids
                stats = model.stats()
                assert stats["uploads_per_token"] > 0
                is_equal &= ids == plain[i]
                found.append((kind, stats))
                advance(1)
        kinds = dict.fromkeys(kind for kind, _ in prompts)
        rows += [_row(f"{arm}: {kind}", [stats for other, stats in found if other == kind]) for kind in kinds]
    return rows, is_equal


def prompt_metrics(rows: Sequence[Row]) -> dict[str, float | None]:
    """The mean over prompts, of all kinds and of those that copy; with drafts of a model under names of their own."""

    def mean(arm: str, kinds: Sequence[str] | None) -> float | None:
        each = [
            value
            for row in rows
            if (row["arm"].partition(": ")[0] == arm) and (kinds is None or row["arm"].partition(": ")[2] in kinds)
            for value in row["tokens_per_sweep_each"]
        ]
        return statistics.mean(each) if each else None

    metrics = {}
    for prefix, arm in (("", _LOOKUP), ("draft_", _MODEL)):
        if any(row["arm"].startswith(f"{arm}: ") for row in rows):
            metrics[f"{prefix}tokens_per_sweep_mean"] = mean(arm, None)
            metrics[f"{prefix}tokens_per_sweep_copy"] = mean(arm, _COPYING)
    return metrics


def _row(arm: str, each: Sequence[dict[str, Any]]) -> Row:
    drafts, accepted = sum(s["num_drafts"] for s in each), sum(s["num_accepted_drafts"] for s in each)
    return {
        "arm": arm,
        "num_prompts": len(each),
        "num_tokens": sum(s["total_new_tokens"] for s in each),
        "tokens_per_sweep": statistics.mean(s["tokens_per_sweep"] for s in each),
        "rows_per_sweep": statistics.mean(s["rows_per_sweep"] for s in each),
        "acceptance": accepted / drafts if drafts else None,
        "tokens_per_sweep_each": [s["tokens_per_sweep"] for s in each],
    }
