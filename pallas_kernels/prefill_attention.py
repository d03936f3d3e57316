"""Attention of many rows of one sequence, as in a chunk of a prompt: each key is read for several rows at once."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.attention_tiles import MIN_DOT, PIECE, add_piece, start
from pallas_kernels.backend import Backend, kernel_call
from pallas_kernels.operand import OperandSpec
from pallas_kernels.rows import Rows, quantise_rows

QUERIES = 64  # rows times query heads that a program computes


def can_prefill(head_dim: int) -> bool:
    """Whether a head fills a block; all that GPUs are used for do.

    Else the lanes beyond it would stand for places of the next head, whose old values the interpreter writes back.
    """
    return head_dim >= MIN_DOT and head_dim == pl.next_power_of_2(head_dim)


@functools.partial(jax.jit, static_argnames=("operand", "backend"))
def prefill_attention(
    q: jax.Array,  # float32 [T, H, Hd]
    kv: jax.Array,  # [B, S, 2, KvH, Hd]
    slots: jax.Array,  # int32 [T], all the same
    positions: jax.Array,  # int32 [T]
    *,
    operand: OperandSpec | None,
    backend: Backend,
) -> Rows:  # float32 [T, H Hd], or an operand of T rows
    """`cached_attention` of rows of one sequence. Each row's positions are gone through in order, whatever its tile."""
    (num_rows, num_heads, _), num_kv_heads = q.shape, kv.shape[3]
    queries_per_kv = num_heads // num_kv_heads
    block_g = pl.next_power_of_2(queries_per_kv)
    block_rows = max(1, QUERIES // block_g)
    attended = kernel_call(
        functools.partial(_kernel, queries_per_kv=queries_per_kv, block_g=block_g, block_rows=block_rows),
        out_shape=jax.ShapeDtypeStruct(q.shape, jnp.float32),
        grid=(pl.cdiv(num_rows, block_rows), num_kv_heads),
        backend=backend,
        num_warps=4,
        num_stages=2,
        name="attention_prefill",
    )(q, kv, slots, positions).reshape(num_rows, -1)
    # A program has one head of many rows, and a group of inputs may be of two heads.
    return attended if operand is None else quantise_rows(attended, operand=operand, backend=backend)


def _kernel(
    q_ref: Any,  # float32 [T, H, Hd]
    kv_ref: Any,  # [B, S, 2, KvH, Hd]
    slots_ref: Any,  # int32 [T], all the same
    positions_ref: Any,  # int32 [T]
    out_ref: Any,  # float32 [T, H, Hd]
    *,
    queries_per_kv: int,
    block_g: int,
    block_rows: int,
) -> None:
    """The heads of one key head, of some rows: query m is row m // block_g of them, and head m % block_g."""
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    num_rows, _, head_dim = q_ref.shape
    queries, dims = jnp.arange(block_rows * block_g), jnp.arange(head_dim)
    rows, in_group = tile * block_rows + queries // block_g, queries % block_g
    heads = kv_head * queries_per_kv + in_group
    is_query = in_group < queries_per_kv
    in_use = is_query & (rows < num_rows)
    last = pltriton.load(positions_ref.at[rows], mask=in_use, other=-1)
    q = pltriton.load(q_ref.at[rows[:, None], heads[:, None], dims[None, :]], mask=in_use[:, None], other=0.0)
    q = q / math.sqrt(head_dim)
    slot, highest = pltriton.load(slots_ref.at[jnp.minimum(tile * block_rows, num_rows - 1)]), jnp.max(last)

    def attend(step: jax.Array, state: Any) -> Any:
        return add_piece(state, q, kv_ref, slot, kv_head, step * PIECE, last, highest)

    _, total, acc = lax.fori_loop(0, (highest + PIECE) // PIECE, attend, start(len(queries), head_dim))
    attended = acc / jnp.maximum(total, 1e-30)[:, None]
    pltriton.store(out_ref.at[rows[:, None], heads[:, None], dims[None, :]], attended, mask=in_use[:, None])
