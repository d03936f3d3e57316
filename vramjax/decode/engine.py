"""The decode engine: the only loop over layers, through which prefill and decode both go.

At every layer boundary the residency controller moves on by one step of its schedule; the engine only uses the weights
that it is handed. Within a token nothing waits for the device: sampling and the next token's embedding happen there,
and the host reads a token's id after it has queued the next token's work.

Layers may lie on several devices in turns, each with its KV cache beside it: what goes from layer to layer hops from
device to device, which the host does not wait for either. Both ends of the model are on the first one.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import Backend
from pallas_kernels.attention import SPLIT
from pallas_kernels.q8_matmul import scratch_bytes
from vramjax.config import ModelConfig
from vramjax.decode.sampler import Sampling, sample
from vramjax.errors import ConfigError, VramjaxError
from vramjax.layout import LayerLayout
from vramjax.model.head import HeadSpec, HeadWeights, embed, logits
from vramjax.model.kv_cache import capacity, make_cache
from vramjax.model.layer import LayerSpec, layer_step
from vramjax.residency.controller import Controller
from vramjax.residency.multi import MultiController
from vramjax.residency.transfer import out_of_memory_is_a_budget_error

SPARE_BYTES = 32 << 20  # what a compiler and an allocator take that nobody can see
NUM_SEQUENCES = 1  # one at a time: the first row of the tile, the only slot of the cache


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Everything that decides which programs are compiled; it does not grow with layers, prompts or tokens."""

    config: ModelConfig
    layout: LayerLayout
    groups: tuple[tuple[str, int], ...]  # matrix name -> inputs per group
    backend: Backend
    kv_dtype: np.dtype
    context: int  # positions a sequence may take
    tile_rows: int = 16  # rows of a decode step, in use or not
    chunk_rows: int = 256  # rows of a prefill step

    @functools.cached_property
    def layer(self) -> LayerSpec:
        return LayerSpec(config=self.config, layout=self.layout, backend=self.backend)

    @functools.cached_property
    def head(self) -> HeadSpec:
        groups = dict(self.groups)
        return HeadSpec(
            config=self.config,
            embed_group=groups["embed"],
            head_group=groups.get("head", groups["embed"]),
            backend=self.backend,
        )

    @property
    def workspace_bytes(self) -> int:
        """An upper estimate of what activations, attention splits, logits and sampling take at once."""
        config, rows = self.config, max(self.chunk_rows, self.tile_rows)
        widest = max(spec.n_padded + spec.k_padded for _, spec in self.layout)
        products = max(scratch_bytes(rows, spec.values_shape, spec.group) for _, spec in self.layout)
        num_splits = capacity(self.context) // SPLIT
        attention = rows * config.num_heads * config.head_dim * (num_splits + 2)
        prefill = -(-self.context // self.chunk_rows) * self.chunk_rows * config.hidden_size
        # Logits of all rows of the tile; sorting and drawing takes about eight times those of the rows in use.
        head = (2 * self.tile_rows + 12 * NUM_SEQUENCES) * config.vocab_size
        return SPARE_BYTES + products + 4 * (3 * rows * widest + attention + prefill + head)


class Engine:
    """Decodes one sequence at a time over weights that a residency controller provides.

    Invariant: between two calls the KV cache of every layer is whole, and positions past a row's own are never read,
    so that one sequence leaves nothing behind for the next.

    Example: with tile_rows=8 and chunk_rows=128 a prompt of 300 tokens crosses layer 0 in three chunks, then layer 1,
    and so on: one sweep. Each new token is one more sweep of 8 rows, of which the first is in use.
    """

    def __init__(
        self,
        *,
        spec: EngineSpec,
        head: HeadWeights,
        controller: Controller | MultiController,
        device: jax.Device | Sequence[jax.Device],
    ) -> None:
        """Makes the KV cache of every layer on the layer's device.

        Args:
          spec: what to compile.
          head: both ends of the model, on the first device.
          controller: provides the layers.
          device: the controller's device; those of a `MultiController`, in the order of its controllers.
        """
        self._spec, self._head = spec, head
        self._layers = controller if isinstance(controller, MultiController) else MultiController([controller])
        self._devices = list(device) if isinstance(device, Sequence) else [device]
        assert len(self._devices) == self._layers.num_devices
        self._kv = [self._make_cache(i) for i in range(spec.config.num_layers)]
        # Uploads run inside these. A prompt's chunks take long enough for one to carry all that is to be uploaded.
        self._decode_layer = self._jit_layer_step(spread=True)
        self._prefill_layer = self._jit_layer_step(spread=False)
        self._slot_0 = self._everywhere(np.int32(0))
        self._all_in_slot_0 = self._everywhere(np.zeros(spec.tile_rows, np.int32))
        self._lock = threading.Lock()  # held while a generation works; between two of its tokens another may begin
        self._current: object | None = None  # the generation whose keys and values the cache holds
        self._closed = False

    def limit(self, num_prompt_tokens: int, max_new_tokens: int) -> int:
        """New tokens that fit. The last one needs no position of its own: nothing is decoded from it."""
        return min(max_new_tokens, self._spec.context - num_prompt_tokens + 1)

    def compile(self) -> None:
        """Runs every program of greedy decoding once, on zeros, so that no prompt has to wait for a compiler.

        Takes the memory of two more layers while it runs. Rows that are not in use write nothing to the cache.
        """
        spec = self._spec
        chunk = embed_step(self._head, self._put(np.zeros(spec.chunk_rows, np.int32)), spec=spec.head)
        unused = self._put(np.full(spec.chunk_rows, -1, np.int32))
        tile, positions = first_row(chunk, unused, 0, tile_rows=spec.tile_rows)
        jax.block_until_ready(self._token_step(tile, positions, Sampling()))
        for device_idx in range(len(self._devices)):
            self._compile_layer(device_idx)

    def _compile_layer(self, device_idx: int) -> None:
        """Both layer steps of a device, alone and with every upload that they will take along.

        Those are programs of their own to a compiler, so here is seen whether they compute the same.
        """
        spec, device = self._spec, self._devices[device_idx]
        weights = {name: jnp.full(*layout, device=device) for name, layout in _ones(spec.layout).items()}

        def run(step: Callable[..., Any], num_rows: int, slots: jax.Array) -> np.ndarray:
            h = jnp.sin(jnp.arange(num_rows * spec.config.hidden_size, dtype=jnp.float32, device=device))
            h = h.reshape(num_rows, -1)
            unused = jax.device_put(np.full(num_rows, -1, np.int32), device)
            kv = self._kv[device_idx]  # of the device's first layer
            h, self._kv[device_idx] = step(weights, kv, h, slots, unused, spec=spec.layer)
            return np.asarray(h)

        def run_as_before(call: Callable[[], np.ndarray], before: np.ndarray) -> None:
            if call().tobytes() != before.tobytes():
                raise VramjaxError(
                    f"on {device} with jax {jax.__version__} a layer gives other bits when an upload travels in its "
                    f"program; expected the same: take the policy 'past', whose uploads are programs of their own"
                )

        prefill = functools.partial(run, self._prefill_layer[device_idx], spec.chunk_rows, self._slot_0[device_idx])
        decode = functools.partial(run, self._decode_layer[device_idx], spec.tile_rows, self._all_in_slot_0[device_idx])
        controller = self._layers.controllers[device_idx]
        controller.rehearse(functools.partial(run_as_before, prefill, prefill()), spread=False)
        controller.rehearse(functools.partial(run_as_before, decode, decode()))

    def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
        on_logits: Callable[[np.ndarray], None] | None = None,
    ) -> Iterator[int]:
        """An iterator of new token ids, the last one a stop id if there was one; work begins with the first `next`.

        `on_logits` gets float32 [V] of each token, before sampling; it costs a copy to the host per token.

        The cache holds one sequence: an iterator that is asked for more after another one has begun raises
        VramjaxError.

        Raises:
          ConfigError: the prompt is empty, has an id out of range, or leaves no room in the context.
          VramjaxError: the engine is closed.
        """
        self._check_open()
        check_prompt(prompt_ids, self._spec.config, self._spec.context)
        limit = self.limit(len(prompt_ids), max_new_tokens)
        return self._generate(prompt_ids, limit, sampling, stop_ids, on_logits)

    def close(self) -> None:
        """Gives all device memory back."""
        self._closed = True
        self._layers.close()
        for array in (*self._kv, *self._head.values(), *self._slot_0, *self._all_in_slot_0):
            array.delete()

    def _generate(
        self,
        prompt_ids: Sequence[int],
        limit: int,
        sampling: Sampling,
        stop_ids: frozenset[int],
        on_logits: Callable[[np.ndarray], None] | None,
    ) -> Iterator[int]:
        if limit == 0:
            return
        me = object()
        with self._lock:
            self._check_open()
            self._current = me
            with self._nothing_kept_on_failure():
                step = self._token_step(*self._prefill(prompt_ids), sampling)
                token_id = _read(step, on_logits)  # nothing is queued before: the first token is not kept back by it
        yield token_id
        following: TokenStep | None = None
        for num_generated in range(2, limit + 1):
            if token_id in stop_ids:
                return
            with self._lock:
                self._check_open()
                if self._current is not me:
                    raise VramjaxError(
                        "another generation has begun on this model, which holds one sequence at a time; finish one "
                        "before you start the next"
                    )
                with self._nothing_kept_on_failure():
                    step = following or self._decode(step, sampling)
                    # The next token's work is queued before this one's id is read: the device never waits for the host.
                    if num_generated < limit:
                        following = self._decode(step, sampling)
                        step.ids.copy_to_host_async()
                    token_id = _read(step, on_logits)
            yield token_id

    def _check_open(self) -> None:
        if self._closed:
            raise VramjaxError("the model is closed and off the device; load it again")

    def _prefill(self, prompt_ids: Sequence[int]) -> tuple[jax.Array, jax.Array]:
        """One sweep, layer-major: all chunks cross a layer before the next. Returns the tile of the first token."""
        size, count = self._spec.chunk_rows, len(prompt_ids)
        num_chunks = -(-count // size)
        ids = np.zeros((num_chunks, size), np.int32)
        ids.reshape(-1)[:count] = prompt_ids
        positions = np.full((num_chunks, size), -1, np.int32)
        positions.reshape(-1)[:count] = np.arange(count)
        position_rows = [self._put(row) for row in positions]
        chunks = [embed_step(self._head, self._put(row), spec=self._spec.head) for row in ids]
        self._sweep(self._prefill_layer, chunks, self._slot_0, position_rows)
        return first_row(chunks[-1], position_rows[-1], (count - 1) % size, tile_rows=self._spec.tile_rows)

    def _decode(self, step: TokenStep, sampling: Sampling) -> TokenStep:
        """One sweep of one tile: the token after `step`."""
        tile = [step.h]
        self._sweep(self._decode_layer, tile, self._all_in_slot_0, [step.positions])
        return self._token_step(tile[0], step.positions, sampling)

    def _token_step(self, h: jax.Array, positions: jax.Array, sampling: Sampling) -> TokenStep:
        seed, rule = np.uint32(sampling.seed), sampling.without_seed
        return token_step(self._head, h, positions, seed, spec=self._spec.head, sampling=rule)

    def _sweep(
        self,
        steps: list[Callable[..., Any]],
        blocks: list[jax.Array],
        slots: list[jax.Array],
        positions: list[jax.Array],
    ) -> None:
        """Every block of rows through every layer, in place: the one place where layers are looped over.

        Blocks, and the positions of each one's rows, begin and end on the first device. `slots` are each device's own.
        """
        for lost in [i for i, kv in enumerate(self._kv) if kv.is_deleted()]:
            self._kv[lost] = self._make_cache(lost)
        rows = [[_on(device, array) for array in positions] for device in self._devices]
        with out_of_memory_is_a_budget_error(self._devices[0], "a layer step"):
            for layer_idx, weights in self._layers.sweep():
                here = layer_idx % len(self._devices)
                following = (layer_idx + 1) % self._layers.num_layers % len(self._devices)
                for i, block in enumerate(blocks):
                    h, self._kv[layer_idx] = steps[here](
                        weights, self._kv[layer_idx], block, slots[here], rows[here][i], spec=self._spec.layer
                    )
                    # Queued before the next layer is asked for, and so before what its device is going to upload.
                    blocks[i] = _on(self._devices[following], h)

    @contextlib.contextmanager
    def _nothing_kept_on_failure(self) -> Iterator[None]:
        """After a failure neither the cache nor what was uploaded is trusted.

        A step that failed has used its cache up; and one that fails on the device, long after it was called, leaves
        arrays behind that fail whoever is given them.
        """
        try:
            yield
        except BaseException:
            self._layers.forget()
            for kv in self._kv:
                kv.delete()
            raise

    def _jit_layer_step(self, *, spread: bool) -> list[Callable[..., Any]]:
        """Each device's layer step, whose calls take that device's uploads along."""
        return [
            controller.jit(layer_step, static_argnames=("spec",), donate_argnums=(1, 2), spread=spread)
            for controller in self._layers.controllers
        ]

    def _make_cache(self, layer_idx: int) -> jax.Array:
        spec, device = self._spec, self._devices[layer_idx % len(self._devices)]
        return make_cache(spec.config, NUM_SEQUENCES, spec.context, spec.kv_dtype, device)

    def _put(self, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, self._devices[0])

    def _everywhere(self, array: np.ndarray | np.generic) -> list[jax.Array]:
        """A copy on each device."""
        return [jax.device_put(array, device) for device in self._devices]


def _ones(layout: LayerLayout) -> dict[str, tuple[tuple[int, ...], Any, np.dtype]]:
    """Name -> (shape, value, dtype) of weights that are all alike and small, for trying out a layer."""
    return {name: (shape, 1 if dtype == np.int8 else 2**-6, dtype) for name, (shape, dtype) in layout.shapes.items()}


def _on(device: jax.Device, array: jax.Array) -> jax.Array:
    """The array on another device: a copy, which is queued and not waited for; itself if it is there already."""
    return array if device in array.devices() else jax.device_put(array, device)


def check_prompt(prompt_ids: Sequence[int], config: ModelConfig, context: int) -> None:
    """Refuses a prompt that cannot be decoded from, before anything is computed.

    Raises:
      ConfigError: it is empty, has an id out of range, or does not fit into `context` positions.
    """
    if not len(prompt_ids):
        raise ConfigError("the prompt has no tokens; expected at least one")
    for index, token_id in enumerate(prompt_ids):
        if not 0 <= token_id < config.vocab_size:
            raise ConfigError(
                f"token id {token_id} at index {index} of the prompt; expected 0 .. {config.vocab_size - 1}"
            )
    if len(prompt_ids) > context:
        limit = "the model's maximum: " if context >= config.max_positions else "the context: raise it or "
        raise ConfigError(f"the prompt has {len(prompt_ids)} tokens; expected at most {context}, {limit}cut the prompt")


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["h", "positions", "ids", "logits"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class TokenStep:
    """What one sweep ends in and the next one starts from."""

    h: jax.Array  # float32 [W, D]: the embeddings of `ids`, zeros in rows not in use
    positions: jax.Array  # int32 [W]: where `ids` will stand; -1 for rows not in use
    ids: jax.Array  # int32 [B]: the sampled tokens, of the rows in use
    logits: jax.Array  # float32 [B, V]: what they were sampled from


def _read(step: TokenStep, on_logits: Callable[[np.ndarray], None] | None) -> int:
    """The id of the sequence's token; waits for it."""
    if on_logits is not None:
        on_logits(np.asarray(step.logits)[0])
    return int(np.asarray(step.ids)[0])


@functools.partial(jax.jit, static_argnames=("spec", "sampling"))
def token_step(
    head: HeadWeights,
    h: jax.Array,  # float32 [W, D]: the last layer's output
    positions: jax.Array,  # int32 [W]
    seed: jax.Array | np.uint32,  # []
    *,
    spec: HeadSpec,
    sampling: Sampling,
) -> TokenStep:
    """From the last layer of one token to the first layer of the next."""
    scores = logits(head, h, spec)[:NUM_SEQUENCES]
    following = jnp.where(positions < 0, -1, positions + 1)
    ids = sample(scores, following[:NUM_SEQUENCES], jnp.asarray(seed), sampling)
    tile = jnp.zeros_like(h).at[:NUM_SEQUENCES].set(embed(head, ids, spec))
    return TokenStep(h=tile, positions=following, ids=ids, logits=scores)


@functools.partial(jax.jit, static_argnames="spec")
def embed_step(head: HeadWeights, ids: jax.Array, *, spec: HeadSpec) -> jax.Array:  # int32 [T] -> float32 [T, D]
    return embed(head, ids, spec)


@functools.partial(jax.jit, static_argnames="tile_rows")
def first_row(
    h: jax.Array, positions: jax.Array, row: int, *, tile_rows: int
) -> tuple[jax.Array, jax.Array]:  # [T, D], [T] -> [W, D], [W]
    """A decode tile whose first row is row `row` of a prefill chunk; the other rows are not in use."""
    tile = jnp.zeros((tile_rows, h.shape[1]), h.dtype).at[0].set(h[row])
    return tile, jnp.full(tile_rows, -1, positions.dtype).at[0].set(positions[row])
