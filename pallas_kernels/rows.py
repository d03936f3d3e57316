"""What stands between two Q8 products, row by row: adding up a product's parts, bias, residual, RMSNorm, SwiGLU.

A product leaves its result in parts (`q8_partial_sums`) and takes its rows as an operand (`operand.py`). Each function
here goes from the one to the other in one kernel, so that nothing else runs between products: no compiler decides how
a row is added up. What belongs to a layer lies in one 1-D array, and is named by its offset there.

With `positions` (int32 [T]) rows at -1 are not in use: nothing is computed for them, and they may be anything in a
result, but for the residual stream, in which they stay as they are. So what a tile costs follows its rows in use.

An RMSNorm is done in two places. Its division is the same for a whole row, so that it may as well come after the
product, (x * weight / rms(x)) @ w = ((x * weight) @ w) / rms(x): many programs can make the rows of the product, none
of which sees a whole row, and who takes the product knows the RMS from the sums of squares that they leave.

RMSNorm: Zhang and Sennrich, 2019, arXiv:1910.07467. SwiGLU: Shazeer, 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.backend import Backend, kernel_call
from pallas_kernels.operand import Operand, OperandSpec, padded_rows, rows_in_use
from pallas_kernels.q8_kernel import total_rows
from pallas_kernels.tuning import MOST_FEW

BLOCK = 256  # values of a row that one program makes, at most
# Values that a warp makes. Of few rows there are few programs, each of which waits for all parts of a product: the
# fewer values a thread has, the more of their parts it waits for at once.
_VALUES_PER_WARP_OF_FEW, _VALUES_PER_WARP_OF_MANY = 64, 256

Rows = Operand | jax.Array  # an operand, which is float32 [T, K] for the reference


class Normed(NamedTuple):
    """Rows for a product, times the weights of their norm and not yet divided by their RMS; a pytree."""

    rows: Rows  # of T rows
    squares: jax.Array  # float32 [T_padded, B]: sums of the squares of B pieces of a row of the residual stream


@dataclass(frozen=True, kw_only=True)
class Rms:
    """By what a product of rows that are `Normed` is yet to be divided: sqrt(sum of squares / row_length + eps)."""

    row_length: int
    eps: float


@functools.partial(jax.jit, static_argnames=("weight_offset", "operand", "backend"))
def norm_rows(
    h: jax.Array,  # float32 [T, D]
    *,
    norm_params: jax.Array,  # float32 [P]: the norm's weights [D] from `weight_offset` on
    weight_offset: int,
    operand: OperandSpec,
    positions: jax.Array | None = None,  # int32 [T]
    backend: Backend = "triton",
) -> Normed:
    """h * weight, for a product of K = D inputs."""
    if backend == "reference":
        return Normed(h * _slice(norm_params, weight_offset, h.shape[1]), (h * h).sum(axis=1, keepdims=True))
    settings = {"positions": positions, "weight_offset": weight_offset, "operand": operand}
    return Normed(*_call_rows("norm_rows", backend, [h, norm_params], **settings))


@functools.partial(jax.jit, static_argnames=("operand", "backend"))
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


@functools.partial(jax.jit, static_argnames=("bias_offset", "backend"))
def add_rows(
    h: jax.Array,  # float32 [T, D]
    sums: jax.Array,  # float32 [S, T_padded, N], N >= D
    params: jax.Array,  # float32 [P]
    *,
    bias_offset: int | None,
    positions: jax.Array | None = None,  # int32 [T]
    backend: Backend = "triton",
) -> jax.Array:  # float32 [T, D]
    """h + the product + the bias, if there is one."""
    if backend == "reference":
        return h + total_with_bias(sums, params, bias_offset, len(h))[:, : h.shape[1]]
    settings = {"adds": True, "positions": positions, "bias_offset": bias_offset}
    (result,) = _call_rows("add_rows", backend, [h, sums, params], **settings)
    return result


@functools.partial(jax.jit, static_argnames=("bias_offset", "weight_offset", "operand", "backend"))
def add_norm_rows(
    h: jax.Array,  # float32 [T, D]
    sums: jax.Array,  # float32 [S, T_padded, N], N >= D
    params: jax.Array,  # float32 [P]
    *,
    bias_offset: int | None,
    norm_params: jax.Array,  # float32 [P]: maybe those of another layer
    weight_offset: int,
    operand: OperandSpec,
    positions: jax.Array | None = None,  # int32 [T]
    backend: Backend = "triton",
) -> tuple[jax.Array, Normed]:  # float32 [T, D], and what a norm of it gives
    """`add_rows`, and `norm_rows` of that, at once."""
    if backend == "reference":
        h = add_rows(h, sums, params, bias_offset=bias_offset, backend=backend)
        normed = norm_rows(h, norm_params=norm_params, weight_offset=weight_offset, operand=operand, backend=backend)
        return h, normed
    settings = {"bias_offset": bias_offset, "weight_offset": weight_offset, "operand": operand}
    arrays = [h, sums, params, norm_params]
    h, *normed = _call_rows("add_norm_rows", backend, arrays, adds=True, positions=positions, **settings)
    return h, Normed(*normed)


@functools.partial(jax.jit, static_argnames=("rms", "num_rows", "num_columns", "bias_offset", "operand", "backend"))
def swiglu_rows(
    sums: jax.Array,  # float32 [S, T_padded, N], N >= 2 F: the gate's F columns, then those of up
    squares: jax.Array,  # as `Normed` has them
    params: jax.Array,  # float32 [P]
    *,
    rms: Rms,
    num_rows: int,
    num_columns: int,
    bias_offset: int | None,
    operand: OperandSpec,
    positions: jax.Array | None = None,  # int32 [T]
    backend: Backend = "triton",
) -> Rows:  # of T rows, K = F
    """silu(gate) * up, of `num_columns` = F columns each."""
    if backend == "reference":
        scale = inverse_rms(squares, rms)[:num_rows]
        gate_up = total_with_bias(sums, params, bias_offset, num_rows, scale)
        return jax.nn.silu(gate_up[:, :num_columns]) * gate_up[:, num_columns : 2 * num_columns]
    block = _block(operand.k_padded, operand)
    (result,) = call_for_rows(
        functools.partial(
            _swiglu_kernel,
            rms=rms,
            num_rows=num_rows,
            num_columns=num_columns,
            bias_offset=bias_offset,
            operand=operand,
            block=block,
        ),
        positions,
        out_shape=[operand.shape(num_rows)],
        grid=(padded_rows(num_rows), pl.cdiv(operand.k_padded, block)),
        backend=backend,
        num_warps=_num_warps(block, num_rows),
        num_stages=1,
        name="swiglu_rows",
    )(sums, squares, params)
    return result


def inverse_rms(squares: jax.Array, rms: Rms) -> jax.Array:  # float32 [T_padded, B] -> [T_padded, 1]
    """What a product of `Normed` rows is to be multiplied with, in plain `jnp`."""
    total = functools.reduce(jnp.add, squares.T)  # not a sum, whose order XLA would choose
    return lax.rsqrt(total / rms.row_length + rms.eps)[:, None]


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, float32, in plain `jnp`."""
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def total_with_bias(
    sums: jax.Array,  # float32 [S, T_padded, N]
    params: jax.Array,  # float32 [P]
    bias_offset: int | None,
    num_rows: int,
    scale: jax.Array | None = None,  # float32 [T, 1]: of the product
) -> jax.Array:  # float32 [T, N]
    """A product and its bias, in plain `jnp`."""
    total = total_rows(sums, num_rows)
    total = total if scale is None else total * scale
    return total if bias_offset is None else total + _slice(params, bias_offset, total.shape[1])


