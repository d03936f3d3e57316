"""A model ready to decode: weights, tokenizer, engine and residency put together."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np

from vramjax.asking import Prompt, ask, ask_many, finished
from vramjax.decode.decoding import Decoding, DecodingStats
from vramjax.decode.engine import Engine
from vramjax.decode.model_drafting import DraftModel
from vramjax.decode.sampler import Sampling
from vramjax.decode.self_test import check_kernels
from vramjax.decode.speculation import Speculation
from vramjax.devices import choose_devices
from vramjax.draft_model import DraftModelShape, loaded_draft_model
from vramjax.errors import ConfigError
from vramjax.generation import Generation, Token
from vramjax.host_tier import Weights, layers_read_first, make_store, upload_head
from vramjax.memory_request import HostChoice, MemoryRequest, Speculate
from vramjax.planning import MemoryPlan, plan_run
from vramjax.progress import print_notes, progress_bar
from vramjax.residency.controller import Controller, ReleaseMode
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.multi import MultiController, layers_of_device
from vramjax.residency.schedule import Schedule
from vramjax.residency.stats import ResidencyStats
from vramjax.residency.streaming import PolicyName
from vramjax.residency.transfer import out_of_memory_is_a_budget_error
from vramjax.residency.turn_transfer import TurnTransfer
from vramjax.run_stats import run_stats
from vramjax.text.tokenizer import Tokenizer


class LanguageModel:
    """A model on a device, which answers one prompt, or several at the same time.

    Invariant: what it answers depends on the weights, the prompt and the sampling settings, never on the window, nor on
    what else it answers.

    Example::

        with vramjax.load("demo", keep=4, batch=2) as model:
            for token in model.generate("The capital of France is", max_new_tokens=8):
                print(token.text, end="", flush=True)
            print(model.stats()["uploads_per_token"])
            for answer in model.generate_many(["Who was Ada Lovelace?", "Why is the sky blue?", "Hello!"]):
                print(answer.index, answer.text)  # in the order in which they end
    """

    def __init__(
        self,
        weights: Weights,
        tokenizer: Tokenizer | None,
        *,
        device_budget: int | str | None = None,
        keep: int | None = None,
        policy: PolicyName = "pinned_ring",
        release: ReleaseMode = "pool",
        warm_up: bool | None = None,
        context: int | None = None,
        host: HostChoice = "auto",
        host_budget: int | str | None = None,
        devices: Sequence[int | jax.Device] | None = None,
        batch: int = 1,
        batch_or_fewer: bool = False,
        speculate: Speculate = "auto",
        draft: Weights | None = None,
        progress: bool = True,
    ) -> None:
        """Puts the model on the device; see `vramjax.load`. Without a tokenizer prompts are ids and texts are empty.

        `draft` is a model that drafts, of which it is known that it has the same tokens.
        """
        request = MemoryRequest(
            device_budget=device_budget,
            keep=keep,
            policy=policy,
            warm_up=warm_up,
            host=host,
            host_budget=host_budget,
            batch=batch,
            batch_or_fewer=batch_or_fewer,
            speculate=speculate,
        )
        request.check_draft_model(draft)
        if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError(
                "jax_enable_x64 is on; expected it off, as models are computed in 32 bits: unset JAX_ENABLE_X64, or "
                "load and use the model with jax.enable_x64(False)"
            )
        if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
            raise ConfigError("jax_disable_jit is on; expected it off, as models run compiled: unset JAX_DISABLE_JIT")
        self.config, self.tokenizer = weights.config, tokenizer
        # More devices than layers would have nothing to do.
        self.devices = choose_devices(devices)[: self.config.num_layers]
        self.spec, self.plans = plan_run(
            weights.config,
            weights.groups,
            request,
            context=context,
            devices=self.devices,
            draft=None if draft is None else DraftModelShape(config=draft.config, groups=draft.groups),
        )
        for device, plan in zip(self.devices, self.plans, strict=True):
            which = f"{device}: " if len(self.devices) > 1 else ""
            print_notes([f"{which}{note}" for note in plan.notes], enabled=progress)
        if release == "free" and not _frees_for_real(self.device):
            warnings.warn(
                "release='free' gives memory back to JAX's allocator, which keeps it; for a real cudaFree set "
                "XLA_PYTHON_CLIENT_ALLOCATOR=platform before JAX starts",
                stacklevel=2,
            )
        for device in self.devices:
            check_kernels(device)
        self._stop_ids = frozenset(self.config.eos_token_ids) | (tokenizer.stop_ids if tokenizer else frozenset())
        self._last: Generation | None = None
        self._decoding: Decoding | None = None  # of the last call of `generate` or `generate_many`
        with contextlib.ExitStack() as opened:
            draft_model = None
            if draft is not None:
                loaded = loaded_draft_model(draft, self.spec, self.device, progress=progress)
                draft_model = opened.enter_context(loaded)
            transfers = [_transfer(device, len(self.devices)) for device in self.devices]
            # What never leaves comes first: it is read when nothing else takes host memory.
            head = upload_head(weights, transfers[0])
            opened.callback(transfers[0].free, head)
            num_layers = sum(len(layers_read_first(plan.schedule, plan.host)) for plan in self.plans)
            num_bytes = num_layers * self.spec.layout.num_bytes
            self._stores, controllers = [], []
            with progress_bar("Loading", total=num_bytes, enabled=progress and num_bytes > 0) as advance:
                for i, (device, plan) in enumerate(zip(self.devices, self.plans, strict=True)):
                    layers = layers_of_device(i, self.config.num_layers, len(self.devices))
                    store = make_store(weights, layers, plan.schedule, plan.host, device, advance)
                    opened.callback(store.close)
                    self._stores.append(store)
                    controllers.append(Controller(store, plan.schedule, transfers[i], release=release))
                    opened.callback(controllers[i].close)
                self._controller = MultiController(controllers)
                with out_of_memory_is_a_budget_error(self.device, "the KV cache and the first step"):
                    self._engine = Engine(
                        spec=self.spec,
                        head=head,
                        controller=self._controller,
                        device=self.devices,
                        speculation=self._speculation(speculate, draft_model),
                    )
                    opened.callback(self._engine.close)
                    self._engine.compile()
                self._controller.warm_up()
            self._opened = opened.pop_all()

    @property
    def device(self) -> jax.Device:
        """The first device, where both ends of the model are."""
        return self.devices[0]

    @property
    def plan(self) -> MemoryPlan:
        """The first device's plan; `plans` are those of all."""
        return self.plans[0]

    @property
    def schedule(self) -> Schedule:
        """The first device's schedule, over its own layers."""
        return self.plan.schedule

    def generate(
        self,
        prompt: Prompt,
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
            belongs to the last one.
        """
        asked = ask(prompt, max_new_tokens=max_new_tokens, sampling=sampling, chat=chat, **self._settings(ignore_stop))
        decoding = self._engine.decode([asked.request], on_logits=on_logits and (lambda _, row: on_logits(row)))
        self._last, self._decoding = asked.generation((new.id for new in decoding), self.tokenizer), decoding
        return self._last

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 256,
        sampling: Sampling | Sequence[Sampling | None] | None = None,
        chat: bool | None = None,
        ignore_stop: bool = False,
        on_token: Callable[[int, Token], None] | None = None,
        on_logits: Callable[[int, np.ndarray], None] | None = None,
    ) -> Iterator[Generation]:
        """Answers prompts, as many at the same time as `batch` says; each as `generate` would answer it alone.

        Yields each answer when it is finished, in the order in which they are; `index` is its prompt's place. Work is
        done as answers are asked for. Prompts that there is no room for wait until others are finished.

        Args:
          prompts: each as for `generate`.
          max_new_tokens: of each answer, one number or one for each prompt.
          sampling: likewise.
          chat: as for `generate`.
          ignore_stop: as for `generate`.
          on_token: gets a prompt's place and a new token of its answer, as they come.
          on_logits: gets a prompt's place and the float32 logits [V] of a new token.

        Raises:
          ConfigError, TextError: a prompt cannot be used; the message says which.
          VramjaxError: the model is closed. Also from the iterator, once another generation has begun.
        """
        asked = ask_many(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, chat=chat, **self._settings(ignore_stop)
        )
        generations = [one.generation(iter(()), self.tokenizer, i) for i, one in enumerate(asked)]
        self._decoding = self._engine.decode([one.request for one in asked], on_logits=on_logits)
        return self._remembered(finished(self._decoding, generations, on_token))

    def _speculation(self, speculate: Speculate, draft_model: DraftModel | None) -> Speculation | None:
        is_streamed = any(plan.num_streamed for plan in self.plans)
        if speculate in ("off", 0) or (speculate == "auto" and not is_streamed and draft_model is None):
            return None
        return Speculation(
            tile_rows=self.spec.tile_rows,
            max_rows=self.spec.max_rows,
            is_streamed=is_streamed,
            depth=None if speculate == "auto" else self.spec.depth,
            model=draft_model,
        )

    def _remembered(self, generations: Iterator[Generation]) -> Iterator[Generation]:
        for self._last in generations:
            yield self._last

    def _settings(self, ignore_stop: bool) -> dict[str, Any]:
        """What is the same for all prompts."""
        stop_ids = frozenset() if ignore_stop else self._stop_ids
        return {"stop_ids": stop_ids, "tokenizer": self.tokenizer, "spec": self.spec}

    @property
    def residency(self) -> ResidencyStats:
        """Counters of the residency controllers, over all devices."""
        return self._controller.stats

    def stats(self) -> dict[str, Any]:
        """Everything measured so far, as plain JSON values; timings are those of the last call that generated."""
        return run_stats(
            plans=self.plans,
            spec=self.spec,
            counters=self._controller.stats,
            last=self._last,
            decoding=self._decoding.stats if self._decoding else DecodingStats(),
            draft_s=self._engine.speculation.draft_s if self._engine.speculation else None,
            is_pinned=all(
                store.is_pinned for store, plan in zip(self._stores, self.plans, strict=True) if plan.num_streamed
            ),
            devices=self.devices,
        )

    def close(self) -> None:
        """Gives all device memory back, and the host memory of the layers. Closing again does nothing."""
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _transfer(device: jax.Device, num_devices: int) -> FusedTransfer:
    """How layers are uploaded: in the layer step, unless other devices would have to wait for them there."""
    return FusedTransfer(device) if num_devices == 1 else TurnTransfer(device, num_devices=num_devices)


def _frees_for_real(device: jax.Device) -> bool:
    return device.platform == "cpu" or os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform"
