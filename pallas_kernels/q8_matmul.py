"""The whole product with a Q8 matrix, from activations to the result, for who has nothing to do on the way.

A model's layers have: there, one kernel between two products adds one up and makes the operand of the next (`rows.py`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.backend import Backend
from pallas_kernels.operand import OperandSpec
from pallas_kernels.q8_kernel import COLUMN_MULTIPLE, MAX_GROUP, q8_matmul_reference, q8_partial_sums, total_rows
from pallas_kernels.rows import quantise_rows


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
    operand = quantise_rows(x, operand=OperandSpec(k_padded=values.shape[1], group=group), backend=backend)
    sums = q8_partial_sums(
        operand, values, scales, num_rows=len(x), group=group, scales_offset=scales_offset, backend=backend
    )
    return total_rows(sums, len(x))


def _check(x: jax.Array, values: jax.Array, scales: jax.Array, group: int, scales_offset: int) -> None:
    if x.ndim != 2 or x.dtype != jnp.float32:
        raise ValueError(f"x is {x.dtype}{list(x.shape)}; expected float32 [T, K]")
    if values.ndim != 2 or values.dtype != jnp.int8:
        raise ValueError(f"values is {values.dtype}{list(values.shape)}; expected int8 [N, K_padded]")
    n, k_padded = values.shape
    if not 32 <= group <= MAX_GROUP or group & (group - 1):
        raise ValueError(f"group is {group}; expected a power of two from 32 to {MAX_GROUP}")
    if n % COLUMN_MULTIPLE:
        raise ValueError(f"values has {n} rows; expected a multiple of {COLUMN_MULTIPLE}: pad it with rows of zeros")
    if k_padded % group or not k_padded - group < x.shape[1] <= k_padded:
        raise ValueError(f"x has K = {x.shape[1]} and values {k_padded}; expected K padded to whole groups of {group}")
    num_scales = k_padded // group * n
    if scales.dtype != jnp.float32 or scales.ndim not in (1, 2) or scales_offset < 0:
        raise ValueError(f"scales is {scales.dtype}{list(scales.shape)} from {scales_offset}; expected float32 [G, N]")
    if scales.ndim == 2 and (scales.shape != (k_padded // group, n) or scales_offset):
        raise ValueError(f"scales is {list(scales.shape)}; expected [G, N] = [{k_padded // group}, {n}]")
    if scales.size < scales_offset + num_scales:
        raise ValueError(f"scales holds {scales.size} floats; expected {num_scales} from {scales_offset} on")
