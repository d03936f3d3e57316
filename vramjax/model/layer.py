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

import jax
import jax.numpy as jnp

from pallas_kernels import Backend, cached_attention, q8_matmul
from vramjax.config import ModelConfig
from vramjax.layout import LayerLayout
from vramjax.model.rope import rotate

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
    """One layer over T rows: attention with the new keys and values written first, then the feed-forward part."""
    config = spec.config
    with jax.named_scope("attention"):
        x = rms_norm(h, _param(weights, spec, "input_norm"), config.rms_norm_eps)
        q, k, v = _split_heads(_project(weights, spec, "qkv", x), config)
        if config.qk_norm:
            q = rms_norm(q, _param(weights, spec, "q_norm"), config.rms_norm_eps)
            k = rms_norm(k, _param(weights, spec, "k_norm"), config.rms_norm_eps)
        q, k = rotate(q, positions, config.rope), rotate(k, positions, config.rope)
        kv = write_rows(kv, jnp.stack([k, v], axis=1), slots, positions)
        attended = cached_attention(q, kv, slots, positions, backend=spec.backend)  # [T, H, Hd]
        h = h + _project(weights, spec, "o", attended.reshape(len(h), -1))
    with jax.named_scope("feed_forward"):
        x = rms_norm(h, _param(weights, spec, "post_norm"), config.rms_norm_eps)
        gate, up = jnp.split(_project(weights, spec, "gate_up", x), 2, axis=1)  # [T, F] each
        h = h + _project(weights, spec, "down", jax.nn.silu(gate) * up)
    return h, kv


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, float32 (Zhang and Sennrich, 2019, arXiv:1910.07467)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def write_rows(
    kv: jax.Array,  # [B, S, 2, KvH, Hd]
    rows: jax.Array,  # float32 [T, 2, KvH, Hd]
    slots: jax.Array,  # int32 [T] or []
    positions: jax.Array,  # int32 [T]
) -> jax.Array:
    """Writes each row's keys and values at its position; rows that are not in use write nothing."""
    # An index out of range is dropped, but -1 would count from the end and overwrite the last position.
    positions = jnp.where(positions < 0, kv.shape[1], positions)
    return kv.at[slots, positions].set(rows.astype(kv.dtype), mode="drop")


def _project(weights: Weights, spec: LayerSpec, name: str, x: jax.Array) -> jax.Array:  # [T, K] -> [T, N]
    matrix, scales = spec.layout.matrix(name), spec.layout.param(f"{name}_scales")
    assert scales is not None
    with jax.named_scope(name):
        y = q8_matmul(
            x,
            weights[name],
            weights["params"],
            group=matrix.group,
            scales_offset=scales.offset,
            backend=spec.backend,
        )
        if spec.layout.param(f"{name}_bias") is not None:
            y = y + _param(weights, spec, f"{name}_bias")
        return y[:, : matrix.n]


def _param(weights: Weights, spec: LayerSpec, name: str) -> jax.Array:
    entry = spec.layout.param(name)
    assert entry is not None, name
    return weights["params"][entry.offset : entry.stop].reshape(entry.shape)


def _split_heads(qkv: jax.Array, config: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, (H + 2 KvH) Hd] -> q [T, H, Hd], k and v [T, KvH, Hd]."""
    heads = qkv.reshape(len(qkv), -1, config.head_dim)
    stops = [config.num_heads, config.num_heads + config.num_kv_heads]
    q, k, v = jnp.split(heads, stops, axis=1)
    return q, k, v
