"""Both ends of the model: token ids to hidden states, and hidden states to logits. These weights never leave.

A tied model has one Q8 matrix for both: a row of it is a token's embedding, all of it is the output projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels import Backend, OperandSpec, Rms, inverse_rms, norm_rows, q8_partial_sums, total_rows
from vramjax.config import ModelConfig

# embed int8 [V_padded, D_padded], embed_scales float32 [G, V_padded], final_norm float32 [D]; untied: head, head_scales
HeadWeights = Mapping[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """All that is fixed when the head is compiled: the model, the groups of its two matrices, how kernels are run."""

    config: ModelConfig
    embed_group: int
    head_group: int
    backend: Backend


def embed(weights: HeadWeights, ids: jax.Array, spec: HeadSpec) -> jax.Array:  # int32 [T] -> float32 [T, D]
    """The dequantised embedding of each token id; ids must be in range (an index out of range would be clamped)."""
    with jax.named_scope("embed"):
        values = weights["embed"][ids].astype(jnp.float32)  # [T, D_padded]
        scales = weights["embed_scales"][:, ids].T  # [T, G]
        grouped = values.reshape(len(ids), -1, spec.embed_group) * scales[..., None]
        return grouped.reshape(len(ids), -1)[:, : spec.config.hidden_size]


def logits(
    weights: HeadWeights,
    h: jax.Array,  # float32 [T, D]
    spec: HeadSpec,
    positions: jax.Array | None = None,  # int32 [T]
) -> jax.Array:  # float32 [T, V]
    """Final norm and output projection. With `positions`, rows at -1 may have any logits."""
    tied = spec.config.tied_embeddings
    name = "embed" if tied else "head"
    with jax.named_scope("lm_head"):
        values, scales = weights[name], weights[f"{name}_scales"]
        group = spec.embed_group if tied else spec.head_group
        normed = norm_rows(
            h,
            norm_params=weights["final_norm"],
            weight_offset=0,
            operand=OperandSpec(k_padded=values.shape[1], group=group),
            positions=positions,
            backend=spec.backend,
        )
        sums = q8_partial_sums(
            normed.rows, values, scales, num_rows=len(h), group=group, positions=positions, backend=spec.backend
        )
        rms = Rms(row_length=spec.config.hidden_size, eps=spec.config.rms_norm_eps)
        scale = inverse_rms(normed.squares, rms)[: len(h)]
        return total_rows(sums, len(h))[:, : spec.config.vocab_size] * scale
