"""Whether a token and its logits are the same to the bit, whatever is decoded at the same time, drafted and streamed.

The reference is each prompt alone, all layers on the device, without drafts. Of logits a digest is kept for each token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from bits_arms import MODEL, NO_DRAFTS, Arm
from decoding import Decoder

from vramjax.decode.decoding import DecodingStats
from vramjax.decode.drafting import NgramDrafter
from vramjax.decode.engine import Engine
from vramjax.decode.scheduler import Request
from vramjax.decode.speculation import Speculation
from vramjax.draft_model import loaded_draft_model
from vramjax.progress import progress_bar
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.multi import MultiController
from vramjax.residency.policy import resident, window

if TYPE_CHECKING:
    from vramjax.host_tier import Weights
    from vramjax.residency.host_store import HostStore

_WRONG_EVERY = 7  # tokens of an answer, one is another one in what is looked up of it


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a prompt got."""

    ids: list[int] = dataclasses.field(default_factory=list)
    digests: list[bytes] = dataclasses.field(default_factory=list)  # of the float32 logits that each was drawn from

    def until(self, stop_ids: frozenset[int]) -> Answer:
        """What is left of it if it ends in a stop id."""
        end = next((i for i, token_id in enumerate(self.ids, 1) if token_id in stop_ids), len(self.ids))
        return Answer(ids=self.ids[:end], digests=self.digests[:end])


