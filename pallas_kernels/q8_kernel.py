"""Matrix product with Q8 weights: `y = x @ dequantise(values, scales).T`.

Activations are float32 and stay nearly so: they come as int8 digits with scales (`operand.py`), which a tensor core
multiplies with the int8 weights as they are, exactly, and adds up exactly within a group of inputs; what groups come to
is scaled and added up in float32. `q8_triton.py` has this kernel in Triton's own language.

For a few rows the time is that of reading the weights, so the kernel is built around keeping many bytes in flight, and
K is cut into splits where N alone gives too few programs; whoever takes the product adds the splits up.

A row of the result is computed the same way whatever the other rows hold: groups are added in order within a split,
and splits in order. Where splits begin depends on the shape of the weights, the kind of GPU, and whether there are few
rows or many (`tuning.py`), but on nothing else.
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

from pallas_kernels.backend import Backend, kernel_call, triton_call, triton_extra
from pallas_kernels.operand import HIGH, Operand, OperandSpec, padded_rows, rows_in_use, tile_rows
from pallas_kernels.tuning import MOST_FEW, Q8Config, q8_config

COLUMN_MULTIPLE = 64  # what N is padded to
MAX_GROUP = 256  # inputs whose products, 256 times as large for high digits, an int32 surely holds the sum of
MAX_VALUES = 2**31 - 1  # of a matrix: Pallas counts them in 32 bits where they are no more than 4 GiB
MIN_STEPS = 2  # turns per split, so that loading has something to overlap with


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Tiling:
    """How a product is cut up: a program computes `block_rows` x `block_columns` results over one split of K."""

    block_rows: int
    block_columns: int
    groups_per_step: int
    steps_per_split: int
    num_splits: int


@functools.partial(jax.jit, static_argnames=("num_rows", "group", "scales_offset", "config", "backend"))
def q8_partial_sums(
    operand: Operand | jax.Array,  # of T rows; float32 [T, K] for the reference
    values: jax.Array,  # int8 [N, K_padded]
    scales: jax.Array,  # float32 [G, N], or a 1-D array that holds it row by row from `scales_offset` on
    *,
    num_rows: int,
    group: int,
    scales_offset: int = 0,
    positions: jax.Array | None = None,  # int32 [T]; -1 for a row that is not in use
    config: Q8Config | None = None,
    backend: Backend = "triton",
) -> jax.Array:  # float32 [S, T_padded, N]; [1, T, N] from the reference
    """The product of rows that come as an operand, in S parts; `total_rows` is the whole.

    For kernels that make operands and add parts up themselves; `q8_matmul` says what the arguments are. A row that is
    not in use may be anything in the operand, and in the result. `config`: None is what was measured to be best
    (`tuning.py`).

    Raises:
      ValueError: the operand is one of other rows or for another matrix, this one is too large, `config` does not
        divide it, or positions are those of other rows.
    """
    if not isinstance(operand, Operand):
        return q8_matmul_reference(operand, values, scales, group=group, scales_offset=scales_offset)[None]
    n, k_padded = values.shape
    config = config or q8_config(n, k_padded, group, num_rows)
    tiling = _tiling(num_rows, n, k_padded, group, config)
    rows_padded = padded_rows(num_rows)
    shapes = operand.digits.shape[1:], operand.scales.shape
    expected = (rows_padded, k_padded), (k_padded // group, rows_padded)
    if shapes != expected:
        raise ValueError(f"the operand has digits and scales of {shapes}; expected {expected}: make it for this matrix")
    if positions is not None and positions.shape != (num_rows,):
        raise ValueError(f"positions is {list(positions.shape)}; expected [T = {num_rows}]")
    if values.size > MAX_VALUES:
        raise ValueError(f"values is int8{list(values.shape)}; expected at most {MAX_VALUES} entries: cut it into two")
    if n % config.block_columns:
        raise ValueError(f"values has {n} rows; expected a multiple of the config's {config.block_columns} columns")
    launch: dict[str, Any] = {
        "out_shape": jax.ShapeDtypeStruct((tiling.num_splits, rows_padded, n), jnp.float32),
        # Row tiles of the same weights run next to each other: one reads them from memory, the others from the cache.
        "grid": (rows_padded // tiling.block_rows, n // tiling.block_columns, tiling.num_splits),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "name": "q8_matmul",
    }
    arrays = operand.digits, operand.scales, values, scales.reshape(-1)
    if backend == "jax_triton":
        with triton_extra():
            from pallas_kernels.q8_triton import q8_matmul as kernel
        num_digits = len(operand.digits)
        return triton_call(
            kernel,
            **launch,
            n=n,
            k_padded=k_padded,
            num_rows=rows_padded,
            group=group,
            scales_offset=scales_offset,
            num_digits=num_digits,
            joined=config.joined and num_digits == 2,
            block_rows=tiling.block_rows,
            block_columns=tiling.block_columns,
            groups_per_step=tiling.groups_per_step,
            steps_per_split=tiling.steps_per_split,
        )(*arrays)
    settings = {"group": group, "scales_offset": scales_offset, "tiling": tiling, "joined": config.joined}
    if num_rows > MOST_FEW:  # of which few are not in use
        num_rows, positions = rows_padded, None
    kernel = functools.partial(_kernel, num_rows=num_rows, **settings)
    return kernel_call(kernel, **launch, backend=backend)(*arrays, *([] if positions is None else [positions]))


def total_rows(sums: jax.Array, num_rows: int) -> jax.Array:  # float32 [S, T_padded, N] -> [T, N]
    """The product that `q8_partial_sums` left in parts, which are added in order."""
    return functools.reduce(jnp.add, sums)[:num_rows]


def scratch_bytes(rows: int, values_shape: tuple[int, int], group: int) -> int:
    """Device memory that a product of `rows` rows takes besides its arguments and result: operand and partial sums."""
    n, k_padded = values_shape
    num_splits = _tiling(rows, n, k_padded, group, q8_config(n, k_padded, group, rows)).num_splits
    operand_bytes = OperandSpec(k_padded=k_padded, group=group).num_bytes(rows)
    return operand_bytes + 4 * padded_rows(rows) * num_splits * n


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
    digits_ref: Any,  # int8 [P, T, K_padded]
    x_scales_ref: Any,  # float32 [G, T]
    values_ref: Any,  # int8 [N, K_padded]
    scales_ref: Any,  # float32 [...]
    *refs: Any,  # positions int32 [num_rows], if they are given; the result float32 [S, T, N]
    num_rows: int,  # of the T rows; the others only fill a tile up
    group: int,
    scales_offset: int,
    tiling: _Tiling,
    joined: bool,
) -> None:
    num_digits, n = digits_ref.shape[0], values_ref.shape[0]
    num_groups = values_ref.shape[1] // group
    block_rows, block_columns, per_step = tiling.block_rows, tiling.block_columns, tiling.groups_per_step
    row_tile, column_tile, split = (pl.program_id(axis) for axis in range(3))
    first_row, first_column = row_tile * block_rows, column_tile * block_columns
    rows, columns = pl.ds(first_row, block_rows), pl.ds(first_column, block_columns)
    *positions_ref, out_ref = refs
    first_step = split * tiling.steps_per_split
    last_step = jnp.minimum(first_step + tiling.steps_per_split, num_groups // per_step)
    joined = joined and num_digits == 2
    # Joined digits are rows of one product: first the high digits of all rows, then the low ones.
    both = jnp.arange(2 * block_rows)
    is_high = both < block_rows

    def in_use(rows: jax.Array, width: int) -> jax.Array | None:  # int32 [R] -> bool [R, width]; None is all
        rows = first_row + rows
        if not positions_ref and num_rows == digits_ref.shape[1]:
            return None
        are_in_use = rows_in_use(positions_ref[0], rows) if positions_ref else rows < num_rows
        return jnp.broadcast_to(are_in_use[:, None], (len(rows), width))

    # Every block of columns takes the digits of its split from a cache. Those of a whole tile are half as many bytes as
    # the weights, or a quarter; of one row they are next to nothing.
    is_read = in_use(both % block_rows if joined else jnp.arange(block_rows), group)

    def load_scales(step: jax.Array) -> list[tuple[jax.Array, jax.Array]]:  # [BN] and [BT], for each group of the step
        scales = []
        for i in range(per_step):
            g = jnp.minimum(step * per_step + i, num_groups - 1)
            w_scales = pltriton.load(scales_ref.at[pl.ds(scales_offset + g * n + first_column, block_columns)])
            if joined:
                x_scales = pltriton.load(x_scales_ref.at[g, first_row + both % block_rows])
                scales.append((w_scales, x_scales * jnp.where(is_high, HIGH, 1.0)))
            else:
                scales.append((w_scales, pltriton.load(x_scales_ref.at[g, rows])))
        return scales

    def multiply(w: jax.Array, inputs: Any) -> jax.Array:  # int8 [BN, group] -> int32 [BN, BT]; [BN, 2 BT] if joined
        def dot(place: tuple[Any, ...]) -> jax.Array:
            digits = pltriton.load(digits_ref.at[place], mask=is_read, other=None if is_read is None else 0)
            return lax.dot_general(w, digits, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)

        if joined:
            return dot((jnp.where(is_high, 0, 1)[:, None], (first_row + both % block_rows)[:, None], inputs[None, :]))
        high, *low = [dot((jnp.int32(i), rows, inputs)) for i in range(num_digits)]
        return high * HIGH + low[0] if low else high

    def add_step(step: jax.Array, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
        scales, acc = carry
        # The compiler loads ahead what a product takes, which is digits and w. Scales are loaded ahead by hand.
        next_scales = load_scales(step + 1)
        for i, (w_scales, x_scales) in enumerate(scales):
            first_input = (step * per_step + i) * group
            inputs = first_input + jnp.arange(group) if joined else pl.ds(first_input, group)
            w = pltriton.load(values_ref.at[columns, pl.ds(first_input, group)])  # [BN, group]
            acc = acc + multiply(w, inputs).astype(jnp.float32) * (w_scales[:, None] * x_scales[None, :])
        return next_scales, acc

    acc = jnp.zeros((block_columns, (2 if joined else 1) * block_rows), jnp.float32)
    _, acc = lax.fori_loop(first_step, last_step, add_step, (load_scales(first_step), acc))
    y = acc.reshape(block_columns, 2, block_rows).sum(axis=1) if joined else acc  # [BN, BT]
    pltriton.store(out_ref.at[split, rows, columns], y.T, mask=in_use(jnp.arange(block_rows), block_columns))


def _tiling(num_rows: int, n: int, k_padded: int, group: int, config: Q8Config) -> _Tiling:
    num_groups = k_padded // group
    groups_per_step = math.gcd(num_groups, max(1, config.step_inputs // group))
    num_steps = num_groups // groups_per_step
    # A function of the settings alone and not of the rows, on whose number no result may depend.
    splits = min(pl.cdiv(config.num_programs * config.block_columns, n), max(1, num_steps // MIN_STEPS))
    steps_per_split = pl.cdiv(num_steps, splits)
    return _Tiling(
        block_rows=min(config.block_rows, tile_rows(num_rows)),
        block_columns=config.block_columns,
        groups_per_step=groups_per_step,
        steps_per_split=steps_per_split,
        num_splits=pl.cdiv(num_steps, steps_per_split),
    )