def load_total(
    sums_ref: Any,  # float32 [S, T_padded, N]
    params_ref: Any,  # float32 [P]
    row: jax.Array,  # int32 []
    columns: jax.Array,  # int32 [...]
    mask: jax.Array,  # bool [...]
    bias_offset: int | None,
    scale: jax.Array | None = None,  # float32 []: of the product
) -> jax.Array:  # float32 [...]
    """In a kernel: some columns of a product and its bias; the parts are added in order."""
    parts = [pltriton.load(sums_ref.at[s, row, columns], mask=mask, other=0.0) for s in range(sums_ref.shape[0])]
    total = functools.reduce(jnp.add, parts)
    if scale is not None:
        total = total * scale
    if bias_offset is not None:
        total = total + pltriton.load(params_ref.at[bias_offset + columns], mask=mask, other=0.0)
    return total


def load_inverse_rms(squares_ref: Any, row: jax.Array, rms: Rms) -> jax.Array:  # float32 [T_padded, B] -> []
    """In a kernel: `inverse_rms` of one row."""
    num_pieces = squares_ref.shape[1]
    pieces = jnp.arange(pl.next_power_of_2(num_pieces))
    squares = pltriton.load(squares_ref.at[row, pieces], mask=pieces < num_pieces, other=0.0)
    return lax.rsqrt(squares.sum() / rms.row_length + rms.eps)


