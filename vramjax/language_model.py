"""A model ready to decode: weights, tokenizer, engine and residency put together. What `vramjax.load` returns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import jax
import numpy as np

from pallas_kernels import default_backend
from vramjax.checkpoint.resolve import open_model
from vramjax.config import ModelConfig
from vramjax.decode.engine import Engine, EngineSpec
from vramjax.decode.sampler import Sampling
from vramjax.decode.self_test import check_kernels
from vramjax.errors import ConfigError
from vramjax.layout import LayerLayout
from vramjax.model.kv_cache import cache_bytes, capacity
from vramjax.progress import progress_bar
from vramjax.residency.budget import DeviceBytes
from vramjax.residency.controller import Controller, ReleaseMode
from vramjax.residency.host_store import HostStore, LazyStore
from vramjax.residency.policy import Schedule, both_sides_window, past_window, resident
from vramjax.residency.stats import ResidencyStats
from vramjax.residency.streaming import PolicyName
from vramjax.residency.transfer import DeviceTransfer
from vramjax.text.prompt import Message, encode_prompt
from vramjax.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096
FinishReason = Literal["stop", "length", "context"]


class Weights(Protocol):
    """Where layers come from: a packed directory, or weights made on the spot for a benchmark."""

    config: ModelConfig
    groups: dict[str, int]
    layout: LayerLayout

    @property
    def head_nbytes(self) -> int: ...
    def load_layer(self, layer_idx: int) -> dict[str, np.ndarray]: ...
    def load_head(self) -> dict[str, np.ndarray]: ...


@dataclass(frozen=True, kw_only=True)
class Token:
    """One new token. `text` is what can be shown now: nothing while a character is incomplete."""

    id: int
    text: str


def load(
    model: str | Path,
    *,
    keep: int | None = None,
    policy: PolicyName = "past",
    release: ReleaseMode = "pool",
    warm_up: bool | None = None,
    context: int | None = None,
    device: jax.Device | None = None,
    cache_dir: Path | None = None,
    progress: bool = True,
) -> LanguageModel:
    """Loads a model for decoding.

    Args:
      model: a packed directory, a Hugging Face directory, a GGUF file, a Hub id or "demo". What is not packed is
        converted once into a cache.
      keep: layers of the window that stay on the device behind the current one; None: every layer is resident.
      policy: "past", or "both_sides", a worse one for comparison.
      release: "pool" recycles device memory; "free" gives it back each time, for comparison.
      warm_up: upload before the first prompt what a sweep begins with. None: only when every layer is resident.
      context: positions that prompt and answer may take; None: 4096, or the model's maximum if that is less.
      device: None is JAX's first device.
      cache_dir: where conversions are kept; None: $VRAMJAX_CACHE or ~/.cache/vramjax.
      progress: whether to show bars and notes on stderr.

    Raises:
      CheckpointError, ConfigError, TextError: the model or an argument cannot be used.
      BudgetError: it does not fit; the message names the largest `keep` that would.
    """
    packed = open_model(model, cache_dir=cache_dir, progress=progress)
    return LanguageModel(
        packed,
        Tokenizer.from_dir(packed.path),
        keep=keep,
        policy=policy,
        release=release,
        warm_up=warm_up,
        context=context,
        device=device,
        progress=progress,
    )


def make_schedule(num_layers: int, keep: int | None, policy: PolicyName, *, warm: bool | None = None) -> Schedule:
    """The schedule that a window asks for; every layer resident when there is none, or it holds all layers."""
    if keep is None:
        return resident(num_layers, warm=warm is not False)
    return {"past": past_window, "both_sides": both_sides_window}[policy](num_layers, keep, warm=bool(warm))


def device_bytes(spec: EngineSpec, schedule: Schedule, head_bytes: int) -> DeviceBytes:
    """What a run takes on the device at its peak."""
    return DeviceBytes(
        layer_bytes=spec.layout.num_bytes,
        peak_layers=schedule.peak_resident_layers,
        head_bytes=head_bytes,
        kv_bytes=cache_bytes(spec.config, 1, spec.context, spec.kv_dtype),
        workspace_bytes=spec.workspace_bytes,
    )


def engine_spec(
    config: ModelConfig, groups: Mapping[str, int], *, context: int | None, device: jax.Device
) -> EngineSpec:
    """The programs that `device` will run. A CPU decodes in float32 and in smaller tiles: it computes unused rows too.

    Raises:
      ConfigError: the context is not positive or beyond the model's maximum.
    """
    if context is None:
        context = min(DEFAULT_CONTEXT, config.max_positions)
    if not 0 < context <= config.max_positions:
        raise ConfigError(f"context is {context}; expected 1 .. {config.max_positions}, the model's maximum")
    on_cpu = device.platform == "cpu"
    return EngineSpec(
        config=config,
        layout=LayerLayout.of(config, groups),
        groups=tuple(sorted(groups.items())),
        backend=default_backend(device),
        kv_dtype=np.dtype(np.float32) if on_cpu else jax.numpy.dtype("bfloat16"),
        context=context,
        tile_rows=8 if on_cpu else 16,
        chunk_rows=128 if on_cpu else 256,
    )


class LanguageModel:
    """A model on a device, which answers one prompt at a time.

    Invariant: what it answers depends on the weights, the prompt and the sampling settings, never on the window.

    Example::

        with vramjax.load("demo", keep=4) as model:
            for token in model.generate("The capital of France is", max_new_tokens=8):
                print(token.text, end="", flush=True)
            print(model.stats()["uploads_per_token"])
    """

    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer | None,
        *,
        keep: int | None = None,
        policy: PolicyName = "past",
        release: ReleaseMode = "pool",
        warm_up: bool | None = None,
        context: int | None = None,
        device: jax.Device | None = None,
        progress: bool = True,
    ) -> None:
        """Puts the model on the device; see `load`. Without a tokenizer prompts are token ids and texts are empty."""
        self.device = device if device is not None else jax.devices()[0]
        self.config, self.tokenizer = weights.config, tokenizer
        self.spec = engine_spec(weights.config, weights.groups, context=context, device=self.device)
        self.schedule = make_schedule(self.config.num_layers, keep, policy, warm=warm_up)
        self.bytes = device_bytes(self.spec, self.schedule, weights.head_nbytes)
        self.bytes.check(
            free_device_bytes(self.device),
            self.config.num_layers,
            lambda k: make_schedule(self.config.num_layers, k, policy).peak_resident_layers,
        )
        check_kernels(self.device)
        self._stop_ids = frozenset(self.config.eos_token_ids) | (tokenizer.stop_ids if tokenizer else frozenset())
        self._last: Generation | None = None
        num_layers = self.config.num_layers
        with progress_bar("Loading", total=num_layers * self.spec.layout.num_bytes, enabled=progress) as advance:

            def read_layer(layer_idx: int) -> dict[str, np.ndarray]:
                layer = weights.load_layer(layer_idx)
                advance(self.spec.layout.num_bytes)
                return layer

            if self.schedule.releases:
                store = HostStore((read_layer(i) for i in range(num_layers)), self.device)
            else:
                store = LazyStore(read_layer, num_layers)
            transfer = DeviceTransfer(self.device)
            self._controller = Controller(store, self.schedule, transfer, release=release)
            self._controller.warm_up()
            head = transfer.upload(weights.load_head(), None)
        self._engine = Engine(spec=self.spec, head=head, controller=self._controller, device=self.device)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | None = None,
        chat: bool | None = None,
        ignore_stop: bool = False,
        on_logits: Callable[[np.ndarray], None] | None = None,
    ) -> Generation:
        """Starts to answer a prompt; iterate over the result for tokens as they come.

        Args:
          prompt: a text, token ids, or chat messages ({"role": ..., "content": ...}).
          max_new_tokens: where to end at the latest; the end of the context ends it too.
          sampling: greedy if None.
          chat: whether a text is put into the model's chat template as a user's message; None: if there is one.
          ignore_stop: go on after stop tokens, for measurements.
          on_logits: gets the float32 logits [V] of each new token.

        Raises:
          ConfigError, TextError: the prompt cannot be used.
        """
        ids = encode_prompt(self.tokenizer, prompt, chat=chat)
        self._last = Generation(
            tokens=self._engine.generate(
                ids,
                max_new_tokens=max_new_tokens,
                sampling=sampling or Sampling(),
                stop_ids=frozenset() if ignore_stop else self._stop_ids,
                on_logits=on_logits,
            ),
            num_prompt_tokens=len(ids),
            max_new_tokens=max_new_tokens,
            stop_ids=self._stop_ids,
            tokenizer=self.tokenizer,
        )
        return self._last

    @property
    def residency(self) -> ResidencyStats:
        """Counters of the residency controller."""
        return self._controller.stats

    def stats(self) -> dict[str, Any]:
        """Everything measured so far, as plain JSON values; timings are those of the last generation."""
        counters, last = self._controller.stats, self._last
        # The first sweep is the prompt's and starts from another state; every sweep after it is one token's.
        steady = counters.sweeps > 1
        uploads = counters.last_sweep_uploads if steady else self.schedule.uploads_per_sweep
        peak = (self.device.memory_stats() or {}).get("peak_bytes_in_use")
        return {
            "token_ids": list(last.token_ids) if last else [],
            "text": last.text if last else "",
            "finish_reason": last.finish_reason if last else None,
            "num_prompt_tokens": last.num_prompt_tokens if last else 0,
            "prefill_s": last.prefill_s if last else None,
            "ms_per_token": last.ms_per_token if last else None,
            "num_layers": self.config.num_layers,
            "policy": self.schedule.name,
            "keep": self.schedule.keep,
            "uploads_per_token": uploads,
            "bytes_streamed_per_token": uploads * self.spec.layout.num_bytes,
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
            "layer_bytes": self.spec.layout.num_bytes,
            "peak_layer_bytes": counters.peak_device_bytes,
            "head_bytes": self.bytes.head_bytes,
            "kv_bytes": self.bytes.kv_bytes,
            "planned_peak_bytes": self.bytes.total_bytes,
            "allocator_peak_bytes": peak,
            "context": capacity(self.spec.context),
            "device": self.device.device_kind,
            "backend": self.spec.backend,
            "jax_version": jax.__version__,
        }

    def close(self) -> None:
        """Gives all device memory back."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Generation:
    """The answer to one prompt: an iterator of tokens, which afterwards holds the whole."""

    def __init__(
        self,
        *,
        tokens: Iterator[int],
        num_prompt_tokens: int,
        max_new_tokens: int,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.num_prompt_tokens = num_prompt_tokens
        self.prefill_s: float | None = None  # from the start to the first token
        self.finish_reason: FinishReason | None = None
        self._stream = tokenizer.stream() if tokenizer else None
        self._first_at = self._last_at = 0.0
        self._iterator = self._run(tokens, max_new_tokens, stop_ids)

    def __iter__(self) -> Iterator[Token]:
        return self

    def __next__(self) -> Token:
        return next(self._iterator)

    @property
    def ms_per_token(self) -> float | None:
        """The mean over all tokens but the first, whose time is that of the prompt."""
        if len(self.token_ids) < 2:
            return None
        return (self._last_at - self._first_at) / (len(self.token_ids) - 1) * 1e3

    def finish(self) -> Self:
        """Runs to the end."""
        for _ in self:
            pass
        return self

    def _run(self, tokens: Iterator[int], max_new_tokens: int, stop_ids: frozenset[int]) -> Iterator[Token]:
        started = time.perf_counter()
        for token_id in tokens:
            self._last_at = time.perf_counter()
            if self.prefill_s is None:
                self.prefill_s, self._first_at = self._last_at - started, self._last_at
            self.token_ids.append(token_id)
            yield Token(id=token_id, text=self._add_text(self._stream.push(token_id) if self._stream else ""))
        if self.token_ids and self.token_ids[-1] in stop_ids:
            self.finish_reason = "stop"
        else:
            self.finish_reason = "length" if len(self.token_ids) == max_new_tokens else "context"
        if self._stream and (rest := self._stream.finish()):
            yield Token(id=self.token_ids[-1], text=self._add_text(rest))

    def _add_text(self, piece: str) -> str:
        self.text += piece
        return piece


def free_device_bytes(device: jax.Device) -> int:
    """Bytes that a run may take on `device`: what its allocator may still hand out, or free host memory on a CPU."""
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if device.platform != "cpu":
        return sys.maxsize  # an allocator that keeps no statistics; what does not fit is noticed when it is made
    with open("/proc/meminfo") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024
