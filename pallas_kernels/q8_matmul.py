"""Matrix product with Q8 weights: `y = x @ dequantise(values, scales).T`.

Activations are float32 and stay nearly so: a tensor core multiplies bfloat16, so each activation is split into a
bfloat16 and the bfloat16 of what that leaves over. Int8 is exact in bfloat16, products are exact in the float32
accumulator, and what is lost is below 2**-16 of each activation. One row of weights is read once for a whole tile of
activation rows, and the read is what takes the time, so the second product costs next to nothing.

A row of the result is computed the same way whatever the other rows hold: groups are added in order, on one program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.backend import Backend, kernel_call

TILE_ROWS = 16  # the fewest rows that a tensor core takes
MAX_TILE_ROWS = 64
MIN_COLUMNS = 64  # N is padded to a multiple of this
NUM_PROGRAMS = 132  # enough to give each multiprocessor of a large GPU one


def q8_matmul(
    x: jax.Array,  # float32 [T, K]
    values: jax.Array,  # int8 [N, K_padded]
    scales: jax.Array,  # float32 [G, N], or a 1-D array that holds it row by row from `scales_offset` on
    *,
    group: int,
    scales_offset: int = 0,
    backend: Backend = "triton",
) -> jax.Array:  # float32 [T, N]
    """Multiplies activations by a Q8 matrix whose groups run along K.

    K may be up to one group shorter than `K_padded = G * group`; the padding of `values` must be zeros. N must be a
    multiple of 64.

    Raises:
      ValueError: shapes or dtypes do not fit together.
    """
    _check(x, values, scales, group, scales_offset)
    if backend == "reference":
        return q8_matmul_reference(x, values, scales, group=group, scales_offset=scales_offset)
    rows, k = x.shape
    n, k_padded = values.shape
    block_t = min(MAX_TILE_ROWS, max(TILE_ROWS, pl.next_power_of_2(rows)))
    rows_padded = pl.cdiv(rows, block_t) * block_t
    x = jnp.pad(x, ((0, rows_padded - rows), (0, k_padded - k)))
    block_n = _block_columns(n)
    out = kernel_call(
        functools.partial(_kernel, group=group, scales_offset=scales_offset, block_t=block_t, block_n=block_n),
        out_shape=jax.ShapeDtypeStruct((rows_padded, n), jnp.float32),
        grid=(n // block_n, rows_padded // block_t),
        backend=backend,
        num_warps=4,
        num_stages=4,
        name="q8_matmul",
    )(x, values, scales.reshape(-1))
    return out[:rows]


def q8_matmul_reference(
    x: jax.Array,  # float32 [T, K]
    values: jax.Array,  # int8 [N, K_padded]
    scales: jax.Array,  # float32 [G, N], or 1-D
    *,
    group: int,
    scales_offset: int = 0,
) -> jax.Array:  # float32 [T, N]
    """The same product in plain `jnp`: float32 throughout, group after group."""
    rows, k = x.shape
    n, k_padded = values.shape
    num_groups = k_padded // group
    x = jnp.pad(x, ((0, 0), (0, k_padded - k)))
    scales = lax.dynamic_slice(scales.reshape(-1), (scales_offset,), (num_groups * n,)).reshape(num_groups, n)

    # One group at a time: a matrix converted to float32 in one piece would be written to memory and read again.
    def add_group(g: jax.Array, acc: jax.Array) -> jax.Array:
        x_g = lax.dynamic_slice(x, (0, g * group), (rows, group))  # [T, group]
        w_g = lax.dynamic_slice(values, (0, g * group), (n, group)).astype(jnp.float32)  # [N, group]
        y_g = lax.dot_general(x_g, w_g, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)  # [T, N]
        return acc + y_g * scales[g]

    return lax.fori_loop(0, num_groups, add_group, jnp.zeros((rows, n), jnp.float32))


def _kernel(
    x_ref: Any,  # float32 [T, K_padded]
    values_ref: Any,  # int8 [N, K_padded]
    scales_ref: Any,  # float32 [...]
    out_ref: Any,  # float32 [T, N]
    *,
    group: int,
    scales_offset: int,
    block_t: int,
    block_n: int,
) -> None:
    n, k_padded = values_ref.shape
    first_column = pl.program_id(0) * block_n
    columns = pl.ds(first_column, block_n)
    rows = pl.ds(pl.program_id(1) * block_t, block_t)

    def add_group(g: jax.Array, acc: jax.Array) -> jax.Array:
        inputs = pl.ds(g * group, group)
        w = pltriton.load(values_ref.at[columns, inputs]).astype(jnp.bfloat16).T  # [group, BN]
        x = pltriton.load(x_ref.at[rows, inputs])  # [BT, group]
        high = x.astype(jnp.bfloat16)
        low = (x - high.astype(jnp.float32)).astype(jnp.bfloat16)
        y = jnp.dot(high, w, preferred_element_type=jnp.float32) + jnp.dot(low, w, preferred_element_type=jnp.float32)
        scales = pltriton.load(scales_ref.at[pl.ds(scales_offset + g * n + first_column, block_n)])  # [BN]
        return acc + y * scales[None, :]

    acc = lax.fori_loop(0, k_padded // group, add_group, jnp.zeros((block_t, block_n), jnp.float32))
    pltriton.store(out_ref.at[rows, columns], acc)


def _block_columns(n: int) -> int:
    """Columns a program computes: as many as leave every multiprocessor something to do."""
    block = 128
    while block > 16 and (n % block or n // block < NUM_PROGRAMS):
        block //= 2
    return block


def _check(x: jax.Array, values: jax.Array, scales: jax.Array, group: int, scales_offset: int) -> None:
    if x.ndim != 2 or x.dtype != jnp.float32:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; expected float32 [T, K]")
    if values.ndim != 2 or values.dtype != jnp.int8:
        raise ValueError(f"values is {values.dtype}{list(values.shape)}; expected int8 [N, K_padded]")
    n, k_padded = values.shape
    if group < 16 or group & (group - 1):
        raise ValueError(f"group is {group}; expected a power of two of at least 16")
    if n % MIN_COLUMNS:
        raise ValueError(f"values has {n} rows; expected a multiple of {MIN_COLUMNS}: pad it with rows of zeros")
    if k_padded % group or not k_padded - group < x.shape[1] <= k_padded:
        raise ValueError(f"x has K = {x.shape[1]} and values {k_padded}; expected K padded to whole groups of {group}")
    num_scales = k_padded // group * n
    if scales.dtype != jnp.float32 or scales.ndim not in (1, 2) or scales_offset < 0:
        raise ValueError(f"scales is {scales.dtype}{list(scales.shape)} from {scales_offset}; expected float32 [G, N]")
    if scales.ndim == 2 and (scales.shape != (k_padded // group, n) or scales_offset):
        raise ValueError(f"scales is {list(scales.shape)}; expected [G, N] = [{k_padded // group}, {n}]")
    if scales.size < scales_offset + num_scales:
        raise ValueError(f"scales holds {scales.size} floats; expected {num_scales} from {scales_offset} on")
