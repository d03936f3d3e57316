"""Matrix product with Q8 weights: `y = x @ dequantise(values, scales).T`.

Activations are float32 and stay nearly so: a tensor core multiplies bfloat16, so each activation is split into a
bfloat16 ("high") and the bfloat16 of what that leaves over ("low"). Int8 is exact in bfloat16, products are exact in
the float32 accumulator, and what is lost is below 2**-16 of each activation. High and low parts go through the tensor
core as rows of one tile, so that a weight is loaded and converted once for both.

For a few rows the time is that of reading the weights, so the kernel is built around keeping many bytes in flight:

- weights are the left operand, which a tensor core takes from registers, where int8 becomes bfloat16;
- inputs are reordered within a group (`_reorder_inputs`), so that weights come into registers in runs of bytes;
- K is cut into splits where N alone gives too few programs, and the splits are added afterwards.

A row of the result is computed the same way whatever the other rows hold and however many there are: groups are added
in order within a split, and splits in order, and where they begin depends on the shape of the weights alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.backend import Backend, kernel_call

BLOCK_COLUMNS = 64  # columns a program computes: the fewest that a Hopper tensor core takes from registers; divides N
NUM_WARPS = 4
NUM_STAGES = 3  # a deeper pipeline was slower: its buffers leave room for fewer programs at once
MIN_TILE_ROWS = 16
MAX_TILE_ROWS = 64  # the sums of more would not fit in registers
STEP_INPUTS = 128  # inputs per turn of the loop: a cache line of each column's weights
MIN_STEPS = 2  # turns per split, so that loading has something to overlap with
NUM_PROGRAMS = 384  # about three for each multiprocessor of a large GPU, which runs them at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """How a product is cut up: a program computes `block_t` x BLOCK_COLUMNS results over one split of K."""

    block_t: int
    groups_per_step: int
    steps_per_split: int
    num_splits: int


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
    rows = x.shape[0]
    n, k_padded = values.shape
    tiling = _tiling(rows, n, k_padded, group)
    operand = _split_activations(x, k_padded, group, tiling.block_t)
    rows_padded = operand.shape[0] // 2
    partial_sums = kernel_call(
        functools.partial(_kernel, group=group, scales_offset=scales_offset, tiling=tiling),
        out_shape=jax.ShapeDtypeStruct((tiling.num_splits, rows_padded, n), jnp.float32),
        # Row tiles of the same weights run next to each other: one reads them from memory, the others from the cache.
        grid=(rows_padded // tiling.block_t, n // BLOCK_COLUMNS, tiling.num_splits),
        backend=backend,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        name="q8_matmul",
    )(operand, values, scales.reshape(-1))
    return functools.reduce(jnp.add, partial_sums)[:rows]


def scratch_bytes(rows: int, values_shape: tuple[int, int], group: int) -> int:
    """Device memory that a product of `rows` rows takes besides its arguments and result: operand and partial sums."""
    n, k_padded = values_shape
    tiling = _tiling(rows, n, k_padded, group)
    rows_padded = pl.cdiv(rows, tiling.block_t) * tiling.block_t
    return rows_padded * (2 * 2 * k_padded + 4 * tiling.num_splits * n)


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
    x_ref: Any,  # bfloat16 [2 * T, K_padded], from _split_activations
    values_ref: Any,  # int8 [N, K_padded]
    scales_ref: Any,  # float32 [...]
    out_ref: Any,  # float32 [S, T, N]
    *,
    group: int,
    scales_offset: int,
    tiling: _Tiling,
) -> None:
    n, k_padded = values_ref.shape
    num_groups = k_padded // group
    block_t, per_step = tiling.block_t, tiling.groups_per_step
    row_tile, column_tile, split = (pl.program_id(axis) for axis in range(3))
    first_column = column_tile * BLOCK_COLUMNS
    columns = pl.ds(first_column, BLOCK_COLUMNS)
    first_step = split * tiling.steps_per_split
    last_step = jnp.minimum(first_step + tiling.steps_per_split, num_groups // per_step)

    def load_scales(step: jax.Array) -> list[jax.Array]:  # [BN] for each group of the step
        groups = [jnp.minimum(step * per_step + i, num_groups - 1) for i in range(per_step)]
        starts = [scales_offset + g * n + first_column for g in groups]
        return [pltriton.load(scales_ref.at[pl.ds(start, BLOCK_COLUMNS)]) for start in starts]

    def add_step(step: jax.Array, carry: tuple[list[jax.Array], jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        scales, acc = carry
        # The compiler loads ahead what a product takes, which is x and w. Scales are loaded one step ahead by hand.
        next_scales = load_scales(step + 1)
        for i in range(per_step):
            inputs = pl.ds((step * per_step + i) * group, group)
            w = pltriton.load(values_ref.at[columns, inputs])  # [BN, group]
            x = pltriton.load(x_ref.at[pl.ds(row_tile * 2 * block_t, 2 * block_t), inputs])  # [2 * BT, group]
            w = _reorder_inputs(w, group).astype(jnp.bfloat16)
            y = lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)  # [BN, 2 * BT]
            acc = acc + y * scales[i][:, None]
        return next_scales, acc

    carry = load_scales(first_step), jnp.zeros((BLOCK_COLUMNS, 2 * block_t), jnp.float32)
    _, acc = lax.fori_loop(first_step, last_step, add_step, carry)
    y = acc.reshape(BLOCK_COLUMNS, 2, block_t).sum(axis=1)  # [BN, BT], high and low parts together
    pltriton.store(out_ref.at[split, pl.ds(row_tile * block_t, block_t), columns], y.T)


def _split_activations(
    x: jax.Array,  # float32 [T, K]
    k_padded: int,
    group: int,
    block_t: int,
) -> jax.Array:  # bfloat16 [2 * T_padded, K_padded]
    """The kernel's operand: for each tile of `block_t` rows their high parts, then their low parts."""
    rows, k = x.shape
    x = jnp.pad(x, ((0, -rows % block_t), (0, k_padded - k)))
    # Not x.astype(bfloat16).astype(float32): XLA may drop such a pair of casts, and the low part would be zero.
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    tiles = [part.reshape(-1, block_t, k_padded) for part in (high, x - high)]
    return _reorder_inputs(jnp.stack(tiles, axis=1).astype(jnp.bfloat16).reshape(-1, k_padded), group)


