"""Attention of rows over a KV cache: one public function for prefill and decode, and its reference.

A row is one query token: it belongs to a sequence (its slot in the cache) and sees the positions 0 .. its own. What a
row computes depends neither on the other rows nor on how long the cache is, if all that is written there is finite.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_tiles import NO_SCORE, PIECE, SPLIT
from pallas_kernels.backend import Backend
from pallas_kernels.decode_attention import decode_attention, decode_scratch_bytes
from pallas_kernels.operand import Operand, OperandSpec
from pallas_kernels.prefill_attention import can_prefill, prefill_attention


def cached_attention(
    q: jax.Array,  # float32 [T, H, Hd]
    kv: jax.Array,  # bfloat16 or float32 [B, S, 2, KvH, Hd]: keys at index 0, values at 1
    slots: jax.Array,  # int32 [T], or [] when all rows belong to one sequence
    positions: jax.Array,  # int32 [T]; -1 for a row that is not in use
    *,
    operand: OperandSpec | None = None,
    backend: Backend = "triton",
) -> Any:  # float32 [T, H, Hd], or the operand of T rows, K = H Hd
    """Softmax(q k^T / sqrt(Hd)) v of each row over positions 0 .. positions[t] of sequence slots[t].

    Heads share keys and values in groups of H / KvH (grouped-query attention). A row that is not in use may give
    anything. Positions are below S; a kernel would read on.
    With `operand` the result is what `q8_partial_sums` takes for that product (`operand.py`).

    Rows of one sequence are computed as those of a prompt, many at a time over the same keys; rows with slots of their
    own one by one, with many programs for each. The two round differently.

    Raises:
      ValueError: shapes or dtypes do not fit together, or S is not a multiple of 128.
    """
    _check(q, kv, slots, positions)
    if backend == "reference":
        attended = cached_attention_reference(q, kv, slots, positions)
        return attended if operand is None else attended.reshape(len(q), -1)
    attend = prefill_attention if slots.ndim == 0 and can_prefill(q.shape[2]) else decode_attention
    slots = jnp.broadcast_to(slots, positions.shape)
    attended = attend(q, kv, slots, positions, operand=operand, backend=backend)
    return attended if isinstance(attended, Operand) else attended.reshape(q.shape)


def attention_scratch_bytes(tile_rows: int, chunk_rows: int, num_heads: int, head_dim: int, capacity: int) -> int:
    """Device memory for parts of results: of so many rows with slots of their own, or rows of one sequence."""
    rows = tile_rows if can_prefill(head_dim) else max(tile_rows, chunk_rows)
    return decode_scratch_bytes(rows, num_heads, head_dim, capacity)


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
