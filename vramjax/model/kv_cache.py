"""The KV cache: one array per layer, [B, S, 2, KvH, Hd], that follows the request and not the model's maximum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attention import SPLIT
from vramjax.config import ModelConfig


def capacity(num_positions: int) -> int:
    """Positions that a cache for `num_positions` holds: whole splits of the attention kernel."""
    return max(1, -(-num_positions // SPLIT)) * SPLIT


def cache_shape(config: ModelConfig, num_slots: int, num_positions: int) -> tuple[int, ...]:
    """[B, S, 2, KvH, Hd] of one layer."""
    return (num_slots, capacity(num_positions), 2, config.num_kv_heads, config.head_dim)


def cache_bytes(config: ModelConfig, num_slots: int, num_positions: int, dtype: DTypeLike) -> int:
    """Bytes of all layers' caches."""
    num_values = 1
    for size in cache_shape(config, num_slots, num_positions):
        num_values *= size
    return config.num_layers * num_values * jnp.dtype(dtype).itemsize


def make_cache(
    config: ModelConfig, num_slots: int, num_positions: int, dtype: DTypeLike, device: jax.Device
) -> jax.Array:  # [B, S, 2, KvH, Hd]
    """Zeros, the cache of one layer."""
    return jnp.zeros(cache_shape(config, num_slots, num_positions), dtype, device=device)
