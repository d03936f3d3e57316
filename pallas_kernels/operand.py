"""Activations as the kernel of the Q8 product takes them: bfloat16 parts, in tiles of rows, inputs reordered.

A tensor core multiplies bfloat16, so each activation is split into a bfloat16 ("high") and the bfloat16 of what that
leaves over ("low"): what is lost is below 2**-16 of it. For each tile of rows an operand holds the high parts of all,
then the low parts of all, as rows of one matrix, so that a weight is loaded and converted once for both. With `parts`
= 1 it holds bfloat16 activations alone, half the work and 2**-9 lost, for many rows, whose time is that of multiplying.

For the reference an operand is the activations themselves, float32 [T, K]. Knows nothing of weights but the group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

MIN_TILE_ROWS = 16  # the smallest side of a tensor core product
MAX_TILE_PARTS = 128  # the sums of more would not fit in registers


def tile_rows(num_rows: int, parts: int) -> int:
    """Rows of a tile, of the tiles that so many rows are cut into."""
    return min(MAX_TILE_PARTS // parts, max(MIN_TILE_ROWS, pl.next_power_of_2(num_rows)))


def padded_rows(num_rows: int, parts: int) -> int:
    """Rows of all tiles together; those beyond `num_rows` are zeros in an operand, and of no meaning in results."""
    return pl.cdiv(num_rows, tile_rows(num_rows, parts)) * tile_rows(num_rows, parts)


@dataclass(frozen=True, kw_only=True)
class OperandSpec:
    """What a product takes: how an operand is laid out for a matrix [N, K_padded] in groups of `group` inputs.

    Example: 3 rows for a matrix of 640 inputs in 2 parts are bfloat16 [32, 640]: 16 high parts, of which 3 are in use,
    and their low parts.
    """

    k_padded: int
    group: int
    parts: int = 2

    def shape(self, num_rows: int) -> jax.ShapeDtypeStruct:
        """bfloat16 [parts * T_padded, K_padded]."""
        return jax.ShapeDtypeStruct((self.parts * self.padded_rows(num_rows), self.k_padded), jnp.bfloat16)

    def padded_rows(self, num_rows: int) -> int:
        """Rows of all tiles together."""
        return padded_rows(num_rows, self.parts)

    def store(
        self,
        operand_ref: Any,  # bfloat16 [parts * T_padded, K_padded]
        row: jax.Array,  # int32 [], or [R, 1]
        inputs: jax.Array,  # int32 [I], or [R, I]: which inputs of the row
        x: jax.Array,  # float32, of that shape
        *,
        num_rows: int,
        mask: jax.Array,  # bool, of that shape
    ) -> None:
        """In a kernel: stores some activations of a row, or of several, as `split_rows` would."""
        block_t = tile_rows(num_rows, self.parts)
        first_row = row // block_t * (self.parts * block_t) + row % block_t
        positions = inputs // self.group * self.group + _position(inputs % self.group, self.group)
        for i, part in enumerate(_parts(x, self.parts)):
            pltriton.store(operand_ref.at[first_row + i * block_t, positions], part, mask=mask)


def split_rows(x: jax.Array, *, k_padded: int, group: int, parts: int = 2) -> jax.Array:  # float32 [T, K] -> operand
    """The operand of rows that no kernel has made one of."""
    rows, k = x.shape
    x = jnp.pad(x, ((0, padded_rows(rows, parts) - rows), (0, k_padded - k)))
    tiles = [part.reshape(-1, tile_rows(rows, parts), k_padded) for part in _parts(x, parts)]
    return reorder_inputs(jnp.stack(tiles, axis=1).reshape(-1, k_padded), group)


def reorder_inputs(a: jax.Array, group: int) -> jax.Array:  # [R, K] -> [R, K]
    """Reorders the columns within each group, by the same rule for both operands, which leaves the product as it is.

    Of every 16 inputs, a tensor core wants 2q, 2q + 1, 2q + 8 and 2q + 9 in the q-th of four threads: pairs, far
    apart. With input q * group / 4 + 4 * c + 2 * j + i at position 16 * c + 8 * j + 2 * q + i, each thread's inputs
    are a quarter of the group in one piece.
    """
    parts = a.reshape(-1, 4, group // 16, 2, 2)  # q, c, j, i
    return parts.transpose(0, 2, 3, 1, 4).reshape(a.shape)


def _position(inputs: jax.Array, group: int) -> jax.Array:
    """Where `reorder_inputs` puts inputs of one group."""
    q, rest = inputs // (group // 4), inputs % (group // 4)
    return rest // 4 * 16 + rest // 2 % 2 * 8 + q * 2 + rest % 2


def _parts(x: jax.Array, parts: int) -> list[jax.Array]:  # float32 -> bfloat16, once or twice
    """High and low, or x alone. The high part is the upper half of the bits, rounded.

    Not x.astype(bfloat16).astype(float32): XLA may drop such a pair of casts, and the low part would be zero.
    """
    if parts == 1:
        return [x.astype(jnp.bfloat16)]
    upper = (lax.bitcast_convert_type(x, jnp.int32) + jnp.int32(1 << 15)) & jnp.int32(-1 << 16)
    high = lax.bitcast_convert_type(upper, jnp.float32)
    return [high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)]
