"""What stands between two Q8 products, row by row: adding up a product's parts, bias, residual, RMSNorm, SwiGLU.

A product leaves its result in parts (`q8_partial_sums`) and takes its rows as an operand (`operand.py`). Each function
here goes from the one to the other in one kernel, so that nothing else runs between products: no compiler decides how
a row is added up. What belongs to a layer lies in one 1-D array, and is named by its offset there.

RMSNorm: Zhang and Sennrich, 2019, arXiv:1910.07467. SwiGLU: Shazeer, 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.backend import Backend, kernel_call
from pallas_kernels.operand import Operand, OperandSpec, padded_rows
from pallas_kernels.q8_matmul import total_rows

SWIGLU_BLOCK = 1024  # inputs of a row that one program makes
_VALUES_PER_WARP = 256  # of a row; eight for each thread

Rows = Operand | jax.Array  # an operand, which is float32 [T, K] for the reference


def norm_rows(
    h: jax.Array,  # float32 [T, D]
    *,
    norm_params: jax.Array,  # float32 [P]: the norm's weights [D] from `weight_offset` on
    weight_offset: int,
    eps: float,
    operand: OperandSpec,
    backend: Backend = "triton",
) -> Rows:  # of T rows, K = D
    """h / rms(h) * weight, for a product of K = D inputs."""
    if backend == "reference":
        return rms_norm(h, _slice(norm_params, weight_offset, h.shape[1]), eps)
    norm = _Norm(weight_offset=weight_offset, eps=eps)
    (result,) = _call_rows("norm_rows", backend, [h, norm_params], norm=norm, operand=operand)
    return result


def quantise_rows(
    x: jax.Array,  # float32 [T, K]
    *,
    operand: OperandSpec,
    backend: Backend = "triton",
) -> Rows:  # of T rows
    """The rows themselves, for a product."""
    if backend == "reference":
        return x
    (result,) = _call_rows("quantise_rows", backend, [x], operand=operand)
    return result


def add_rows(
    h: jax.Array,  # float32 [T, D]
    sums: jax.Array,  # float32 [S, T_padded, N], N >= D
    params: jax.Array,  # float32 [P]
    *,
    bias_offset: int | None,
    backend: Backend = "triton",
) -> jax.Array:  # float32 [T, D]
    """h + the product + the bias, if there is one."""
    if backend == "reference":
        return h + total_with_bias(sums, params, bias_offset, len(h))[:, : h.shape[1]]
    (result,) = _call_rows("add_rows", backend, [h, sums, params], adds=True, bias_offset=bias_offset)
    return result


def add_norm_rows(
    h: jax.Array,  # float32 [T, D]
    sums: jax.Array,  # float32 [S, T_padded, N], N >= D
    params: jax.Array,  # float32 [P]
    *,
    bias_offset: int | None,
    norm_params: jax.Array,  # float32 [P]: maybe those of another layer
    weight_offset: int,
    eps: float,
    operand: OperandSpec,
    backend: Backend = "triton",
) -> tuple[jax.Array, Rows]:  # float32 [T, D], and its norm
    """`add_rows`, and `norm_rows` of that, at once."""
    if backend == "reference":
        h = add_rows(h, sums, params, bias_offset=bias_offset, backend=backend)
        norm = norm_rows(
            h, norm_params=norm_params, weight_offset=weight_offset, eps=eps, operand=operand, backend=backend
        )
        return h, norm
    norm = _Norm(weight_offset=weight_offset, eps=eps)
    arrays = [h, sums, params, norm_params]
    return _call_rows("add_norm_rows", backend, arrays, adds=True, bias_offset=bias_offset, norm=norm, operand=operand)


def swiglu_rows(
    sums: jax.Array,  # float32 [S, T_padded, N], N >= 2 F: the gate's F columns, then those of up
    params: jax.Array,  # float32 [P]
    *,
    num_rows: int,
    num_columns: int,
    bias_offset: int | None,
    operand: OperandSpec,
    backend: Backend = "triton",
) -> Rows:  # of T rows, K = F
    """silu(gate) * up, of `num_columns` = F columns each."""
    if backend == "reference":
        gate_up = total_with_bias(sums, params, bias_offset, num_rows)
        return jax.nn.silu(gate_up[:, :num_columns]) * gate_up[:, num_columns : 2 * num_columns]
    block = max(operand.group, min(SWIGLU_BLOCK, pl.next_power_of_2(operand.k_padded)))
    (result,) = kernel_call(
        functools.partial(
            _swiglu_kernel,
            num_rows=num_rows,
            num_columns=num_columns,
            bias_offset=bias_offset,
            operand=operand,
            block=block,
        ),
        out_shape=[operand.shape(num_rows)],
        grid=(padded_rows(num_rows), pl.cdiv(operand.k_padded, block)),
        backend=backend,
        num_warps=_num_warps(block),
        num_stages=1,
        name="swiglu_rows",
    )(sums, params)
    return result


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, float32, in plain `jnp`."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def total_with_bias(
    sums: jax.Array,  # float32 [S, T_padded, N]
    params: jax.Array,  # float32 [P]
    bias_offset: int | None,
    num_rows: int,
) -> jax.Array:  # float32 [T, N]
    """A product and its bias, in plain `jnp`."""
    total = total_rows(sums, num_rows)
    return total if bias_offset is None else total + _slice(params, bias_offset, total.shape[1])


def load_total(
    sums_ref: Any,  # float32 [S, T_padded, N]
    params_ref: Any,  # float32 [P]
    row: jax.Array,  # int32 []
    columns: jax.Array,  # int32 [...]
    mask: jax.Array,  # bool [...]
    bias_offset: int | None,
) -> jax.Array:  # float32 [...]
    """In a kernel: some columns of a product and its bias; the parts are added in order."""
    parts = [pltriton.load(sums_ref.at[s, row, columns], mask=mask, other=0.0) for s in range(sums_ref.shape[0])]
    total = functools.reduce(jnp.add, parts)
    if bias_offset is not None:
        total = total + pltriton.load(params_ref.at[bias_offset + columns], mask=mask, other=0.0)
    return total


@dataclass(frozen=True, kw_only=True)
class _Norm:
    """A norm whose weights are among the arrays."""

    weight_offset: int
    eps: float


def _call_rows(
    name: str,
    backend: Backend,
    arrays: Sequence[jax.Array],
    *,
    adds: bool = False,
    bias_offset: int | None = None,
    norm: _Norm | None = None,
    operand: OperandSpec | None = None,
) -> Any:
    """One program for each row. `arrays` are h; if it `adds`, sums and params; and norm_params if there is a norm.

    Results: the new h if it adds, the operand if there is to be one.
    """
    (h, *_), shapes = arrays, []
    num_rows, d = h.shape
    if adds:
        shapes.append(jax.ShapeDtypeStruct(h.shape, h.dtype))
    if operand is not None:
        shapes.append(operand.shape(num_rows))
    block = pl.next_power_of_2(max(d, operand.k_padded if operand else 0))
    return kernel_call(
        functools.partial(_rows_kernel, adds=adds, bias_offset=bias_offset, norm=norm, operand=operand, block=block),
        out_shape=shapes,
        grid=(num_rows if operand is None else padded_rows(num_rows),),
        backend=backend,
        num_warps=_num_warps(block),
        num_stages=1,
        name=name,
    )(*arrays)


def _rows_kernel(
    h_ref: Any,  # float32 [T, D]
    *refs: Any,  # those of the other arrays of `_call_rows`, then those of its results
    adds: bool,
    bias_offset: int | None,
    norm: _Norm | None,
    operand: OperandSpec | None,
    block: int,
) -> None:
    num_rows, d = h_ref.shape
    row, columns = pl.program_id(0), jnp.arange(block) if operand is None else operand.inputs(block)[1]
    inside = (columns < d) & (row < num_rows)
    last = jnp.minimum(row, num_rows - 1)  # a row that only fills the tile up is read nowhere
    h = pltriton.load(h_ref.at[last, columns], mask=inside, other=0.0)
    others = list(refs)
    if adds:
        h = h + load_total(others.pop(0), others.pop(0), row, columns, inside, bias_offset)
    x = h
    if norm is not None:
        weight = pltriton.load(others.pop(0).at[norm.weight_offset + columns], mask=inside, other=0.0)
        x = h * lax.rsqrt((h * h).sum(-1).sum() / d + norm.eps) * weight
    if adds:
        pltriton.store(others.pop(0).at[last, columns], h, mask=inside)
    if operand is not None:
        operand.store(others.pop(0), row, 0, x)


def _swiglu_kernel(
    sums_ref: Any,  # float32 [S, T_padded, N]
    params_ref: Any,  # float32 [P]
    operand_ref: Operand,
    *,
    num_rows: int,
    num_columns: int,
    bias_offset: int | None,
    operand: OperandSpec,
    block: int,
) -> None:
    row, first = pl.program_id(0), pl.program_id(1) * block
    columns = first + operand.inputs(block)[1]
    inside = (columns < num_columns) & (row < num_rows)
    gate = load_total(sums_ref, params_ref, row, columns, inside, bias_offset)
    up = load_total(sums_ref, params_ref, row, num_columns + columns, inside, bias_offset)
    x = gate / (1.0 + jnp.exp(-gate)) * up
    operand.store(operand_ref, row, first // operand.group, x)


def _slice(params: jax.Array, offset: int, size: int) -> jax.Array:
    return lax.slice_in_dim(params, offset, offset + size)


def _num_warps(block: int) -> int:
    return max(1, min(16, block // _VALUES_PER_WARP))
