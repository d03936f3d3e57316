"""Attention of rows with slots of their own, as in a decode step: few rows, so many programs work on each.

A row's positions are cut into splits of a fixed size. Programs take turns at the splits of a row and leave a softmax
and its values for each; a second kernel adds these up in order. How many programs there are changes nothing in a split,
so the rows that are in use share all programs: mostly one has them all.

The decode form with splits: Flash-Decoding (Dao et al., 2023), as in FlashAttention-2's repository.
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

from pallas_kernels.attention_tiles import (
    MIN_DOT,
    NO_SCORE,
    PIECE,
    SPLIT,
    add_piece,
    start,
)
from pallas_kernels.backend import Backend, kernel_call
from pallas_kernels.operand import OperandSpec, padded_rows
from pallas_kernels.rows import Rows, call_for_rows, quantise_rows

MAX_WORKERS = 48  # programs that share the splits of all rows of one key head, if there are not more rows
# Splits that are added up at once: the first ones, which are all there are of most sequences, and then more at a time.
# Not a function of the cache's size, on which no bit may depend.
FIRST_COMBINED, COMBINED = 16, 64
COMBINED_RESULTS = 128  # of a row, at least, by one program


@functools.partial(jax.jit, static_argnames=("operand", "backend"))
def decode_attention(
    q: jax.Array,  # float32 [T, H, Hd]
    kv: jax.Array,  # [B, S, 2, KvH, Hd]
    slots: jax.Array,  # int32 [T]
    positions: jax.Array,  # int32 [T]
    *,
    operand: OperandSpec | None,
    backend: Backend,
) -> Rows:  # float32 [T, H Hd], or an operand of T rows
    """`cached_attention` of rows with slots of their own."""
    num_rows, num_heads, head_dim = q.shape
    _, capacity, _, num_kv_heads, _ = kv.shape
    # Groups of an operand are whole heads or parts of one, unless a head is of an odd size.
    if operand is not None and head_dim != pl.next_power_of_2(head_dim):
        whole = decode_attention(q, kv, slots, positions, operand=None, backend=backend)
        assert isinstance(whole, jax.Array)
        return quantise_rows(whole, operand=operand, backend=backend)
    num_splits = capacity // SPLIT
    partial_shape = (num_rows, num_heads, num_splits)
    acc, high, total = kernel_call(
        functools.partial(_split_kernel, queries_per_kv=num_heads // num_kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct((*partial_shape, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
            jax.ShapeDtypeStruct(partial_shape, jnp.float32),
        ],
        # Programs with something to do are the first in this order, in which they are started.
        grid=(num_kv_heads, max(num_rows, min(num_rows * num_splits, MAX_WORKERS))),
        backend=backend,
        num_warps=4,
        num_stages=2,
        name="attention_splits",
    )(q, kv, slots, positions)
    rows, results = (num_rows, num_heads * head_dim) if operand is None else (padded_rows(num_rows), operand.k_padded)
    block_heads = pl.cdiv(max(COMBINED_RESULTS, operand.group if operand else 0), pl.next_power_of_2(head_dim))
    (result,) = call_for_rows(
        functools.partial(_combine_kernel, operand=operand, block_heads=block_heads),
        positions,
        out_shape=[jax.ShapeDtypeStruct((rows, results), jnp.float32) if operand is None else operand.shape(num_rows)],
        grid=(rows, pl.cdiv(results, block_heads * head_dim)),
        backend=backend,
        num_warps=4,
        num_stages=1,
        name="attention_combine",
    )(acc, high, total, positions)
    return result


def decode_scratch_bytes(num_rows: int, num_heads: int, head_dim: int, capacity: int) -> int:
    """Device memory that the parts of so many rows take."""
    return 4 * num_rows * num_heads * (capacity // SPLIT) * (head_dim + 2)


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
    """Every `num_workers`-th split of one row and key head."""
    kv_head, program = pl.program_id(0), pl.program_id(1)
    num_programs, head_dim = pl.num_programs(1), q_ref.shape[-1]
    row, slot, position, num_used = _used_row(positions_ref, slots_ref, program)
    worker, num_workers = program // num_used, num_programs // num_used
    block_g = max(MIN_DOT, pl.next_power_of_2(queries_per_kv))
    block_d = max(MIN_DOT, pl.next_power_of_2(head_dim))
    position = jnp.where(worker < num_workers, position, -1)  # programs that are left over have nothing to do

    queries, dims = jnp.arange(block_g), jnp.arange(block_d)
    heads = kv_head * queries_per_kv + queries
    head_mask = queries < queries_per_kv
    q_mask = head_mask[:, None] & (dims < head_dim)[None, :]
    q = pltriton.load(q_ref.at[row, heads[:, None], dims[None, :]], mask=q_mask, other=0.0) / math.sqrt(head_dim)
    last = jnp.full((block_g,), position, jnp.int32)

    def attend_split(turn: jax.Array, carry: jax.Array) -> jax.Array:
        split = worker + turn * num_workers

        def attend(step: jax.Array, state: Any) -> Any:
            return add_piece(state, q, kv_ref, slot, kv_head, split * SPLIT + step * PIECE, last, position)

        num_steps = jnp.minimum((position - split * SPLIT) // PIECE + 1, SPLIT // PIECE)
        high, total, acc = lax.fori_loop(0, num_steps, attend, start(block_g, block_d))
        pltriton.store(acc_ref.at[row, heads[:, None], split, dims[None, :]], acc, mask=q_mask)
        pltriton.store(high_ref.at[row, heads, split], high, mask=head_mask)
        pltriton.store(total_ref.at[row, heads, split], total, mask=head_mask)
        return carry

    # Splits past the row's position are not even begun.
    num_splits = (position + SPLIT) // SPLIT
    lax.fori_loop(0, (num_splits - worker + num_workers - 1) // num_workers, attend_split, jnp.int32(0))


def _used_row(positions_ref: Any, slots_ref: Any, program: jax.Array) -> tuple[jax.Array, ...]:  # int32 [], each
    """In a kernel: whose row a program's is, of those in use, which take turns: the row, its slot and its position; and
    how many are in use, or 1."""
    (num_rows,) = positions_ref.shape
    rows = jnp.arange(pl.next_power_of_2(num_rows))
    positions = pltriton.load(positions_ref.at[rows], mask=rows < num_rows, other=-1)
    slots = pltriton.load(slots_ref.at[rows], mask=rows < num_rows, other=0)
    used = (positions >= 0).astype(jnp.int32)
    num_used = jnp.maximum(used.sum(), 1)
    places = jnp.cumsum(used) - 1  # among those in use
    is_mine = (used > 0) & (places == program % num_used)
    row, slot, num_seen = (jnp.where(is_mine, values, 0).sum() for values in (rows, slots, positions + 1))
    return row, slot, num_seen - 1, num_used


def _combine_kernel(
    row: jax.Array,
    piece: jax.Array,
    acc_ref: Any,  # float32 [T, H, num_splits, Hd]
    high_ref: Any,  # float32 [T, H, num_splits]
    total_ref: Any,  # float32 [T, H, num_splits]
    positions_ref: Any,  # int32 [T]
    out_ref: Any,  # float32 [T, H Hd], or an Operand
    *,
    operand: OperandSpec | None,
    block_heads: int,
) -> None:
    """Some heads of one row."""
    _, num_heads, _, head_dim = acc_ref.shape
    first_head = piece * block_heads
    num_splits = (pltriton.load(positions_ref.at[row]) + SPLIT) // SPLIT
    heads, dims = first_head + jnp.arange(block_heads), jnp.arange(pl.next_power_of_2(head_dim))
    is_head, is_dim = heads < num_heads, dims < head_dim

    def add_splits(splits: jax.Array, state: Any) -> Any:
        high, total, acc = state  # [heads], [heads], [heads, Hd]
        used = (splits < num_splits)[:, None] & is_head[None, :]  # [splits, heads]
        place = row, heads[None, :], splits[:, None]
        highs = pltriton.load(high_ref.at[place], mask=used, other=NO_SCORE)
        totals = pltriton.load(total_ref.at[place], mask=used, other=0.0)
        accs = pltriton.load(
            acc_ref.at[row, heads[None, :, None], splits[:, None, None], dims[None, None, :]],
            mask=used[:, :, None] & is_dim[None, None, :],
            other=0.0,
        )
        new_high = jnp.maximum(high, highs.max(0))
        decay, weights = jnp.exp(high - new_high), jnp.where(used, jnp.exp(highs - new_high[None, :]), 0.0)
        return (
            new_high,
            total * decay + (totals * weights).sum(0),
            acc * decay[:, None] + (accs * weights[:, :, None]).sum(0),
        )

    state = jnp.full(heads.shape, NO_SCORE, jnp.float32), jnp.zeros(heads.shape), jnp.zeros((block_heads, len(dims)))
    state = add_splits(jnp.arange(FIRST_COMBINED), state)
    _, total, acc = lax.fori_loop(
        0,
        (num_splits - FIRST_COMBINED + COMBINED - 1) // COMBINED,
        lambda turn, state: add_splits(FIRST_COMBINED + turn * COMBINED + jnp.arange(COMBINED), state),
        state,
    )
    attended = acc / jnp.maximum(total, 1e-30)[:, None]
    if operand is None:
        columns = heads[:, None] * head_dim + dims[None, :]
        pltriton.store(out_ref.at[row, columns], attended, mask=is_head[:, None] & is_dim[None, :])
    else:
        first_group = first_head * head_dim // operand.group
        operand.store(out_ref, row, first_group, attended.reshape(-1, operand.group))
