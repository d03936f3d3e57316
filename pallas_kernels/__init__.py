"""Pallas kernels over plain arrays: Q8 matrix product, attention over a KV cache, and what goes between.

Each public function has a `jnp` reference of the same signature. Knows nothing of models.
"""

from pallas_kernels.attention import cached_attention, cached_attention_reference
from pallas_kernels.backend import Backend, chained_backend, default_backend, unchained
from pallas_kernels.operand import Operand, OperandSpec, make_operand
from pallas_kernels.q8_kernel import q8_matmul_reference, q8_partial_sums, total_rows
from pallas_kernels.q8_matmul import q8_matmul
from pallas_kernels.rotate_and_store import rotate_and_store
from pallas_kernels.rows import (
    Normed,
    Rms,
    Rows,
    add_norm_rows,
    add_rows,
    inverse_rms,
    norm_rows,
    quantise_rows,
    swiglu_rows,
)

__all__ = [
    "Backend",
    "Normed",
    "Operand",
    "OperandSpec",
    "Rms",
    "Rows",
    "add_norm_rows",
    "add_rows",
    "cached_attention",
    "cached_attention_reference",
    "chained_backend",
    "default_backend",
    "inverse_rms",
    "make_operand",
    "norm_rows",
    "q8_matmul",
    "q8_matmul_reference",
    "q8_partial_sums",
    "quantise_rows",
    "rotate_and_store",
    "swiglu_rows",
    "total_rows",
    "unchained",
]
