"""What both attention kernels share: sizes of steps, the softmax over a piece of positions, the form of results.

Softmax over pieces as in FlashAttention (Dao et al., 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.operand import OperandSpec

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


def result_shape(num_rows: int, num_heads: int, head_dim: int, operand: OperandSpec | None) -> jax.ShapeDtypeStruct:
    """float32 [T, H, Hd], or an operand of T rows."""
    if operand is not None:
        return operand.shape(num_rows)
    return jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), jnp.float32)


def result_rows(num_rows: int, operand: OperandSpec | None) -> int:
    """Rows that a result has: those that fill up an operand's last tile are zeros."""
    return num_rows if operand is None else operand.padded_rows(num_rows)


def store_result(
    out_ref: Any,  # as result_shape says
    rows: jax.Array,  # int32 [M, 1] or []
    heads: jax.Array,  # int32 [M, 1] or []
    values: jax.Array,  # float32 [M, Hd] or [Hd]
    *,
    num_rows: int,
    head_dim: int,
    operand: OperandSpec | None,
    mask: jax.Array,  # bool [M, 1] or []: what is stored
) -> None:
    """In a kernel: one head of each row."""
    dims = jnp.arange(values.shape[-1])
    dims = dims[None, :] if values.ndim == 2 else dims
    inside = mask & (dims < head_dim)
    if operand is None:
        pltriton.store(out_ref.at[rows, heads, dims], values, mask=inside)
        return
    operand.store(out_ref, rows, heads * head_dim + dims, values, num_rows=num_rows, mask=inside)


def store_padding(
    out_ref: Any,  # as result_shape says
    rows: jax.Array,  # int32 [R, 1] or [], each row once
    *,
    num_rows: int,
    k: int,
    operand: OperandSpec | None,
    mask: jax.Array,  # bool [R, 1] or []: what is stored
) -> None:
    """In a kernel, by one of the programs of a row: the zeros of an operand after the last head."""
    if operand is None or k == operand.k_padded:
        return
    inputs = k + jnp.arange(pl.next_power_of_2(operand.k_padded - k))
    inputs = inputs[None, :] if rows.ndim == 2 else inputs
    mask = mask & (inputs < operand.k_padded)
    operand.store(out_ref, rows, inputs, jnp.zeros(mask.shape, jnp.float32), num_rows=num_rows, mask=mask)
