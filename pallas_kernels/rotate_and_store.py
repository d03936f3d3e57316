"""From the product with q, k and v to attention: bias, q and k norms, rotary positions, and the write to the KV cache.

RoPE: Su et al., 2021, arXiv:2104.09864; its frequencies come from the caller, who knows what they are. Norms of q and k
as in Henry et al., 2020, arXiv:2010.04245, with RMSNorm over each head.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.backend import Backend
from pallas_kernels.rows import Rms, call_for_rows, inverse_rms, load_inverse_rms, load_total, rms_norm, total_with_bias


@functools.partial(jax.jit, static_argnames=("rms", "num_heads", "bias_offset", "norm_offsets", "amplitude", "backend"))
def rotate_and_store(
    sums: jax.Array,  # float32 [S, T_padded, N], N >= (H + 2 KvH) Hd: the heads of q, then of k, then of v
    squares: jax.Array,  # float32 [T_padded, B], of the rows of the product, which are `Normed`
    params: jax.Array,  # float32 [P]: the bias [N], and norm weights [Hd], from their offsets on
    kv: jax.Array,  # bfloat16 or float32 [B, S, 2, KvH, Hd]: keys at index 0, values at 1
    slots: jax.Array,  # int32 [T], or [] when all rows belong to one sequence
    positions: jax.Array,  # int32 [T]; -1 for a row that is not in use
    frequencies: jax.Array,  # float32 [Hd / 2], radians per position
    *,
    rms: Rms,
    num_heads: int,
    bias_offset: int | None = None,
    norm_offsets: tuple[int, int] | None = None,  # of q and of k, whose norms have the same eps
    amplitude: float = 1.0,
    backend: Backend = "triton",
) -> tuple[jax.Array, jax.Array]:  # q float32 [T, H, Hd], kv
    """Writes each row's key and value at its position of its slot, and returns its queries.

    Each pair (x[i], x[i + Hd / 2]) of a head of q or k is turned by position * frequencies[i] and multiplied by
    `amplitude`; phases are float32 at every position. A row that is not in use writes nothing, and may have any
    queries; one whose position is beyond the cache writes nothing.
    """
    num_rows, (num_kv_heads, head_dim) = len(positions), kv.shape[3:]
    if backend == "reference":
        heads = total_with_bias(sums, params, bias_offset, num_rows, inverse_rms(squares, rms)[:num_rows])
        heads = heads[:, : (num_heads + 2 * num_kv_heads) * head_dim].reshape(num_rows, -1, head_dim)
        q, k, v = jnp.split(heads, [num_heads, num_heads + num_kv_heads], axis=1)
        if norm_offsets is not None:
            q, k = (
                rms_norm(x, params[offset : offset + head_dim], rms.eps)
                for x, offset in zip((q, k), norm_offsets, strict=True)
            )
        q, k = (rotate(x, positions, frequencies, amplitude) for x in (q, k))
        return q, write_rows(kv, jnp.stack([k, v], axis=1), slots, positions)
    q, kv = call_for_rows(
        functools.partial(
            _kernel,
            rms=rms,
            num_heads=num_heads,
            bias_offset=bias_offset,
            norm_offsets=norm_offsets,
            amplitude=amplitude,
        ),
        positions,
        out_shape=[
            jax.ShapeDtypeStruct((num_rows, num_heads, head_dim), jnp.float32),
            jax.ShapeDtypeStruct(kv.shape, kv.dtype),
        ],
        grid=(num_rows, num_heads + 2 * num_kv_heads),
        backend=backend,
        num_warps=1,
        num_stages=1,
        input_output_aliases={3: 1},
        name="rotate_and_store",
    )(sums, squares, params, kv, jnp.broadcast_to(slots, (num_rows,)), positions, frequencies)
    return q, kv


def rotate(
    x: jax.Array,  # float32 [T, H, Hd]
    positions: jax.Array,  # int32 [T]
    frequencies: jax.Array,  # float32 [Hd / 2]
    amplitude: float = 1.0,
) -> jax.Array:  # float32 [T, H, Hd]
    """Turns each pair (x[i], x[i + Hd / 2]) by position * frequencies[i], in plain `jnp`."""
    phases = positions.astype(jnp.float32)[:, None] * frequencies  # [T, Hd / 2]
    cos, sin = jnp.cos(phases)[:, None] * amplitude, jnp.sin(phases)[:, None] * amplitude  # [T, 1, Hd / 2]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def write_rows(
    kv: jax.Array,  # [B, S, 2, KvH, Hd]
    rows: jax.Array,  # float32 [T, 2, KvH, Hd]
    slots: jax.Array,  # int32 [T] or []
    positions: jax.Array,  # int32 [T]
) -> jax.Array:
    """Writes each row's keys and values at its position, in plain `jnp`; rows that are not in use write nothing."""
    # An index out of range is dropped, but -1 would count from the end and overwrite the last position.
    positions = jnp.where(positions < 0, kv.shape[1], positions)
    return kv.at[slots, positions].set(rows.astype(kv.dtype), mode="drop")


