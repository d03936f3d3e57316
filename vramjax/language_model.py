"""A model ready to decode: weights, tokenizer, engine and residency put together. What `vramjax.load` returns."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import jax
import numpy as np

from pallas_kernels import default_backend
from vramjax.checkpoint.resolve import open_model
from vramjax.config import ModelConfig
from vramjax.decode.engine import Engine, EngineSpec
from vramjax.decode.sampler import Sampling
from vramjax.decode.self_test import check_kernels
from vramjax.errors import BudgetError, ConfigError
from vramjax.generation import Generation
from vramjax.layout import LayerLayout
from vramjax.memory import free_device_bytes, free_host_bytes
from vramjax.model.kv_cache import cache_bytes, capacity
from vramjax.progress import progress_bar
from vramjax.residency.budget import DeviceBytes
from vramjax.residency.controller import Controller, ReleaseMode
from vramjax.residency.host_store import HostStore, LazyStore
from vramjax.residency.policy import Schedule, window
from vramjax.residency.stats import ResidencyStats
from vramjax.residency.streaming import PolicyName
from vramjax.residency.transfer import DeviceTransfer, out_of_memory_is_a_budget_error
from vramjax.text.prompt import Message, encode_prompt
from vramjax.text.tokenizer import Tokenizer
from vramjax.units import gib

DEFAULT_CONTEXT = 4096


class Weights(Protocol):
    """Where layers come from: a packed directory, or weights made on the spot for a benchmark."""

    config: ModelConfig
    groups: dict[str, int]
    layout: LayerLayout

    @property
    def head_nbytes(self) -> int: ...
    def load_layer(self, layer_idx: int) -> dict[str, np.ndarray]: ...
    def load_head(self) -> dict[str, np.ndarray]: ...


def load(
    model: str | Path,
    *,
    keep: int | None = None,
    policy: PolicyName = "past",
    release: ReleaseMode = "pool",
    warm_up: bool | None = None,
    context: int | None = None,
    device: jax.Device | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> LanguageModel:
    """Loads a model for decoding.

    Args:
      model: a packed directory, a Hugging Face directory, a GGUF file, a Hub id or "demo". What is not packed is
        converted once into a cache.
      keep: layers of the window that stay on the device behind the current one; None: every layer is resident.
      policy: "past"; "pinned_ring", which holds exactly `keep` layers and uploads least; or "both_sides", a worse one
        for comparison.
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
    packed = open_model(model, cache_dir=Path(cache_dir) if cache_dir is not None else None, progress=progress)
    return LanguageModel(
        packed,
        open_tokenizer(packed.path),
        keep=keep,
        policy=policy,
        release=release,
        warm_up=warm_up,
        context=context,
        device=device,
        progress=progress,
    )


