"""What a layer costs with other settings of one of its products, from what the device recorded of its kernels.

A product's settings also decide what the kernel after it has to add up, and what is left of a cache for others. So what
is timed is whole layers, a few of one geometry, whose weights no cache holds: in one program, which runs them for a few
tokens or blocks of a prompt. The host's clock would not do: a call's time varies by more than settings differ. The
profiler's times of kernels tell settings apart that differ by 0.1 us a layer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from chains import CompilerPool
from jax import lax
from profiling import kernel_times

from pallas_kernels.tuning import MOST_FEW, Q8Config, use_table
from vramjax.decode.spec import EngineSpec
from vramjax.layout import LayerLayout
from vramjax.model.kv_cache import cache_shape
from vramjax.model.layer import Weights, layer_steps
from vramjax.progress import progress_bar

_DISTINCT_BYTES = 192 << 20  # of the layers of a program together: more than a cache holds
_MIN_LAYERS, _MAX_LAYERS = 2, 8  # of a program
_TOKEN_POSITION = 512  # of the row in use of a tile
_TOKENS, _BLOCKS = 12, 4  # that a program computes, one after the other
_MAX_PROFILES = 3  # until one has all kernels in it


class LayerTimer:
    """Times layers of one geometry in blocks of so many rows: a decode tile with one row in use, or one of a prompt.

    Invariant: programs differ in the settings of products and in nothing else, and are traced with those.

    Example: `LayerTimer(spec, random_layers(spec.layout), num_rows=16).us(table, "4096x4096/128 few", tried)` has the
    microseconds of a layer for each of `tried`, where all other products have the settings of `table`.
    """

    def __init__(self, spec: EngineSpec, weights: Sequence[Weights], *, num_rows: int) -> None:
        """`weights` are those of all layers that are in a program; the device is theirs."""
        self._spec, self._weights = spec, list(weights)
        self._is_tile = num_rows <= MOST_FEW
        self._num_repeats = _TOKENS if self._is_tile else _BLOCKS
        rows = np.arange(num_rows)
        positions = np.where(rows == 0, _TOKEN_POSITION, -1) if self._is_tile else rows
        self._num_positions = int(positions.max()) + 1
        h = np.random.default_rng(0).normal(size=(num_rows, spec.config.hidden_size))
        self._inputs = (
            jnp.asarray(np.where(positions[:, None] >= 0, h, 0.0), jnp.float32),
            jnp.zeros(num_rows if self._is_tile else (), jnp.int32),  # slots
            jnp.asarray(positions, jnp.int32),
        )

    def us(self, table: Mapping[str, Q8Config], key: str, tried: Sequence[Q8Config]) -> dict[Q8Config, float]:
        """Microseconds of a layer with each setting of the product `key`, the others as in `table`.

        What cannot be compiled or run is not there: it takes more memory than a program may have, for one.
        """
        found = {}
        with CompilerPool() as pool, progress_bar(key, total=3 * len(tried), unit="items") as advance:
            programs = {}
            for config in tried:
                programs[config] = pool.compile(self.trace({**table, key: config}).lower())
                advance(1)
            pool.wait(advance)
            for config, program in programs.items():
                with contextlib.suppress(jax.errors.JaxRuntimeError):
                    found[config] = self._us_of(program.result())
                advance(1)
        return found

    def trace(self, table: Mapping[str, Q8Config]) -> jax.stages.Traced:
        """The program whose products have the settings of `table`."""
        spec = self._spec
        kv_shape = cache_shape(spec.config, 1, self._num_positions)

        def repeated_layers(
            weights: list[Weights],
            h: jax.Array,  # float32 [T, D]
            slots: jax.Array,  # int32 [T], or []
            positions: jax.Array,  # int32 [T]
        ) -> jax.Array:  # float32 [T, D]
            def layers(_: Any, carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
                h, kv = carry
                return layer_steps(weights, kv, h, slots, positions, spec=spec.layer)

            kv = [jnp.zeros(kv_shape, spec.kv_dtype) for _ in weights]
            return lax.fori_loop(0, self._num_repeats, layers, (h, kv))[0]

        with use_table(table):
            return jax.jit(repeated_layers).trace(self._weights, *self._inputs)

    def _us_of(self, program: Any) -> float:
        """Of one layer: all kernels of a run. The few of the loop itself are the same with all settings."""

        def run() -> jax.Array:
            return program(self._weights, *self._inputs)

        jax.block_until_ready(run())  # the first run loads the program
        num_layers = self._num_repeats * len(self._weights)
        num_products = num_layers * len(self._spec.layout.matrices)
        (device,), calls = self._inputs[0].devices(), 0
        for _ in range(_MAX_PROFILES):
            times = kernel_times(run, device)
            calls = sum(time.calls for time in times if time.kernel.startswith("q8_matmul"))
            if calls == num_products:
                return sum(time.us for time in times) / num_layers
        raise RuntimeError(f"the profile of {num_products} products has {calls} of them")


def random_layers(layout: LayerLayout) -> list[Weights]:
    """Random weights of as many layers as a program needs, on JAX's first device."""
    num_layers = max(_MIN_LAYERS, min(_MAX_LAYERS, math.ceil(_DISTINCT_BYTES / layout.num_bytes)))
    keys = jax.random.split(jax.random.key(0), num_layers)
    layer = jax.jit(lambda key: {name: _random(key, *form) for name, form in layout.shapes.items()})
    return [layer(key) for key in keys]


def _random(key: jax.Array, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    if dtype == jnp.int8:
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    return jax.random.uniform(key, shape, dtype, 0.5, 1.5) * 0.002