def _kernel(
    row: jax.Array,
    head: jax.Array,
    sums_ref: Any,  # float32 [S, T_padded, N]
    squares_ref: Any,  # float32 [T_padded, B]
    params_ref: Any,  # float32 [P]
    kv_in_ref: Any,  # [B, S, 2, KvH, Hd]: the same memory as kv_ref
    slots_ref: Any,  # int32 [T]
    positions_ref: Any,  # int32 [T]
    frequencies_ref: Any,  # float32 [Hd / 2]
    q_ref: Any,  # float32 [T, H, Hd]
    kv_ref: Any,  # [B, S, 2, KvH, Hd]
    *,
    rms: Rms,
    num_heads: int,
    bias_offset: int | None,
    norm_offsets: tuple[int, int] | None,
    amplitude: float,
) -> None:
    """One head of one row."""
    del kv_in_ref
    _, capacity, _, num_kv_heads, head_dim = kv_ref.shape
    is_q, is_v = head < num_heads, head >= num_heads + num_kv_heads
    half = head_dim // 2
    pairs = jnp.arange(pl.next_power_of_2(half))
    inside = pairs < half
    slot, position = pltriton.load(slots_ref.at[row]), pltriton.load(positions_ref.at[row])

    columns = head * head_dim + pairs
    row_scale = load_inverse_rms(squares_ref, row, rms)
    first = load_total(sums_ref, params_ref, row, columns, inside, bias_offset, row_scale)
    second = load_total(sums_ref, params_ref, row, columns + half, inside, bias_offset, row_scale)
    x, y = first, second
    if norm_offsets is not None:
        q_offset, k_offset = norm_offsets
        weights = q_offset + (head >= num_heads).astype(jnp.int32) * (k_offset - q_offset) + pairs
        scale = lax.rsqrt((jnp.sum(x * x) + jnp.sum(y * y)) / head_dim + rms.eps)
        x = x * scale * pltriton.load(params_ref.at[weights], mask=inside, other=0.0)
        y = y * scale * pltriton.load(params_ref.at[weights + half], mask=inside, other=0.0)
    phases = position.astype(jnp.float32) * pltriton.load(frequencies_ref.at[pairs], mask=inside, other=0.0)
    cos, sin = jnp.cos(phases) * amplitude, jnp.sin(phases) * amplitude
    x, y = x * cos - y * sin, y * cos + x * sin
    x, y = jnp.where(is_v, first, x), jnp.where(is_v, second, y)

    q_head = jnp.minimum(head, num_heads - 1)
    kv_head = jnp.maximum(head - num_heads, 0) % num_kv_heads
    is_stored = (head >= num_heads) & (position < capacity)
    place = (slot, jnp.minimum(position, capacity - 1), is_v.astype(jnp.int32), kv_head)
    for dims, values in ((pairs, x), (pairs + half, y)):
        pltriton.store(q_ref.at[row, q_head, dims], values, mask=inside & is_q)
        pltriton.store(kv_ref.at[(*place, dims)], values.astype(kv_ref.dtype), mask=inside & is_stored)