def open_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a packed directory, or None if it has none: then prompts are token ids.

    Raises:
      TextError: there is one, and it cannot be used.
    """
    return Tokenizer.from_dir(path) if (path / "tokenizer.json").exists() else None


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
    if not _is_whole(context) or not 0 < context <= config.max_positions:
        raise ConfigError(f"context is {context!r}; expected 1 .. {config.max_positions}, the model's maximum")
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
        if not isinstance(device, jax.Device | None):
            raise ConfigError(f"device is {device!r}; expected one of jax.devices(), or None for the first")
        self.device = device if device is not None else jax.devices()[0]
        self.config, self.tokenizer = weights.config, tokenizer
        self.spec = engine_spec(weights.config, weights.groups, context=context, device=self.device)
        self.schedule = window(self.config.num_layers, keep, policy, warm=warm_up)
        self.device_bytes = device_bytes(self.spec, self.schedule, weights.head_nbytes)
        self._check_memory(policy)
        if release == "free" and not _frees_for_real(self.device):
            warnings.warn(
                "release='free' gives memory back to JAX's allocator, which keeps it; for a real cudaFree set "
                "XLA_PYTHON_CLIENT_ALLOCATOR=platform before JAX starts",
                stacklevel=2,
            )
        check_kernels(self.device)
        self._stop_ids = frozenset(self.config.eos_token_ids) | (tokenizer.stop_ids if tokenizer else frozenset())
        self._last: Generation | None = None
        with contextlib.ExitStack() as on_failure:
            transfer = DeviceTransfer(self.device)
            # What never leaves comes first: it is read when nothing else takes host memory.
            head = transfer.upload(weights.load_head(), None)
            on_failure.callback(transfer.free, head)
            num_bytes = self.config.num_layers * self.spec.layout.num_bytes
            with progress_bar("Loading", total=num_bytes, enabled=progress) as advance:
                store = self._make_store(weights, advance)
                if isinstance(store, HostStore) and not store.is_pinned:
                    release = "free"  # JAX copies into given memory only from pinned arrays
                self._controller = Controller(store, self.schedule, transfer, release=release)
                on_failure.callback(self._controller.close)
                with out_of_memory_is_a_budget_error(self.device, "the KV cache and the first step"):
                    self._engine = Engine(spec=self.spec, head=head, controller=self._controller, device=self.device)
                    on_failure.callback(self._engine.close)
                    self._engine.compile()
                self._controller.warm_up()
            on_failure.pop_all()

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
          VramjaxError: the model is closed. Also from the iterator, once another generation has begun: the KV cache
            holds one sequence.
        """
        if not _is_whole(max_new_tokens) or max_new_tokens < 0:
            raise ConfigError(f"max_new_tokens is {max_new_tokens!r}; expected a whole number, 0 or more")
        if not isinstance(sampling, Sampling | None):
            raise ConfigError(f"sampling is {sampling!r}; expected a vramjax.Sampling, or None for greedy decoding")
        ids = encode_prompt(self.tokenizer, prompt, chat=chat)
        stop_ids = frozenset() if ignore_stop else self._stop_ids
        new_ids = self._engine.generate(
            ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling or Sampling(),
            stop_ids=stop_ids,
            on_logits=on_logits,
        )
        self._last = Generation(
            new_ids,
            limit=self._engine.limit(len(ids), max_new_tokens),
            max_new_tokens=max_new_tokens,
            num_prompt_tokens=len(ids),
            stop_ids=stop_ids,
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
        # A first sweep starts from another state than every later one: where there was no other, what will be is known.
        uploads = self.schedule.uploads_per_sweep
        bytes_streamed = uploads * self.spec.layout.num_bytes
        if counters.last_sweep_is_steady:
            uploads, bytes_streamed = counters.last_sweep_uploads, counters.last_sweep_bytes_uploaded
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
            "layer_bytes": self.spec.layout.num_bytes,
            "peak_layer_bytes": counters.peak_device_bytes,
            "head_bytes": self.device_bytes.head_bytes,
            "kv_bytes": self.device_bytes.kv_bytes,
            "planned_peak_bytes": self.device_bytes.total_bytes,
            "allocator_peak_bytes": peak,  # of the process, whatever else it had on the device; None if not counted
            "context": capacity(self.spec.context),
            "device": self.device.device_kind,
            "backend": self.spec.backend,
            "jax_version": jax.__version__,
        }

    def close(self) -> None:
        """Gives all device memory back."""
        self._engine.close()

    def _check_memory(self, policy: PolicyName) -> None:
        """Refuses what will not fit before anything is read."""
        num_layers, needed = self.config.num_layers, self.device_bytes
        needed.check(
            free_device_bytes(self.device), num_layers, lambda k: window(num_layers, k, policy).peak_resident_layers
        )
        if not self.schedule.releases:
            return  # nothing stays on the host
        host_bytes = (num_layers + 1) * needed.layer_bytes + (
            needed.total_bytes if self.device.platform == "cpu" else 0
        )
        if (free := free_host_bytes()) < host_bytes:
            raise BudgetError(
                f"{num_layers} layers of {gib(needed.layer_bytes)} wait in host memory and need {gib(host_bytes)}; "
                f"{gib(free)} are free: free some, or take a smaller model"
            )

    def _make_store(self, weights: Weights, advance: Callable[[int], None]) -> HostStore | LazyStore:
        def read_layer(layer_idx: int) -> dict[str, np.ndarray]:
            layer = weights.load_layer(layer_idx)
            advance(self.spec.layout.num_bytes)
            return layer

        num_layers = self.config.num_layers
        if self.schedule.releases:
            return HostStore((read_layer(i) for i in range(num_layers)), self.device)
        return LazyStore(read_layer, num_layers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _frees_for_real(device: jax.Device) -> bool:
    return device.platform == "cpu" or os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform"


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
