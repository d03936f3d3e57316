"""What the benchmark of sweeps times: batches of sequences, and drafts that are right as often as wished."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
from decoding import Decoder, pinned_store

from vramjax.decode.decoding import DecodingStats
from vramjax.decode.depth import MAX_DEPTH
from vramjax.decode.engine import Engine
from vramjax.decode.scheduler import Request
from vramjax.decode.spec import EngineSpec
from vramjax.decode.speculation import Speculation
from vramjax.draft_model import loaded_draft_model
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.policy import window

if TYPE_CHECKING:
    from vramjax.checkpoint.packed import Packed
    from vramjax.checkpoint.random_weights import RandomWeights
    from vramjax.host_tier import Weights

Row = dict[str, Any]


class Told:
    """A drafter that was told what comes, and is wrong now and then: how often is up to the benchmark.

    Example: `Told(ids, chance=0.5)` drafts the next of `ids` or another token, by the toss of a coin that falls the
    same way for every place each time.
    """

    def __init__(self, ids: Sequence[int], *, chance: float, vocab_size: int) -> None:
        self._num_known, self._chance = 0, chance
        coin = random.Random(1)
        self._drafts = [i if coin.random() < chance else (i + 1) % vocab_size for i in ids]

    def append(self, ids: Sequence[int]) -> None:
        self._num_known += len(ids)

    def chances(self, max_tokens: int) -> list[float]:
        return [self._chance**i for i in range(1, 1 + len(self.draft(max_tokens)))]

    def draft(self, max_tokens: int) -> list[int]:
        return self._drafts[self._num_known :][:max_tokens]


class Subject:
    """A model in host memory, whose layers are streamed for every sweep, and both its ends on the device.

    Invariant: sequence i has the same prompt in every arm, so that its ids must be the same too; `ids_equal` tells
    whether they were.
    """

    def __init__(
        self, weights: Packed | RandomWeights, device: jax.Device, *, keep: int, prompt_tokens: int, tokens: int
    ) -> None:
        self.device, self.config = device, weights.config
        self.ids_equal = True
        self._tokens = tokens
        self._schedule = window(weights.config.num_layers, keep)
        self.store = pinned_store(weights, device)
        self.decoder = Decoder(weights, [device], prompt_tokens=prompt_tokens, max_tokens=tokens)
        self._known: dict[int, list[int]] = {}  # by sequence
        self.bytes_per_sweep = self._schedule.uploads_per_sweep * weights.layout.num_bytes

    def time_batch(self, batch: int, rounds: int) -> Row:
        """So many sequences at a time, a token of each in every sweep."""
        with self._engine(batch) as engine:
            self._decode(engine, batch)  # whatever is done once
            done = [self._decode(engine, batch) for _ in range(rounds)]
        ms = [1e3 / sweeps_per_s for sweeps_per_s, _ in done]
        return {
            "arm": f"batch {batch}",
            "batch": batch,
            "ms_per_sweep": statistics.median(ms),
            "ms_per_sweep_rounds": ms,
            "tokens_per_sweep": float(batch),
            "tok_per_s": batch / statistics.median(ms) * 1e3,
        }

    def time_drafts(self, chances: Sequence[float], rounds: int, *, depth: int = MAX_DEPTH) -> Iterator[Row]:
        """One sequence, whose drafts of `depth` are each right with a chance if those before them were; for each."""
        if not chances:
            return
        with self._engine(1, depth=depth) as engine:
            self._decode(engine, 1)
            ids = self._known[0]
            for chance in chances:
                engine.speculation = Speculation(
                    tile_rows=engine.spec.tile_rows,
                    max_rows=engine.spec.max_rows,
                    is_streamed=True,
                    depth=depth,
                    drafter=lambda _, chance=chance: Told(ids, chance=chance, vocab_size=self.config.vocab_size),
                )
                self._decode(engine, 1)
                done = [self._decode(engine, 1) for _ in range(rounds)]
                ms = [1e3 / sweeps_per_s for sweeps_per_s, _ in done]
                stats = done[-1][1]
                per_sweep = (stats.num_tokens - 1) / (stats.num_sweeps - 1)
                yield {
                    "arm": f"drafts right {chance:.0%}",
                    "batch": 1,
                    "ms_per_sweep": statistics.median(ms),
                    "ms_per_sweep_rounds": ms,
                    "tokens_per_sweep": per_sweep,
                    "tok_per_s": per_sweep / statistics.median(ms) * 1e3,
                    "drafts_by_depth": list(stats.drafts_by_depth),
                    "accepted_by_depth": list(stats.accepted_by_depth),
                }

    def time_draft_model(
        self, weights: Weights, batches: Sequence[int], rounds: int, *, depth: int = MAX_DEPTH
    ) -> Iterator[Row]:
        """What a model that drafts takes for one more token of so many sequences, of drafts of `depth`."""
        for batch in batches:
            spec = dataclasses.replace(self.decoder.spec, num_slots=batch, depth=depth)
            with loaded_draft_model(weights, spec, self.device, progress=True) as model:
                running = [model.begin([i, *self.decoder.prompt[1:]], i, None) for i in range(batch)]
                depths = [min(depth, each.room) for each in running]
                model.draft(running, depths)  # their prompts, and whatever is done once
                ms = []
                for _ in range(rounds):
                    began_at = time.perf_counter()
                    model.draft(running, depths)
                    ms.append((time.perf_counter() - began_at) / max(depths) * 1e3)
            yield {
                "arm": f"draft model, batch {batch}",
                "batch": batch,
                "depth": max(depths),
                "ms_per_draft": statistics.median(ms),
                "ms_per_draft_rounds": ms,
            }

    @contextlib.contextmanager
    def _engine(self, num_slots: int, *, depth: int = 0) -> Iterator[Engine]:
        spec: EngineSpec = dataclasses.replace(self.decoder.spec, num_slots=num_slots, depth=depth)
        controller = Controller(self.store, self._schedule, FusedTransfer(self.device))
        with self.decoder.engine([controller], spec=spec, compiled=False) as (engine, layers):
            yield engine
            uploads = layers.stats.last_sweep_uploads
            assert uploads == self._schedule.uploads_per_sweep, "what was timed was not streamed"

    def _decode(self, engine: Engine, batch: int) -> tuple[float, DecodingStats]:
        """Sweeps a second while all sequences are decoded, none of them joining any more."""
        limit = self._tokens
        prompts = [[i, *self.decoder.prompt[1:]] for i in range(1, batch + 1)]
        decoding = engine.decode([Request(prompt_ids=prompt, limit=limit) for prompt in prompts])
        ids: list[list[int]] = [[] for _ in prompts]
        begun: list[int] | None = None
        num_sweeps, began_at, ended_at = 0, 0.0, 0.0
        for token in decoding:
            ids[token.request_idx].append(token.id)
            if all(ids) and begun is None:  # the last of a sweep's tokens are those of sequences that have joined in it
                begun, began_at = [len(of_sequence) for of_sequence in ids], time.perf_counter()
            if token.is_last and not ended_at:
                assert begun is not None, "the first sequence has ended before the last has joined: decode more tokens"
                ended_at, num_sweeps = time.perf_counter(), limit - begun[token.request_idx]
        for i, of_sequence in enumerate(ids):
            self.ids_equal &= of_sequence == self._known.setdefault(i, of_sequence)
        if batch == 1:  # some of these may have given more than one token
            num_sweeps = decoding.stats.num_sweeps - 1
        return num_sweeps / (ended_at - began_at), decoding.stats
