"""Trying out a device's layer steps before there are layers: compiling all their programs, and comparing their bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vramjax.decode.spec import EngineSpec
from vramjax.errors import VramjaxError
from vramjax.layout import LayerLayout
from vramjax.residency.controller import Controller

Step = Callable[..., Any]


def rehearse_layers(
    spec: EngineSpec,
    controller: Controller,
    device: jax.Device,
    prefill: Step,
    decode: Step | None,
    caches: list[jax.Array],
    borrowed: list[int],
) -> None:
    """Runs the steps of a device over as many layers as are `borrowed`, alone and with every upload to take along.

    Those are programs of their own to a compiler, so here is seen whether they compute the same: what comes out, and
    what goes into the caches. The `caches` of the borrowed layers are left with keys and values of no meaning, which
    no sequence sees, as it writes its own before it reads them.

    Raises:
      VramjaxError: they do not.
    """
    weights = stand_in_layer(spec.layout, device)

    def run(step: Step, num_rows: int, slots: np.ndarray | np.generic) -> np.ndarray:
        h = jnp.sin(jnp.arange(num_rows * spec.config.hidden_size, dtype=jnp.float32, device=device))
        h = h.reshape(num_rows, -1)
        # As a sequence's, as far as the cache goes: else attention would have nothing to do.
        in_use = min(num_rows, caches[borrowed[0]].shape[1])
        positions = np.where(np.arange(num_rows) < in_use, np.arange(num_rows), -1).astype(np.int32)
        slots_there, positions = jax.device_put((slots, positions), device)
        layers = [weights] * len(borrowed)
        h, written = step(layers, [caches[i] for i in borrowed], h, slots_there, positions, spec=spec.layer)
        for i, cache in zip(borrowed, written, strict=True):
            caches[i] = cache
        return np.concatenate([np.asarray(a, np.float32).ravel() for a in (h, *(kv[0, :in_use] for kv in written))])

    def run_as_before(call: Callable[[], np.ndarray], before: np.ndarray) -> None:
        if call().tobytes() != before.tobytes():
            raise VramjaxError(
                f"on {device} with jax {jax.__version__} a layer gives other bits when an upload travels in its "
                f"program; expected the same: take the policy 'past', whose uploads are programs of their own"
            )

    for num_rows in spec.block_sizes:
        run_prefill = functools.partial(run, prefill, num_rows, np.int32(0))
        controller.rehearse(functools.partial(run_as_before, run_prefill, run_prefill()), spread=False)
    if decode is not None:
        run_decode = functools.partial(run, decode, spec.tile_rows, np.zeros(spec.tile_rows, np.int32))
        controller.rehearse(functools.partial(run_as_before, run_decode, run_decode()))


def stand_in_layer(layout: LayerLayout, device: jax.Device) -> dict[str, jax.Array]:
    """Weights that are all alike and small, for trying out a layer."""
    return {
        name: jnp.full(shape, 1 if dtype == np.int8 else 2**-6, dtype, device=device)
        for name, (shape, dtype) in layout.shapes.items()
    }
