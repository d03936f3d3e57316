"""Attention of rows over a KV cache, for prefill, single decode and batches alike.

A row is one query token: it belongs to a sequence (its slot in the cache) and sees the positions 0 .. its own. Each
row's positions are cut into splits of a fixed size which programs work through side by side; a second kernel then adds
a row's splits up in order. Nothing a row computes depends on the other rows or on how long the cache is.

Softmax over pieces as in FlashAttention (Dao et al., 2022, arXiv:2205.14135) and its decode form with splits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.backend import Backend, kernel_call

SPLIT = 256  # positions one program attends to; a cache holds a multiple of it
PIECE = 64  # positions of one step of the running softmax
MIN_DOT = 16  # the smallest side of a tensor core product
NO_SCORE = -1e30  # a finite "minus infinity": the difference of two of them is no NaN


def cached_attention(
    q: jax.Array,  # float32 [T, H, Hd]
    kv: jax.Array,  # bfloat16 or float32 [B, S, 2, KvH, Hd]: keys at index 0, values at 1
    slots: jax.Array,  # int32 [T], or [] when all rows belong to one sequence
    positions: jax.Array,  # int32 [T]; -1 for a row that is not in use
    *,
    backend: Backend = "triton",
) -> jax.Array:  # float32 [T, H, Hd]
    """Softmax(q k^T / sqrt(Hd)) v of each row over positions 0 .. positions[t] of sequence slots[t].

    Heads share keys and values in groups of H / KvH (grouped-query attention). A row that is not in use gives zeros.

    Raises:
      ValueError: shapes or dtypes do not fit together, or S is not a multiple of 256.
    """
    _check(q, kv, slots, positions)
    if backend == "reference":
        return cached_attention_reference(q, kv, slots, positions)
    num_rows, num_heads, head_dim = q.shape
    _, capacity, _, num_kv_heads, _ = kv.shape
    num_splits = capacity // SPLIT
    queries_per_kv = num_heads // num_kv_heads
    slots = jnp.broadcast_to(slots, (num_rows,))
    call = functools.partial(kernel_call, backend=backend, num_warps=4, num_stages=2)
    partial_shape = (num_rows, num_heads, num_splits)
    acc, high, total = call(
        functools.partial(_split_kernel, queries_per_kv=queries_per_kv),
        out_shape=[
            jax.ShapeDtypeStruct((*partial_shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ],
        grid=(num_rows, num_kv_heads, num_splits),
        name="attention_splits",
    )(q, kv, slots, positions)
    return call(
        _combine_kernel,
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(num_rows, num_heads),
        name="attention_combine",
    )(acc, high, total, positions)


def cached_attention_reference(
    q: jax.Array,  # float32 [T, H, Hd]
    kv: jax.Array,  # [B, S, 2, KvH, Hd]
    slots: jax.Array,  # int32 [T] or []
    positions: jax.Array,  # int32 [T]
) -> jax.Array:  # float32 [T, H, Hd]
    """The same attention in plain `jnp`, float32 throughout; its cost follows the longest row, not the cache."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.shape[3]
    grouped = (num_rows, num_kv_heads, num_heads // num_kv_heads)
    q = q.reshape(*grouped, head_dim) / math.sqrt(head_dim)  # [T, KvH, G, Hd]

    def attend(q: jax.Array, slot: jax.Array, position: jax.Array, piece: jax.Array, state: Any) -> Any:
        """One row, [KvH, G, Hd], over one piece of its sequence."""
        high, total, acc = state
        start = (slot, piece * PIECE, 0, 0, 0)
        block = lax.dynamic_slice(kv, start, (1, PIECE, *kv.shape[2:]))[0].astype(jnp.float32)  # [P, 2, KvH, Hd]
        scores = jnp.einsum("kgd,pkd->kgp", q, block[:, 0], precision=lax.Precision.HIGHEST)
        visible = piece * PIECE + jnp.arange(PIECE) <= position
        scores = jnp.where(visible, scores, NO_SCORE)
        new_high = jnp.maximum(high, scores.max(-1))
        weights = jnp.where(visible, jnp.exp(scores - new_high[..., None]), 0.0)
        decay = jnp.exp(high - new_high)
        # What stands past the row may be anything, and 0 times a NaN is a NaN.
        seen = jnp.where(visible[:, None, None], block[:, 1], 0.0)
        values = jnp.einsum("kgp,pkd->kgd", weights, seen, precision=lax.Precision.HIGHEST)
        return new_high, total * decay + weights.sum(-1), acc * decay[..., None] + values

    rows = jax.vmap(attend, in_axes=(0, None if slots.ndim == 0 else 0, 0, None, 0))
    state = (jnp.full(grouped, NO_SCORE), jnp.zeros(grouped), jnp.zeros((*grouped, head_dim)))
    num_pieces = (positions.max() + PIECE) // PIECE
    _, total, acc = lax.fori_loop(0, num_pieces, lambda p, state: rows(q, slots, positions, p, state), state)
    return (acc / jnp.maximum(total, 1e-30)[..., None]).reshape(num_rows, num_heads, head_dim)


def _split_kernel(
    q_ref: Any,  # float32 [T, H, Hd]
    kv_ref: Any,  # [B, S, 2, KvH, Hd]
    slots_ref: Any,  # int32 [T]
    positions_ref: Any,  # int32 [T]
    acc_ref: Any,  # float32 [T, H, num_splits, Hd]
    high_ref: Any,  # float32 [T, H, num_splits]: the largest score
    total_ref: Any,  # float32 [T, H, num_splits]: the sum of exp(score - high)
    *,
    queries_per_kv: int,
) -> None:
    row, kv_head, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    head_dim = q_ref.shape[-1]
    block_g = max(MIN_DOT, pl.next_power_of_2(queries_per_kv))
    block_d = max(MIN_DOT, pl.next_power_of_2(head_dim))
    slot, position = pltriton.load(slots_ref.at[row]), pltriton.load(positions_ref.at[row])

    group, dims, piece = jnp.arange(block_g), jnp.arange(block_d), jnp.arange(PIECE)
    heads = kv_head * queries_per_kv + group
    head_mask, dim_mask = group < queries_per_kv, dims < head_dim
    q_mask = head_mask[:, None] & dim_mask[None, :]
    q = pltriton.load(q_ref.at[row, heads[:, None], dims[None, :]], mask=q_mask, other=0.0) / math.sqrt(head_dim)

    def attend(step: jax.Array, state: Any) -> Any:
        high, total, acc = state
        seen = split * SPLIT + step * PIECE + piece  # [P]
        visible = seen <= position
        mask = visible[:, None] & dim_mask[None, :]
        k = pltriton.load(kv_ref.at[slot, seen[:, None], 0, kv_head, dims[None, :]], mask=mask, other=0.0)  # [P, Hd]
        v = pltriton.load(kv_ref.at[slot, seen[:, None], 1, kv_head, dims[None, :]], mask=mask, other=0.0)
        scores = _dot(q, k.T)  # [G, P]
        scores = jnp.where(visible[None, :], scores, NO_SCORE)
        new_high = jnp.maximum(high, scores.max(1))
        weights = jnp.where(visible[None, :], jnp.exp(scores - new_high[:, None]), 0.0)
        decay = jnp.exp(high - new_high)
        return new_high, total * decay + weights.sum(1), acc * decay[:, None] + _dot(weights, v)  # [G, Hd]

    state = (
        jnp.full((block_g,), NO_SCORE, jnp.float32),
        jnp.zeros((block_g,), jnp.float32),
        jnp.zeros((block_g, block_d), jnp.float32),
    )
    # A split past the row's position, and every split of a row not in use, takes no step.
    num_steps = jnp.clip((position + PIECE - split * SPLIT) // PIECE, 0, SPLIT // PIECE)
    high, total, acc = lax.fori_loop(0, num_steps, attend, state)
    pltriton.store(acc_ref.at[row, heads[:, None], split, dims[None, :]], acc, mask=q_mask)
    pltriton.store(high_ref.at[row, heads, split], high, mask=head_mask)
    pltriton.store(total_ref.at[row, heads, split], total, mask=head_mask)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:  # float32 [M, K], [K, N] -> float32 [M, N]
    """A product in which `a` stays nearly float32 when `b` is bfloat16: it is split in a high and a low part."""
    if b.dtype == jnp.float32:
        return jnp.dot(a, b, precision=lax.Precision.HIGHEST)
    high = a.astype(b.dtype)
    low = (a - high.astype(jnp.float32)).astype(b.dtype)
    return jnp.dot(low, b, preferred_element_type=jnp.float32) + jnp.dot(high, b, preferred_element_type=jnp.float32)


def _combine_kernel(
    acc_ref: Any,  # float32 [T, H, num_splits, Hd]
    high_ref: Any,  # float32 [T, H, num_splits]
    total_ref: Any,  # float32 [T, H, num_splits]
    positions_ref: Any,  # int32 [T]
    out_ref: Any,  # float32 [T, H, Hd]
) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    head_dim = out_ref.shape[-1]
    block_d = pl.next_power_of_2(head_dim)
    dims = jnp.arange(block_d)
    mask = dims < head_dim

    def add_split(split: jax.Array, state: Any) -> Any:
        high, total, acc = state
        split_high = pltriton.load(high_ref.at[row, head, split])
        new_high = jnp.maximum(high, split_high)
        decay, weight = jnp.exp(high - new_high), jnp.exp(split_high - new_high)
        split_acc = pltriton.load(acc_ref.at[row, head, split, dims], mask=mask, other=0.0)
        split_total = pltriton.load(total_ref.at[row, head, split])
        return new_high, total * decay + split_total * weight, acc * decay + split_acc * weight

    position = pltriton.load(positions_ref.at[row])
    state = (jnp.float32(NO_SCORE), jnp.float32(0), jnp.zeros((block_d,), jnp.float32))
    _, total, acc = lax.fori_loop(0, (position + SPLIT) // SPLIT, add_split, state)
    pltriton.store(out_ref.at[row, head, dims], acc / jnp.maximum(total, 1e-30), mask=mask)


def _check(q: jax.Array, kv: jax.Array, slots: jax.Array, positions: jax.Array) -> None:
    if q.ndim != 3 or q.dtype != jnp.float32:
        raise ValueError(f"q is {q.dtype}{list(q.shape)}; expected float32 [T, H, Hd]")
    if kv.ndim != 5 or kv.shape[2] != 2 or kv.shape[4] != q.shape[2]:
        raise ValueError(f"kv is {kv.dtype}{list(kv.shape)}; expected [B, S, 2, KvH, Hd = {q.shape[2]}]")
    if kv.dtype not in (jnp.bfloat16, jnp.float32):
        raise ValueError(f"kv is {kv.dtype}; expected bfloat16 or float32")
    if slots.dtype != jnp.int32 or positions.dtype != jnp.int32:
        raise ValueError(f"slots is {slots.dtype}, positions {positions.dtype}; expected int32")
    if q.shape[1] % kv.shape[3]:
        raise ValueError(f"q has {q.shape[1]} heads and kv {kv.shape[3]}; expected a multiple")
    if kv.shape[1] % SPLIT:
        raise ValueError(f"kv holds {kv.shape[1]} positions; expected a multiple of {SPLIT}")
    if positions.shape != q.shape[:1] or slots.shape not in ((), q.shape[:1]):
        raise ValueError(f"slots is {list(slots.shape)}, positions {list(positions.shape)}; expected [T = {len(q)}]")
