"""An engine one sweep at a time: what `Engine.generate` does not show, for benchmarks.

The only file outside the engine that calls what is the engine's own; when the engine changes inside, so does this.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vramjax.decode.engine import Engine, EngineSpec, TokenStep, embed_step
from vramjax.decode.sampler import Sampling
from vramjax.model.head import HeadWeights
from vramjax.model.kv_cache import cache_shape

GREEDY = Sampling()


def prefill(engine: Engine, prompt: Sequence[int]) -> TokenStep:
    """The step that a prompt ends in."""
    return engine._token_step(*engine._prefill(prompt), GREEDY)


def dispatch_ms(engine: Engine, step: TokenStep, num_tokens: int) -> list[float]:
    """How long the host takes to queue the work of each of so many tokens after `step`.

    The device is idle before each, and is not waited for. Where it falls behind by all that may be queued (32
    programs), the host waits for it, and that counts.
    """
    times = []
    for _ in range(num_tokens):
        jax.block_until_ready(step)
        start = time.perf_counter()
        step = engine._decode(step, GREEDY)
        times.append((time.perf_counter() - start) * 1e3)
    jax.block_until_ready(step)
    return times


def decode(engine: Engine, step: TokenStep, num_tokens: int) -> TokenStep:
    """The step so many tokens after `step`, without waiting for any of them."""
    for _ in range(num_tokens):
        step = engine._decode(step, GREEDY)
    return step


class Tiles:
    """Decode sweeps of an engine with any number of the tile's rows in use.

    Invariant: all sweeps run the same programs over the same cache, of a sequence for each row and filled with random
    numbers; only positions and slots differ. The engine's own cache is back afterwards.

    Example: `with Tiles.of(engine, spec, head) as tiles: jax.block_until_ready(tiles.sweep(tiles.rows(1, 512)))`.
    """

    def __init__(self, engine: Engine, spec: EngineSpec, head: HeadWeights) -> None:
        self._engine, self._spec, self._head = engine, spec, head
        (self._device,) = engine._devices
        ids = np.arange(1, spec.tile_rows + 1, dtype=np.int32) % spec.config.vocab_size
        self._ids = jax.device_put(ids, self._device)

    @classmethod
    @contextlib.contextmanager
    def of(cls, engine: Engine, spec: EngineSpec, head: HeadWeights) -> Iterator[Tiles]:
        tiles = cls(engine, spec, head)
        shape = cache_shape(spec.config, spec.tile_rows, spec.context)
        with jax.default_device(tiles._device):
            caches = [
                jax.random.normal(jax.random.key(i), shape, jnp.dtype(spec.kv_dtype))
                for i in range(spec.config.num_layers)
            ]
        own, engine._kv = engine._kv, caches
        try:
            yield tiles
        finally:
            engine._kv, caches = own, engine._kv
            for cache in caches:
                cache.delete()

    def rows(self, num_rows: int, position: int, *, one_sequence: bool = False) -> tuple[jax.Array, jax.Array]:
        """Slots and positions, both [W], of so many rows in use.

        Each row is the token at `position` of a sequence of its own; or they are a sequence's tokens up to there.
        """
        slots, positions = np.arange(self._spec.tile_rows), np.full(self._spec.tile_rows, -1)
        positions[:num_rows] = position
        if one_sequence:
            slots, positions[:num_rows] = np.zeros_like(slots), np.arange(position - num_rows + 1, position + 1)
        placed = [jax.device_put(a.astype(np.int32), self._device) for a in (slots, positions)]
        return placed[0], placed[1]

    def sweep(self, rows: tuple[jax.Array, jax.Array], num_sweeps: int = 1) -> Any:
        """What to wait for after so many sweeps, lm_head and sampling included."""
        slots, positions = rows
        step = None
        for _ in range(num_sweeps):
            blocks = [embed_step(self._head, self._ids, spec=self._spec.head)]
            self._engine._sweep(self._engine._decode_layer, blocks, [slots], [positions])
            step = self._engine._token_step(blocks[0], positions, GREEDY)
        return step


def forced_blocks(engine: Engine, spec: EngineSpec, head: HeadWeights, ids: Sequence[int], *, way: str) -> list[Any]:
    """One sweep over a given text, cut into blocks of rows; the last layer's output of each, float32 [W, D].

    Args:
      engine: its cache is overwritten from position 0 on.
      spec: the engine's.
      head: the engine's.
      ids: the text; it must fit into the context.
      way: "prefill": by prefill chunks; "decode": by decode tiles, in each of which all rows are in use.

    The last block's rows past the text mean nothing.
    """
    (device,) = engine._devices
    if way == "prefill":
        size, steps, slots = spec.chunk_rows, engine._prefill_layer, engine._slot_0
    else:
        size, steps, slots = spec.tile_rows, engine._decode_layer, engine._all_in_slot_0
    num_blocks = -(-len(ids) // size)
    padded, positions = np.zeros(num_blocks * size, np.int32), np.full(num_blocks * size, -1, np.int32)
    padded[: len(ids)], positions[: len(ids)] = ids, np.arange(len(ids))
    blocks = [embed_step(head, jax.device_put(part, device), spec=spec.head) for part in padded.reshape(-1, size)]
    engine._sweep(steps, blocks, slots, [jax.device_put(part, device) for part in positions.reshape(-1, size)])
    return blocks