def _reorder_inputs(a: jax.Array, group: int) -> jax.Array:  # [R, K] -> [R, K]
    """Reorders the columns within each group, by the same rule for both operands, which leaves the product as it is.

    Of every 16 inputs, a tensor core wants 2q, 2q + 1, 2q + 8 and 2q + 9 in the q-th of four threads: pairs, far
    apart. With input q * group / 4 + 4 * c + 2 * j + i at position 16 * c + 8 * j + 2 * q + i, each thread's inputs
    are a quarter of the group in one piece.
    """
    parts = a.reshape(-1, 4, group // 16, 2, 2)  # q, c, j, i
    return parts.transpose(0, 2, 3, 1, 4).reshape(a.shape)


def _tiling(rows: int, n: int, k_padded: int, group: int) -> _Tiling:
    num_groups = k_padded // group
    groups_per_step = math.gcd(num_groups, max(1, STEP_INPUTS // group))
    num_steps = num_groups // groups_per_step
    # Not a function of the number of rows: a row's result must not depend on how many others there are.
    splits = min(pl.cdiv(NUM_PROGRAMS * BLOCK_COLUMNS, n), max(1, num_steps // MIN_STEPS))
    steps_per_split = pl.cdiv(num_steps, splits)
    return _Tiling(
        block_t=min(MAX_TILE_ROWS, max(MIN_TILE_ROWS, pl.next_power_of_2(rows))),
        groups_per_step=groups_per_step,
        steps_per_split=steps_per_split,
        num_splits=pl.cdiv(num_steps, steps_per_split),
    )


def _check(x: jax.Array, values: jax.Array, scales: jax.Array, group: int, scales_offset: int) -> None:
    if x.ndim != 2 or x.dtype != jnp.float32:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; expected float32 [T, K]")
    if values.ndim != 2 or values.dtype != jnp.int8:
        raise ValueError(f"values is {values.dtype}{list(values.shape)}; expected int8 [N, K_padded]")
    n, k_padded = values.shape
    if group < 16 or group & (group - 1):
        raise ValueError(f"group is {group}; expected a power of two of at least 16")
    if n % BLOCK_COLUMNS:
        raise ValueError(f"values has {n} rows; expected a multiple of {BLOCK_COLUMNS}: pad it with rows of zeros")
    if k_padded % group or not k_padded - group < x.shape[1] <= k_padded:
        raise ValueError(f"x has K = {x.shape[1]} and values {k_padded}; expected K padded to whole groups of {group}")
    num_scales = k_padded // group * n
    if scales.dtype != jnp.float32 or scales.ndim not in (1, 2) or scales_offset < 0:
        raise ValueError(f"scales is {scales.dtype}{list(scales.shape)} from {scales_offset}; expected float32 [G, N]")
    if scales.ndim == 2 and (scales.shape != (k_padded // group, n) or scales_offset):
        raise ValueError(f"scales is {list(scales.shape)}; expected [G, N] = [{k_padded // group}, {n}]")
    if scales.size < scales_offset + num_scales:
        raise ValueError(f"scales holds {scales.size} floats; expected {num_scales} from {scales_offset} on")
