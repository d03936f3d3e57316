"""Activations as the kernel of the Q8 product takes them: int8 digits with a scale for each row and group of inputs.

A tensor core multiplies int8 exactly. So an activation is a whole number of steps, and those are written in one or two
int8 digits: x = scale * (256 * high + low). With two digits the steps are 1 / 32639 of the largest activation of the
row in its group, and a product loses about 2e-5 of its size; bfloat16 activations would lose 2e-3. With one digit
(W8A8) there are 127 steps, 6e-3 is lost, and half the work is left.

For the reference an operand is the activations themselves, float32 [T, K]. Knows nothing of weights but the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

HIGH = 256  # what one step of the high digit counts
MIN_TILE_ROWS = 16  # the smallest side of a tensor core product
MAX_TILE_ROWS = 128
_LARGEST = {1: 127, 2: 127 * HIGH + 127}  # by the number of digits: the largest number whose negative fits as well
_TINY = 1e-30  # activations that are all smaller are zeros: their scale's reciprocal would not be finite


class Operand(NamedTuple):
    """Rows of activations; in a kernel, references to them."""

    digits: Any  # int8 [P, T_padded, K_padded]: high digits and low ones, or low ones alone
    scales: Any  # float32 [G, T_padded]


def tile_rows(num_rows: int) -> int:
    """Rows are padded to a multiple of this."""
    return min(MAX_TILE_ROWS, max(MIN_TILE_ROWS, pl.next_power_of_2(num_rows)))


def padded_rows(num_rows: int) -> int:
    """Rows of an operand and of a product; those beyond `num_rows` fill the last tile up, and are of no meaning."""
    return pl.cdiv(num_rows, tile_rows(num_rows)) * tile_rows(num_rows)


def rows_in_use(positions_ref: Any, rows: jax.Array) -> jax.Array:  # int32 [T], int32 [...] -> bool [...]
    """In a kernel: whether rows are in use, which have a position; those beyond T are not."""
    (num_rows,) = positions_ref.shape
    return pltriton.load(positions_ref.at[rows], mask=rows < num_rows, other=-1) >= 0


@dataclass(frozen=True, kw_only=True)
class OperandSpec:
    """What a product takes: how an operand is laid out for a matrix [N, K_padded] in groups of `group` inputs.

    Example: 3 rows for a matrix of 640 inputs in groups of 128 are digits int8 [2, 16, 640] and scales float32 [5, 16].
    """

    k_padded: int
    group: int
    num_digits: int = 2

    def shape(self, num_rows: int) -> Operand:
        """Shapes and dtypes of an operand of so many rows."""
        rows = padded_rows(num_rows)
        return Operand(
            jax.ShapeDtypeStruct((self.num_digits, rows, self.k_padded), jnp.int8),
            jax.ShapeDtypeStruct((self.k_padded // self.group, rows), jnp.float32),
        )

    def num_bytes(self, num_rows: int) -> int:
        """Device memory that an operand of so many rows takes."""
        return sum(array.size * array.dtype.itemsize for array in self.shape(num_rows))

    def inputs(self, block: int) -> tuple[jax.Array, jax.Array]:
        """In a kernel: groups [C, 1], and inputs [C, group] of the first `block` inputs, a multiple of the group."""
        groups = jnp.arange(block // self.group)[:, None]
        return groups, groups * self.group + jnp.arange(self.group)[None, :]

    def store(self, operand: Operand, row: jax.Array, first_group: jax.Array | int, x: jax.Array) -> None:
        """In a kernel: stores some groups of a row, `x` float32 [C, group], of those that the operand has."""
        groups, inputs = self.inputs(x.size)
        digits, scales = _quantise(x, self.num_digits)
        inside = first_group + groups < self.k_padded // self.group  # [C, 1]
        for i, digit in enumerate(digits):
            place = operand.digits.at[i, row, first_group * self.group + inputs]
            pltriton.store(place, digit, mask=jnp.broadcast_to(inside, x.shape))
        pltriton.store(operand.scales.at[first_group + groups, row], scales, mask=inside)


def make_operand(x: jax.Array, spec: OperandSpec) -> Operand:  # float32 [T, K]
    """The operand of rows that no kernel has made one of."""
    rows, k = x.shape
    x = jnp.pad(x, ((0, padded_rows(rows) - rows), (0, spec.k_padded - k)))
    digits, scales = _quantise(x.reshape(len(x), -1, spec.group), spec.num_digits)
    return Operand(jnp.stack(digits).reshape(-1, *x.shape), scales[..., 0].T)


def _quantise(x: jax.Array, num_digits: int) -> tuple[list[jax.Array], jax.Array]:
    """Groups float32 [..., group] -> their digits int8 [..., group], and scales float32 [..., 1]."""
    # The largest by its bits, which are ordered as the numbers are, and a NaN above all: as a scale it is not lost.
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32).max(axis=-1, keepdims=True)
    largest = lax.bitcast_convert_type(bits, jnp.float32)
    most = _LARGEST[num_digits]
    steps = jnp.floor(x * jnp.where(largest < _TINY, 0.0, most / largest) + 0.5).astype(jnp.int32)
    if num_digits == 1:
        digits = [steps]
    else:
        high = (steps + HIGH // 2) >> 8
        digits = [high, steps - high * HIGH]
    return [digit.astype(jnp.int8) for digit in digits], largest / most
