"""The layer step: what one transformer layer does to a block of rows. Compiled once for all layers of a geometry.

A row is one token of one sequence: a hidden state, the slot of its sequence in the KV cache, and its position. A
prefill chunk is many rows of one sequence, a decode step one row of each of several sequences; both are this one
function over a fixed number of rows, with position -1 for rows that are not in use.

Weights come as the five arrays of `vramjax.layout`. Whether a layer's weights were just uploaded or have been
resident for hours is nothing that this function could see, which is why residency cannot change a result.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    Backend,
    add_norm_rows,
    add_rows,
    cached_attention,
    norm_rows,
    q8_partial_sums,
    rotate_and_store,
    swiglu_rows,
)
from vramjax.config import ModelConfig
from vramjax.layout import LayerLayout
from vramjax.model.rope import amplitude, inverse_frequencies

Weights = Mapping[str, jax.Array]  # the five arrays of a layer: qkv, o, gate_up, down int8 [N, K]; params float32 [F]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """All that is fixed when a layer step is compiled: the model, the geometry, and how kernels are run."""

    config: ModelConfig
    layout: LayerLayout
    backend: Backend


@functools.partial(jax.jit, static_argnames="spec", donate_argnames=("kv", "h"))
def layer_step(
    weights: Weights,
    kv: jax.Array,  # [B, S, 2, KvH, Hd]: this layer's keys and values
    h: jax.Array,  # float32 [T, D]
    slots: jax.Array,  # int32 [T], or [] when all rows belong to one sequence
    positions: jax.Array,  # int32 [T]; -1: row not in use
    *,
    spec: LayerSpec,
) -> tuple[jax.Array, jax.Array]:  # h [T, D], kv
    """One layer over T rows: attention with the new keys and values written first, then the feed-forward part.

    On a GPU everything here is a kernel of ours: products, and one kernel between each two of them.
    """
    config, layout, backend = spec.config, spec.layout, spec.backend
    params = weights["params"]
    rows = {"num_rows": len(h), "backend": backend}

    def norm(name: str, before: str) -> dict[str, Any]:
        """Arguments of a norm whose result goes into the product `before`."""
        matrix = layout.matrix(before)
        return {
            "weight_offset": layout.offset(name),
            "eps": config.rms_norm_eps,
            "k_padded": matrix.k_padded,
            "group": matrix.group,
        }

    def product(name: str, operand: jax.Array) -> jax.Array:
        scales, group = layout.offset(f"{name}_scales"), layout.matrix(name).group
        with jax.named_scope(name):
            return q8_partial_sums(operand, weights[name], params, group=group, scales_offset=scales, **rows)

    def bias(name: str) -> int | None:
        entry = layout.param(f"{name}_bias")
        return entry.offset if entry is not None else None

    with jax.named_scope("attention"):
        sums = product("qkv", norm_rows(h, params, **norm("input_norm", "qkv"), backend=backend))
        q, kv = rotate_and_store(
            sums,
            params,
            kv,
            slots,
            positions,
            jnp.asarray(inverse_frequencies(config.rope, config.head_dim)),
            num_heads=config.num_heads,
            bias_offset=bias("qkv"),
            norm_offsets=(layout.offset("q_norm"), layout.offset("k_norm")) if config.qk_norm else None,
            eps=config.rms_norm_eps,
            amplitude=amplitude(config.rope),
            backend=backend,
        )
        o = layout.matrix("o")
        attended = cached_attention(q, kv, slots, positions, group=o.group, k_padded=o.k_padded, backend=backend)
        sums = product("o", attended)
    with jax.named_scope("feed_forward"):
        h, operand = add_norm_rows(
            h, sums, params, bias_offset=bias("o"), **norm("post_norm", "gate_up"), backend=backend
        )
        down = layout.matrix("down")
        operand = swiglu_rows(
            product("gate_up", operand),
            params,
            num_columns=config.intermediate_size,
            bias_offset=bias("gate_up"),
            k_padded=down.k_padded,
            group=down.group,
            **rows,
        )
        h = add_rows(h, product("down", operand), params, bias_offset=bias("down"), backend=backend)
    return h, kv
