"""What the decode benchmark measures: each thing a row, with the bytes that are read for it, or its FLOPs."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from decoding import Decoder, Run, make_prompt, pinned_store
from profiling import kernel_rows, kernel_times
from stepping import Stepper, dispatch_ms

from vramjax.checkpoint.packed import head_shapes
from vramjax.decode.engine import Engine
from vramjax.decode.sampler import Sampling
from vramjax.decode.spec import EngineSpec
from vramjax.planning import with_long_blocks
from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.policy import window

if TYPE_CHECKING:
    from vramjax.checkpoint.packed import Packed
    from vramjax.checkpoint.random_weights import RandomWeights

Row = dict[str, Any]

_PROFILED_TOKENS = 8
_SWEEPS = 8  # of tiles in one timed run


class Subject:
    """A model in host memory, and both its ends and a prompt on the device.

    Example: with context=512 and tokens=32, tokens are decoded at positions 512 to 543, after a prompt of 512.
    """

    def __init__(
        self, weights: Packed | RandomWeights, device: jax.Device, *, keep: int | None, context: int, tokens: int
    ) -> None:
        self.device, self.config = device, weights.config
        self.num_layers, self.layer_bytes = weights.config.num_layers, weights.layout.num_bytes
        self._context, self._tokens = context, tokens
        self._schedule = window(self.num_layers, keep)
        self._store = pinned_store(weights, device)
        self.decoder = Decoder(weights, [device], prompt_tokens=context, max_tokens=tokens)
        shapes, output = head_shapes(weights.config, weights.groups), "embed" if self.config.tied_embeddings else "head"
        self._output_bytes = sum(
            math.prod(shape) * dtype.itemsize
            for name, (shape, dtype) in shapes.items()
            if name in (output, f"{output}_scales")
        )
        self._layer_weights = sum(matrix.n * matrix.k for _, matrix in weights.layout)

    @property
    def num_streamed(self) -> int:
        """Layers that are uploaded for every token."""
        return self._schedule.uploads_per_sweep

    @property
    def token_bytes(self) -> int:
        """What the device reads for a token: weights and, on average over the timed tokens, keys and values."""
        return self._bytes(self._context + self._tokens // 2)

    def controllers(self) -> list[Controller]:
        """The layers for an engine, which closes them."""
        return [Controller(self._store, self._schedule, FusedTransfer(self.device))]

    def check(self, engine: Engine) -> tuple[Run, Row]:
        """One run, and whether another is the same to the last bit."""
        first, second = (self.decoder.generate(engine, self._tokens, check=True) for _ in range(2))
        return first, {
            "ids_equal": first.token_ids == second.token_ids,
            "logits_equal": first.digests == second.digests,
            "logits_finite": first.row["logits_finite"],
            "tokens_compared": len(first.token_ids),
        }

    def time_decode(self, engine: Engine, checked: Run, rounds: int, *, profile: bool) -> Row:
        """Tokens one by one, as a user has them; and apart from that, how long the host takes to queue one."""
        times = []
        for _ in range(rounds):
            run = self.decoder.generate(engine, self._tokens, check=False)
            assert run.token_ids == checked.token_ids
            times.append(run.row["ms_per_token"])
        positions = range(self._context, self._context + self._tokens - 1)
        num_turns = engine.turns_per_call if len(positions) >= engine.turns_per_call else 1
        dispatch = dispatch_ms(self._prefilled(engine), positions, num_turns=num_turns)
        row = {"arm": "decode", "num_tokens": 1, **_times(times), "bytes_per_sweep": self.token_bytes}
        row |= {"dispatch_ms": statistics.median(dispatch), "uploads_per_sweep": self.num_streamed}
        if profile:
            stepper = self._prefilled(engine)
            profiled = positions[:_PROFILED_TOKENS]
            row |= self._profile(lambda: [stepper.decode(p).last_ids for p in profiled], len(profiled))
        return row

    def time_tiles(self, rounds: int, *, profile: bool) -> list[Row]:
        """One row of the decode tile in use, and all of it: in turns, by the same programs and over the same cache.

        Rows are the last tokens of sequences of the context's length, or the last ones of one such sequence.
        """
        size, last = self.decoder.spec.tile_rows, self._context - 1
        rows = {
            f"1 row of {size}": [(0, last, 1, last + 1)],
            f"{size} rows, {size} sequences": [(slot, last, 1, last + 1) for slot in range(size)],
        }
        if last >= size:
            # A token is drawn from each row, as where drafts are checked.
            rows[f"{size} rows, one sequence"] = [(0, last - i, 1, last - i + 1) for i in range(size)][::-1]
        spec = dataclasses.replace(self.decoder.spec, num_slots=size)
        times: dict[str, list[float]] = {arm: [] for arm in rows}
        done = []
        with self.decoder.engine(self.controllers(), spec=spec) as (engine, _):
            stepper = Stepper(engine)
            for slot in range(size):
                stepper.prefill(self.decoder.prompt, slot=slot)

            def sweeps(arm: str) -> list[jax.Array]:
                turns = engine.turns_per_call
                assert _SWEEPS % turns == 0
                return [stepper.tile(rows[arm], num_turns=turns).last_ids for _ in range(_SWEEPS // turns)]

            for i in range(1 + rounds):
                for arm in rows:
                    start = time.perf_counter()
                    jax.block_until_ready(sweeps(arm))
                    if i:  # the first run may find programs that are not ready
                        times[arm].append((time.perf_counter() - start) * 1e3 / _SWEEPS)
            for arm in rows:
                num_sequences = len({slot for slot, *_ in rows[arm]})
                row = {"arm": arm, "num_tokens": len(rows[arm]), **_times(times[arm])}
                row["bytes_per_sweep"] = self._bytes(self._context, num_sequences)
                if profile:
                    row |= self._profile(functools.partial(sweeps, arm), _SWEEPS)
                done.append(row)
        return done

    def time_prefill(self, num_tokens: int, rounds: int, *, profile: bool) -> Row:
        """From a prompt to its first token."""
        spec = dataclasses.replace(self.decoder.spec, context=num_tokens)
        spec = next(iter(with_long_blocks(spec)), spec)
        prompt = make_prompt(num_tokens, self.config.vocab_size)
        with self.decoder.engine(self.controllers(), spec=spec) as (engine, _):

            def first_token() -> int:
                return next(iter(engine.generate(prompt, max_new_tokens=1, sampling=Sampling())))

            first_token()
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                first_token()
                times.append((time.perf_counter() - start) * 1e3)
            row = {"arm": f"prefill {num_tokens}", "num_tokens": num_tokens, **_times(times)}
            row["flops_per_sweep"] = 2 * self._layer_weights * self.num_layers * num_tokens
            if profile:
                row |= self._profile(lambda: Stepper(engine).prefill(prompt).last_ids, 1)
        return row

    def compare_with_reference(self, num_tokens: int) -> Row:
        """Logits of a few tokens after a short prompt beside those of the reference in plain jnp.

        Nothing where only the reference runs anyway.
        """
        spec = self.decoder.spec
        if spec.backend == "reference":
            return {}
        ours = self._logits(spec, num_tokens)
        theirs = self._logits(dataclasses.replace(spec, backend="reference"), num_tokens)
        return reference_error(ours, theirs)

    def _prefilled(self, engine: Engine) -> Stepper:
        """Ready to decode the token after the prompt."""
        stepper = Stepper(engine)
        jax.block_until_ready(stepper.prefill(self.decoder.prompt).last_ids)
        return stepper

    def _logits(self, spec: EngineSpec, num_tokens: int) -> list[np.ndarray]:
        rows: list[np.ndarray] = []
        with self.decoder.engine(self.controllers(), spec=spec, compiled=False) as (engine, _):
            prompt = self.decoder.prompt[:32]
            list(engine.generate(prompt, max_new_tokens=num_tokens, sampling=Sampling(), on_logits=rows.append))
        return rows

    def _bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        """Read by a sweep of a tile in which sequences see so many positions each."""
        config, itemsize = self.config, self.decoder.spec.kv_dtype.itemsize
        kv_bytes = num_positions * 2 * config.num_kv_heads * config.head_dim * itemsize * num_sequences
        return self.num_layers * (self.layer_bytes + kv_bytes) + self._output_bytes

    def _profile(self, work: Callable[[], Any], num_sweeps: int) -> Row:
        kernels = kernel_rows(kernel_times(work, self.device), num_sweeps)
        return {"kernels": kernels, "kernels_ms": sum(kernel["us_per_sweep"] for kernel in kernels) / 1e3}


def reference_error(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> Row:
    """The largest error of any token's logits, relative to their norm, up to the first that another id follows."""
    errors = []
    for mine, other in zip(ours, theirs, strict=True):
        errors.append(float(np.linalg.norm(mine - other) / np.linalg.norm(other)))
        if mine.argmax() != other.argmax():
            break
    ids_equal = all(map(operator.eq, [row.argmax() for row in ours], [row.argmax() for row in theirs]))
    return {
        "reference_error_max": max(errors),
        "reference_tokens_compared": len(errors),
        "reference_ids_equal": bool(ids_equal),
    }


def _times(times: list[float]) -> Row:
    return {"ms_per_sweep": statistics.median(times), "ms_per_sweep_rounds": times}
