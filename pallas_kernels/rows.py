"""What stands between two Q8 products, row by row: adding up a product's parts, bias, residual, RMSNorm, SwiGLU.

A product leaves its result in parts (`q8_partial_sums`) and takes its rows as an operand (`operand.py`). Each function
here goes from the one to the other in one kernel, so that nothing else runs between products: no compiler decides how
a row is added up. What belongs to a layer lies in one 1-D array, and is named by its offset there.

RMSNorm: Zhang and Sennrich, 2019, arXiv:1910.07467. SwiGLU: Shazeer, 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.backend import Backend, kernel_call
from pallas_kernels.operand import operand_shape, padded_rows, store_inputs

SWIGLU_BLOCK = 1024  # inputs of a row that one program makes
_VALUES_PER_WARP = 256  # of a row; eight for each thread


def norm_rows(
    h: jax.Array,  # float32 [T, D]
    *,
    norm_params: jax.Array,  # float32 [P]: the norm's weights [D] from `weight_offset` on
    weight_offset: int,
    eps: float,
    k_padded: int,
    group: int,
    parts: int = 2,
    backend: Backend = "triton",
) -> jax.Array:  # operand of T rows, K = D
    """h / rms(h) * weight, for a product of K = D inputs that are padded to `k_padded` in groups of `group`."""
    if backend == "reference":
        return rms_norm(h, _slice(norm_params, weight_offset, h.shape[1]), eps)
    kernel = functools.partial(_rows_kernel, weight_offset=weight_offset, eps=eps, group=group)
    return _call_rows(kernel, "norm_rows", backend, h, norm_params=norm_params, k_padded=k_padded, parts=parts)


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
        return h + _total(sums, params, bias_offset, len(h))[:, : h.shape[1]]
    kernel = functools.partial(_rows_kernel, bias_offset=bias_offset)
    return _call_rows(kernel, "add_rows", backend, h, sums=sums, params=params)


def add_norm_rows(
    h: jax.Array,  # float32 [T, D]
    sums: jax.Array,  # float32 [S, T_padded, N], N >= D
    params: jax.Array,  # float32 [P]
    *,
    bias_offset: int | None,
    norm_params: jax.Array,  # float32 [P]: maybe those of another layer
    weight_offset: int,
    eps: float,
    k_padded: int,
    group: int,
    parts: int = 2,
    backend: Backend = "triton",
) -> tuple[jax.Array, jax.Array]:  # float32 [T, D], and the operand of its norm
    """`add_rows`, and `norm_rows` of that, at once."""
    norm = {"weight_offset": weight_offset, "eps": eps, "group": group}
    if backend == "reference":
        h = add_rows(h, sums, params, bias_offset=bias_offset, backend=backend)
        return h, norm_rows(h, norm_params=norm_params, **norm, k_padded=k_padded, backend=backend)
    kernel = functools.partial(_rows_kernel, bias_offset=bias_offset, **norm)
    return _call_rows(
        kernel,
        "add_norm_rows",
        backend,
        h,
        sums=sums,
        params=params,
        norm_params=norm_params,
        k_padded=k_padded,
        parts=parts,
    )


def swiglu_rows(
    sums: jax.Array,  # float32 [S, T_padded, N], N >= 2 F: the gate's F columns, then those of up
    params: jax.Array,  # float32 [P]
    *,
    num_rows: int,
    num_columns: int,
    bias_offset: int | None,
    k_padded: int,
    group: int,
    parts: int = 2,
    backend: Backend = "triton",
) -> jax.Array:  # operand of T rows, K = F
    """silu(gate) * up, of `num_columns` = F columns each."""
    if backend == "reference":
        gate_up = _total(sums, params, bias_offset, num_rows)
        return jax.nn.silu(gate_up[:, :num_columns]) * gate_up[:, num_columns : 2 * num_columns]
    block = min(SWIGLU_BLOCK, pl.next_power_of_2(k_padded))
    return kernel_call(
        functools.partial(
            _swiglu_kernel,
            num_rows=num_rows,
            num_columns=num_columns,
            bias_offset=bias_offset,
            group=group,
            parts=parts,
            block=block,
        ),
        out_shape=operand_shape(num_rows, k_padded, parts),
        grid=(padded_rows(num_rows, parts), pl.cdiv(k_padded, block)),
        backend=backend,
        num_warps=_num_warps(block),
        num_stages=1,
        name="swiglu_rows",
    )(sums, params)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, float32, in plain `jnp`."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def load_total(
    sums_ref: Any,  # float32 [S, T_padded, N]
    params_ref: Any,  # float32 [P]
    row: jax.Array,  # int32 []
    columns: jax.Array,  # int32 [C]
    mask: jax.Array,  # bool [C]
    bias_offset: int | None,
) -> jax.Array:  # float32 [C]
    """In a kernel: some columns of a product and its bias; the parts are added in order."""
    parts = [pltriton.load(sums_ref.at[s, row, columns], mask=mask, other=0.0) for s in range(sums_ref.shape[0])]
    total = functools.reduce(jnp.add, parts)
    if bias_offset is not None:
        total = total + pltriton.load(params_ref.at[bias_offset + columns], mask=mask, other=0.0)
    return total


def _call_rows(
    kernel: Callable[..., None],
    name: str,
    backend: Backend,
    h: jax.Array,
    *,
    sums: jax.Array | None = None,
    params: jax.Array | None = None,
    norm_params: jax.Array | None = None,
    k_padded: int = 0,
    parts: int = 2,
) -> Any:
    """One program for each row. Results: the new h if there are sums, the operand if there is a norm."""
    num_rows, d = h.shape
    block = pl.next_power_of_2(max(d, k_padded))
    shapes = []
    if sums is not None:
        shapes.append(jax.ShapeDtypeStruct(h.shape, h.dtype))
    if norm_params is not None:
        shapes.append(operand_shape(num_rows, k_padded, parts))
    results = kernel_call(
        functools.partial(
            kernel, has_sums=sums is not None, has_norm=norm_params is not None, block=block, parts=parts
        ),
        out_shape=shapes,
        grid=(num_rows if norm_params is None else padded_rows(num_rows, parts),),
        backend=backend,
        num_warps=_num_warps(block),
        num_stages=1,
        name=name,
    )(*(array for array in (h, sums, params, norm_params) if array is not None))
    return results[0] if len(results) == 1 else tuple(results)


def _rows_kernel(
    h_ref: Any,  # float32 [T, D]
    # With sums: float32 [S, T_padded, N], and params [P] with the bias. With a norm: norm_params [P]. Then, with sums,
    # the new h, float32 [T, D]; and with a norm the operand.
    *refs: Any,
    has_sums: bool,
    has_norm: bool,
    block: int,
    parts: int,
    bias_offset: int | None = None,
    weight_offset: int = 0,
    eps: float = 0.0,
    group: int = 0,
) -> None:
    num_rows, d = h_ref.shape
    row, columns = pl.program_id(0), jnp.arange(block)
    inside = (columns < d) & (row < num_rows)
    last = jnp.minimum(row, num_rows - 1)  # a row that only fills the tile up is read nowhere
    h = pltriton.load(h_ref.at[last, columns], mask=inside, other=0.0)
    if has_sums:
        sums_ref, params_ref, out_ref = refs[0], refs[1], refs[-2 if has_norm else -1]
        h = h + load_total(sums_ref, params_ref, row, columns, inside, bias_offset)
        pltriton.store(out_ref.at[last, columns], h, mask=inside)
    if has_norm:
        norm_params_ref, operand_ref = refs[2 if has_sums else 0], refs[-1]
        weight = pltriton.load(norm_params_ref.at[weight_offset + columns], mask=inside, other=0.0)
        x = h * lax.rsqrt(jnp.sum(h * h) / d + eps) * weight
        mask = columns < operand_ref.shape[1]
        store_inputs(operand_ref, row, columns, x, num_rows=num_rows, group=group, parts=parts, mask=mask)


def _swiglu_kernel(
    sums_ref: Any,  # float32 [S, T_padded, N]
    params_ref: Any,  # float32 [P]
    operand_ref: Any,  # bfloat16 [2 * T_padded, K_padded]
    *,
    num_rows: int,
    num_columns: int,
    bias_offset: int | None,
    group: int,
    parts: int,
    block: int,
) -> None:
    row, columns = pl.program_id(0), pl.program_id(1) * block + jnp.arange(block)
    inside = (columns < num_columns) & (row < num_rows)
    gate = load_total(sums_ref, params_ref, row, columns, inside, bias_offset)
    up = load_total(sums_ref, params_ref, row, num_columns + columns, inside, bias_offset)
    x = gate / (1.0 + jnp.exp(-gate)) * up
    mask = columns < operand_ref.shape[1]
    store_inputs(operand_ref, row, columns, x, num_rows=num_rows, group=group, parts=parts, mask=mask)


def _total(sums: jax.Array, params: jax.Array, bias_offset: int | None, num_rows: int) -> jax.Array:  # [T, N]
    total = functools.reduce(jnp.add, sums)[:num_rows]
    return total if bias_offset is None else total + _slice(params, bias_offset, total.shape[1])


def _slice(params: jax.Array, offset: int, size: int) -> jax.Array:
    return lax.slice_in_dim(params, offset, offset + size)


def _num_warps(block: int) -> int:
    return max(1, min(16, block // _VALUES_PER_WARP))
