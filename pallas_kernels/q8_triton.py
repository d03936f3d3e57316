"""The kernel of the Q8 product in Triton's own language, for the backend "jax_triton".

`q8_kernel.py` says what it does and why. It cuts the product up like the Pallas kernel and adds up in the same order.
The Pallas kernel is compiled by the Triton that is built into XLA, this one by the Triton that is installed.

It needs the extra `triton`, so it is imported only where that backend is asked for.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from pallas_kernels import operand

HIGH = tl.constexpr(operand.HIGH)


@triton.jit
def q8_matmul(  # the name that a profiler shows
    digits_ptr,  # int8 [P, T, K_padded], as operand.py makes them
    x_scales_ptr,  # float32 [G, T]
    values_ptr,  # int8 [N, K_padded]
    scales_ptr,  # float32 [...]
    out_ptr,  # float32 [S, T, N]
    n: tl.constexpr,
    k_padded: tl.constexpr,
    num_rows: tl.constexpr,  # T
    group: tl.constexpr,
    scales_offset: tl.constexpr,
    num_digits: tl.constexpr,  # P
    joined: tl.constexpr,  # of two digits only
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    groups_per_step: tl.constexpr,
    steps_per_split: tl.constexpr,
):
    num_groups: tl.constexpr = k_padded // group
    block_x: tl.constexpr = 2 * block_rows if joined else block_rows
    row_tile, column_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_row, first_column = row_tile * block_rows, column_tile * block_columns
    first_step = split * steps_per_split
    last_step = tl.minimum(first_step + steps_per_split, num_groups // groups_per_step)

    # Joined digits are rows of one product: first the high digits of all rows, then the low ones.
    both = tl.arange(0, block_x)
    rows, is_low = both % block_rows, both // block_rows
    columns, inputs = tl.arange(0, block_columns), tl.arange(0, group)
    # Whole arrays may be larger than 32 bits can index, a tile is not; its low digits are an array away from the high.
    digit_bytes = tl.cast(num_rows, tl.int64) * k_padded
    x_starts = is_low * digit_bytes + rows * k_padded
    x_ptrs = digits_ptr + tl.cast(first_row, tl.int64) * k_padded + x_starts[:, None] + inputs[None, :]  # [BX, group]
    w_ptrs = values_ptr + tl.cast(first_column, tl.int64) * k_padded
    w_ptrs += columns[:, None] * k_padded + inputs[None, :]  # [BN, group]
    x_scales_ptrs = x_scales_ptr + first_row + rows  # [BX]
    w_scales_ptrs = scales_ptr + scales_offset + first_column + columns  # [BN]
    counts = tl.where(is_low == 0, HIGH, 1).to(tl.float32)[None, :] if joined else 1.0  # for a step of each digit

    w_scales = load_scales(w_scales_ptrs, first_step, n, num_groups, groups_per_step)
    x_scales = load_scales(x_scales_ptrs, first_step, num_rows, num_groups, groups_per_step)
    acc = tl.zeros((block_columns, block_x), tl.float32)
    for step in range(first_step, last_step):
        # The compiler loads ahead what a product takes, which is digits and w. Scales are loaded ahead by hand.
        next_w_scales = load_scales(w_scales_ptrs, step + 1, n, num_groups, groups_per_step)
        next_x_scales = load_scales(x_scales_ptrs, step + 1, num_rows, num_groups, groups_per_step)
        for i in tl.static_range(groups_per_step):
            first_input = (step * groups_per_step + i) * group
            w = tl.load(w_ptrs + first_input)
            y = tl.dot(w, tl.trans(tl.load(x_ptrs + first_input)), out_dtype=tl.int32)  # [BN, BX]
            if num_digits == 2 and not joined:
                low = tl.dot(w, tl.trans(tl.load(x_ptrs + digit_bytes + first_input)), out_dtype=tl.int32)
                y = y * HIGH + low
            group_scales = tl.expand_dims(w_scales[i], 1) * (tl.expand_dims(x_scales[i], 0) * counts)
            acc = acc + y.to(tl.float32) * group_scales
        w_scales, x_scales = next_w_scales, next_x_scales
    y = tl.sum(tl.reshape(acc, (block_columns, 2, block_rows)), axis=1) if joined else acc  # [BN, BT]
    out_ptr += tl.cast(split * num_rows + first_row, tl.int64) * n + first_column
    tl.store(out_ptr + tl.arange(0, block_rows)[:, None] * n + columns[None, :], tl.trans(y))


@triton.jit
def load_scales(
    scales_ptrs,  # float32 [B]: of the first group
    step,
    stride: tl.constexpr,  # from a group to the next
    num_groups: tl.constexpr,
    groups_per_step: tl.constexpr,
):  # for each group of the step float32 [B]
    """Beyond the last group it is the last one's: nothing takes them, and there may be nothing."""
    scales = ()
    for i in tl.static_range(groups_per_step):
        g = tl.minimum(step * groups_per_step + i, num_groups - 1)
        scales = scales + (tl.load(scales_ptrs + g * stride),)  # noqa: RUF005 (Triton knows no unpacking)
    return scales
