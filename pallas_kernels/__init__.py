"""Pallas kernels over plain arrays: Q8 matrix product and attention over a KV cache.

Each file holds the kernel, the public function and a `jnp` reference of the same signature. Knows nothing of models.
"""

from pallas_kernels.attention import cached_attention, cached_attention_reference
from pallas_kernels.backend import Backend, default_backend
from pallas_kernels.q8_matmul import q8_matmul, q8_matmul_reference

__all__ = [
    "Backend",
    "cached_attention",
    "cached_attention_reference",
    "default_backend",
    "q8_matmul",
    "q8_matmul_reference",
]