def _call_rows(
    name: str,
    backend: Backend,
    arrays: Sequence[jax.Array],
    *,
    positions: jax.Array | None = None,
    adds: bool = False,
    bias_offset: int | None = None,
    weight_offset: int | None = None,
    operand: OperandSpec | None = None,
) -> Any:
    """Programs for pieces of rows. `arrays` are h; if it `adds`, sums and params; norm_params if there is a norm.

    Results: the new h if it adds; the operand if there is to be one; the squares if there is a norm.
    """
    (h, *_), shapes = arrays, []
    num_rows, d = h.shape
    width, rows = (d, num_rows) if operand is None else (operand.k_padded, padded_rows(num_rows))
    block = _block(width, operand)
    num_blocks = pl.cdiv(width, block)
    if adds:
        shapes.append(jax.ShapeDtypeStruct(h.shape, h.dtype))
    if operand is not None:
        shapes.append(operand.shape(num_rows))
    if weight_offset is not None:
        shapes.append(jax.ShapeDtypeStruct((rows, num_blocks), jnp.float32))
    settings = {"adds": adds, "bias_offset": bias_offset, "weight_offset": weight_offset, "operand": operand}
    return call_for_rows(
        functools.partial(_rows_kernel, **settings, block=block),
        positions,
        out_shape=shapes,
        grid=(rows, num_blocks),
        backend=backend,
        num_warps=_num_warps(block, num_rows),
        num_stages=1,
        input_output_aliases={0: 0} if adds else None,
        name=name,
    )(*arrays)


def call_for_rows(
    kernel: Callable[..., None],
    positions: jax.Array | None,
    *,
    input_output_aliases: Mapping[int, int] | None = None,
    **launch: Any,
) -> Callable[..., Any]:
    """`kernel_call` for a grid of rows and pieces of them; programs of rows that are not in use do nothing.

    `kernel` takes its row and its piece, int32 [], before references to all arrays. `positions`: None if all rows are
    in use, those that only fill a tile up included.
    """

    def kernel_of_all(*refs: Any) -> None:
        kernel(pl.program_id(0), pl.program_id(1), *refs)

    def kernel_of_some(positions_ref: Any, *refs: Any) -> None:
        row, piece = pl.program_id(0), pl.program_id(1)
        pl.when(rows_in_use(positions_ref, row))(lambda: kernel(row, piece, *refs))

    aliases = dict(input_output_aliases or {})
    if positions is None:
        return kernel_call(kernel_of_all, input_output_aliases=aliases, **launch)
    aliases = {1 + i: output for i, output in aliases.items()}
    return functools.partial(kernel_call(kernel_of_some, input_output_aliases=aliases, **launch), positions)


def _rows_kernel(
    row: jax.Array,
    piece: jax.Array,
    h_ref: Any,  # float32 [T, D]
    *refs: Any,  # those of the other arrays of `_call_rows`, then those of its results
    adds: bool,
    bias_offset: int | None,
    weight_offset: int | None,
    operand: OperandSpec | None,
    block: int,
) -> None:
    (num_rows, d), others = h_ref.shape, list(refs)
    columns = piece * block + (jnp.arange(block) if operand is None else operand.inputs(block)[1])
    inside = (columns < d) & (row < num_rows)
    last = jnp.minimum(row, num_rows - 1)  # a row that only fills the tile up is read nowhere
    h = pltriton.load(h_ref.at[last, columns], mask=inside, other=0.0)
    if adds:
        h = h + load_total(others.pop(0), others.pop(0), row, columns, inside, bias_offset)
    x = h
    if weight_offset is not None:
        x = h * pltriton.load(others.pop(0).at[weight_offset + columns], mask=inside, other=0.0)
        pltriton.store(others.pop().at[row, piece], (h * h).sum(-1).sum())
    if adds:
        pltriton.store(others.pop(0).at[last, columns], h, mask=inside)
    if operand is not None:
        operand.store(others.pop(0), row, piece * (block // operand.group), x)


def _swiglu_kernel(
    row: jax.Array,
    piece: jax.Array,
    sums_ref: Any,  # float32 [S, T_padded, N]
    squares_ref: Any,  # float32 [T_padded, B]
    params_ref: Any,  # float32 [P]
    operand_ref: Operand,
    *,
    rms: Rms,
    num_rows: int,
    num_columns: int,
    bias_offset: int | None,
    operand: OperandSpec,
    block: int,
) -> None:
    first = piece * block
    columns = first + operand.inputs(block)[1]
    inside = (columns < num_columns) & (row < num_rows)
    scale = load_inverse_rms(squares_ref, row, rms)
    gate = load_total(sums_ref, params_ref, row, columns, inside, bias_offset, scale)
    up = load_total(sums_ref, params_ref, row, num_columns + columns, inside, bias_offset, scale)
    x = gate / (1.0 + jnp.exp(-gate)) * up
    operand.store(operand_ref, row, first // operand.group, x)


def _slice(params: jax.Array, offset: int, size: int) -> jax.Array:
    return lax.slice_in_dim(params, offset, offset + size)


def _block(width: int, operand: OperandSpec | None) -> int:
    """Values of a row of so many that one program makes: whole groups, if they are for an operand."""
    block = min(BLOCK, pl.next_power_of_2(width))
    return block if operand is None else max(block, operand.group)


def _num_warps(block: int, num_rows: int) -> int:
    return max(1, block // (_VALUES_PER_WARP_OF_FEW if num_rows <= MOST_FEW else _VALUES_PER_WARP_OF_MANY))
