"""What both attention kernels share: sizes of steps, and the softmax over a piece of positions.

Softmax over pieces as in FlashAttention (Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

SPLIT = 128  # positions that one part of a row's result covers; a cache holds a multiple of it
PIECE = 64  # positions of one step of the running softmax
MIN_DOT = 16  # the smallest side of a tensor core product
NO_SCORE = -1e30  # a finite "minus infinity": the difference of two of them is no NaN

State = tuple[jax.Array, jax.Array, jax.Array]  # the largest score [M], the sum of exp(score - it) [M], values [M, Hd]


def start(num_queries: int, block_d: int) -> State:
    """Nothing seen yet."""
    return (
        jnp.full((num_queries,), NO_SCORE, jnp.float32),
        jnp.zeros((num_queries,), jnp.float32),
        jnp.zeros((num_queries, block_d), jnp.float32),
    )


def add_piece(
    state: State,
    q: jax.Array,  # float32 [M, Hd], divided by sqrt(Hd)
    kv_ref: Any,  # [B, S, 2, KvH, Hd]
    slot: jax.Array,  # int32 []
    kv_head: jax.Array,  # int32 []
    first: jax.Array,  # int32 []: the piece's first position
    last: jax.Array,  # int32 [M]: the last position that each query sees
    highest: jax.Array,  # int32 []: the largest of these
) -> State:
    """The softmax so far and one more piece. A query that sees nothing of it keeps its state, to the last bit."""
    high, total, acc = state
    head_dim = kv_ref.shape[-1]
    dims, seen = jnp.arange(q.shape[1]), first + jnp.arange(PIECE)
    # What stands past the last position of all may be anything, and 0 times a NaN is a NaN.
    mask = (seen <= highest)[:, None] & (dims < head_dim)[None, :]
    k = pltriton.load(kv_ref.at[slot, seen[:, None], 0, kv_head, dims[None, :]], mask=mask, other=0.0)  # [P, Hd]
    v = pltriton.load(kv_ref.at[slot, seen[:, None], 1, kv_head, dims[None, :]], mask=mask, other=0.0)
    visible = seen[None, :] <= last[:, None]
    scores = jnp.where(visible, split_dot(q, k.T), NO_SCORE)  # [M, P]
    new_high = jnp.maximum(high, scores.max(1))
    weights = jnp.where(visible, jnp.exp(scores - new_high[:, None]), 0.0)
    decay = jnp.exp(high - new_high)
    return new_high, total * decay + weights.sum(1), acc * decay[:, None] + split_dot(weights, v)


def split_dot(a: jax.Array, b: jax.Array) -> jax.Array:  # float32 [M, K], [K, N] -> float32 [M, N]
    """A product in which `a` stays nearly float32 when `b` is bfloat16: it is split in a high and a low part."""
    if b.dtype == jnp.float32:
        return jnp.dot(a, b, precision=lax.Precision.HIGHEST)
    high = a.astype(b.dtype)
    low = (a - high.astype(jnp.float32)).astype(b.dtype)
    return jnp.dot(low, b, preferred_element_type=jnp.float32) + jnp.dot(high, b, preferred_element_type=jnp.float32)