class BitArms:
    """Prompts, what each gets by itself, and whether it gets the same in other ways.

    Invariant: arms share the layers on the host and both ends on the device, and have a KV cache of their own.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: HostStore,
        prompts: Sequence[Sequence[int]],
        *,
        tokens: int,
        keep: int,
        draft: Weights | None = None,
        tells: bool = False,
        turns: float = 0.0,
    ) -> None:
        """Decodes each prompt by itself.

        Args:
          decoder: of the model.
          store: all of its layers.
          prompts: ids.
          tokens: of each answer.
          keep: layers on the device where they are streamed.
          draft: the model that drafts.
          tells: what is looked up is also in the right answers, some of whose tokens are others there: for a model
            that never says anything twice.
          turns: how many prompts an arm has, in batches of it; 0: all.
        """
        self._decoder, self._store, self._prompts, self._draft = decoder, store, prompts, draft
        self._tokens, self._keep, self._turns = tokens, keep, turns
        self._spec = dataclasses.replace(decoder.spec, context=max(map(len, prompts)) + tokens)
        self._told: dict[tuple[int, ...], list[int]] = {}
        self.reference: list[Answer] = []
        alone = Arm(batch=1, depth=0, drafter=NO_DRAFTS, is_streamed=False, ends_early=False)
        with (
            self._engine(alone) as (engine, _),
            progress_bar("Answering one by one", total=len(prompts), unit="items") as advance,
        ):
            for prompt in prompts:
                (answer,), _ = _answers(engine, [Request(prompt_ids=prompt, limit=tokens)])
                self.reference.append(answer)
                if tells:
                    vocab_size = self._spec.config.vocab_size
                    self._told[tuple(prompt)] = [
                        token_id if i % _WRONG_EVERY else (token_id + 1) % vocab_size
                        for i, token_id in enumerate(answer.ids, 1)
                    ]
                advance(1)

    def run(self, arms: Sequence[Arm]) -> Iterator[dict[str, Any]]:
        """The row of each arm; the first token that differs in it is printed."""
        with progress_bar("Comparing bits", total=len(arms), unit="items") as advance:
            for arm in arms:
                yield self._run(arm)
                advance(1)

    def _run(self, arm: Arm) -> dict[str, Any]:
        rng = random.Random(arm.batch)
        count = len(self._prompts)
        order = rng.sample(range(count), min(count, math.ceil(self._turns * arm.batch) or count))
        stops = [frozenset([rng.choice(self.reference[i].ids)] if arm.ends_early else []) for i in order]
        requests = [
            Request(prompt_ids=self._prompts[i], limit=self._tokens, stop_ids=stop_ids)
            for i, stop_ids in zip(order, stops, strict=True)
        ]
        with self._engine(arm) as (engine, layers):
            answers, stats = _answers(engine, requests)
            uploads = layers.stats.last_sweep_uploads
        assert bool(uploads) == arm.is_streamed, f"{arm}: {uploads} uploads per sweep with keep={self._keep}"
        expected = [self.reference[i].until(stop_ids) for i, stop_ids in zip(order, stops, strict=True)]
        pairs = list(zip(expected, answers, strict=True))
        differences = [_difference(i, *pair) for i, pair in zip(order, pairs, strict=True)]
        if any(differences):
            print(f"{arm}: {next(filter(None, differences))}", flush=True)
        return {
            "arm": str(arm),
            "batch": arm.batch,
            "depth": arm.depth,
            "drafter": arm.drafter,
            "keep": self._keep if arm.is_streamed else self._store.num_layers,
            "uploads_per_sweep": uploads,
            "ends_early": arm.ends_early,
            "num_prompts": len(answers),
            "num_tokens": stats.num_tokens,
            "tokens_per_sweep": stats.num_tokens / stats.num_sweeps,
            "num_drafts": sum(stats.drafts_by_depth),
            "num_accepted_drafts": sum(stats.accepted_by_depth),
            "seconds": stats.seconds,
            "ids_equal": all(a.ids == b.ids for a, b in pairs),
            "logits_equal": all(a.digests == b.digests for a, b in pairs),
        }

    @contextlib.contextmanager
    def _engine(self, arm: Arm) -> Iterator[tuple[Engine, MultiController]]:
        num_layers, device = self._store.num_layers, self._decoder.devices[0]
        spec = dataclasses.replace(self._spec, num_slots=arm.batch, depth=arm.depth)
        schedule = window(num_layers, self._keep) if arm.is_streamed else resident(num_layers)
        controller = Controller(self._store, schedule, FusedTransfer(device))
        with contextlib.ExitStack() as opened:
            engine, layers = opened.enter_context(self._decoder.engine([controller], spec=spec, compiled=False))
            if arm.depth:
                drafts = None
                if arm.drafter == MODEL:
                    assert self._draft is not None
                    drafts = opened.enter_context(loaded_draft_model(self._draft, spec, device, progress=False))
                engine.speculation = Speculation(
                    tile_rows=spec.tile_rows,
                    max_rows=spec.max_rows,
                    is_streamed=arm.is_streamed,
                    depth=arm.depth,
                    drafter=lambda ids: NgramDrafter([*self._told.get(tuple(ids), []), *ids]),
                    model=drafts,
                )
            yield engine, layers


def bits_metrics(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The headlines of all arms."""
    is_equal = all(row["ids_equal"] and row["logits_equal"] for row in rows)
    return {
        "bits_arms": len(rows),
        "bits_arms_with_drafts": sum(row["num_drafts"] > 0 for row in rows),
        "bits_tokens_compared": sum(row["num_tokens"] for row in rows),
        "bits_drafts": sum(row["num_drafts"] for row in rows),
        "bits_accepted_drafts": sum(row["num_accepted_drafts"] for row in rows),
        "bits_equal": is_equal,
    }


def _answers(engine: Engine, requests: Sequence[Request]) -> tuple[list[Answer], DecodingStats]:
    answers = [Answer() for _ in requests]

    def on_logits(request_idx: int, row: np.ndarray) -> None:
        assert row.dtype == np.float32 and np.isfinite(row).all()
        answers[request_idx].digests.append(hashlib.blake2b(row.tobytes(), digest_size=16).digest())

    decoding = engine.decode(requests, on_logits=on_logits)
    for token in decoding:
        answers[token.request_idx].ids.append(token.id)
    return answers, decoding.stats


def _difference(prompt_idx: int, expected: Answer, answer: Answer) -> str:
    """What is said of the first token that differs; empty if none does."""
    both = [list(zip(each.ids, each.digests, strict=True)) for each in (expected, answer)]
    if both[0] == both[1]:
        return ""
    shorter = min(map(len, both))
    token_idx = next((i for i in range(shorter) if both[0][i] != both[1][i]), shorter)
    if token_idx == shorter:
        return f"prompt {prompt_idx} has {len(answer.ids)} tokens; by itself {len(expected.ids)}"
    token_id, own_id = answer.ids[token_idx], expected.ids[token_idx]
    what = f"the id is {token_id}; by itself {own_id}" if token_id != own_id else "the logits differ"
    return f"prompt {prompt_idx}, token {token_idx}: {what}"
