"""The layer step: what a transformer layer does to a block of rows. Compiled once for all layers of a geometry.

A row is one token of one sequence: a hidden state, the slot of its sequence in the KV cache, and its position. A
prefill chunk is many rows of one sequence, a decode step one row or a few of each of several; both are this one
function over a fixed number of rows, with position -1 for rows that are not in use.

Weights come as the five arrays of `vramjax.layout`. Whether a layer's weights were just uploaded or have been
resident for hours is nothing that this function could see, which is why residency cannot change a result.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
    Backend,
    Normed,
    OperandSpec,
    Rms,
    Rows,
    add_norm_rows,
    add_rows,
    cached_attention,
    norm_rows,
    q8_partial_sums,
    rotate_and_store,
    swiglu_rows,
    unchained,
)
from vramjax.config import ModelConfig
from vramjax.layout import LayerLayout
from vramjax.model.rope import amplitude, inverse_frequencies

Weights = Mapping[str, jax.Array]  # the five arrays of a layer: qkv, o, gate_up, down int8 [N, K]; params float32 [F]


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """All that is fixed when a layer step is compiled: the model, the geometry, and how kernels are run."""

    config: ModelConfig
    layout: LayerLayout
    backend: Backend
    prompt_digits: int = 2  # of the activations of a prompt's rows (pallas_kernels/operand.py): 1 is int8

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        """Made once: `jax.jit` asks for it at every call, and all numbers of a model go into it."""
        return hash((self.config, self.layout, self.backend, self.prompt_digits))


def layer_steps(
    weights: Sequence[Weights],
    kv: Sequence[jax.Array],  # [B, S, 2, KvH, Hd] of each layer
    h: jax.Array,  # float32 [T, D]
    slots: jax.Array,  # int32 [T], or []
    positions: jax.Array,  # int32 [T]
    *,
    spec: LayerSpec,
) -> tuple[jax.Array, list[jax.Array]]:  # h [T, D], kv of each layer
    """Some layers after each other: in each attention, with the new keys and values written first, and feed-forward.

    Rows that are not in use stay as they are, or come out as anything that the reference makes of them.

    The bits are the same however a model's layers are cut into calls: of compiled kernels, and of the reference on a
    CPU. On a GPU everything here is a kernel of ours, products and one kernel between each two of them, so that a
    compiler has nothing to decide; the reference it would fuse there, in each program in its own way.
    """
    num_digits = spec.prompt_digits if slots.ndim == 0 else 2
    layers = [_Layer(weights=each, spec=spec, positions=positions, num_digits=num_digits) for each in weights]
    written = []
    normed = norm_rows(h, **layers[0].norm("input_norm", before="qkv"))
    for layer, following, layer_kv in zip(layers, [*layers[1:], None], kv, strict=True):
        with jax.named_scope("attention"):
            sums, new_kv = _attend(layer, layer_kv, normed, slots, positions)
            written.append(new_kv)
        with jax.named_scope("feed_forward"):
            norm = layer.norm("post_norm", before="gate_up")
            h, normed = add_norm_rows(h, sums, layer.params, bias_offset=layer.bias("o"), **norm)
            sums = layer.product("down", _feed_forward(layer, normed))
            bias_offset = layer.bias("down")
            if following is None:
                backend = unchained(spec.backend)  # what comes next is not known here
                h = add_rows(h, sums, layer.params, bias_offset=bias_offset, positions=positions, backend=backend)
            else:
                norm = following.norm("input_norm", before="qkv")
                h, normed = add_norm_rows(h, sums, layer.params, bias_offset=bias_offset, **norm)
    return h, written


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """One layer's weights, and where in them everything is."""

    weights: Weights
    spec: LayerSpec
    positions: jax.Array  # int32 [T]
    num_digits: int

    @property
    def params(self) -> jax.Array:
        return self.weights["params"]

    def product(self, name: str, operand: Rows) -> jax.Array:
        """The partial sums of a product."""
        with jax.named_scope(name):
            return q8_partial_sums(
                operand,
                self.weights[name],
                self.params,
                num_rows=len(self.positions),
                group=self.spec.layout.matrix(name).group,
                scales_offset=self.spec.layout.offset(f"{name}_scales"),
                positions=self.positions,
                backend=self.spec.backend,
            )

    def bias(self, name: str) -> int | None:
        """Where the bias of a product is; None if it has none."""
        entry = self.spec.layout.param(f"{name}_bias")
        return entry.offset if entry is not None else None

    def norm(self, name: str, *, before: str) -> dict[str, Any]:
        """Arguments of a norm whose result goes into the product `before`."""
        return {
            "norm_params": self.params,
            "weight_offset": self.spec.layout.offset(name),
            "operand": self.operand(before),
            "positions": self.positions,
            "backend": self.spec.backend,
        }

    @property
    def rms(self) -> Rms:
        """What is left to do of a norm after a product."""
        return Rms(row_length=self.spec.config.hidden_size, eps=self.spec.config.rms_norm_eps)

    def operand(self, name: str) -> OperandSpec:
        """What a product takes."""
        matrix = self.spec.layout.matrix(name)
        return OperandSpec(k_padded=matrix.k_padded, group=matrix.group, num_digits=self.num_digits)


def _attend(
    layer: _Layer, kv: jax.Array, normed: Normed, slots: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """From the normed rows to the partial sums of `o`; and the cache."""
    config, layout = layer.spec.config, layer.spec.layout
    q, kv = rotate_and_store(
        layer.product("qkv", normed.rows),
        normed.squares,
        layer.params,
        kv,
        slots,
        positions,
        jnp.asarray(inverse_frequencies(config.rope, config.head_dim)),
        rms=layer.rms,
        num_heads=config.num_heads,
        bias_offset=layer.bias("qkv"),
        norm_offsets=(layout.offset("q_norm"), layout.offset("k_norm")) if config.qk_norm else None,
        amplitude=amplitude(config.rope),
        backend=layer.spec.backend,
    )
    attended = cached_attention(q, kv, slots, positions, operand=layer.operand("o"), backend=layer.spec.backend)
    return layer.product("o", attended), kv


def _feed_forward(layer: _Layer, normed: Normed) -> Rows:
    """From the normed rows to the operand of `down`."""
    return swiglu_rows(
        layer.product("gate_up", normed.rows),
        normed.squares,
        layer.params,
        rms=layer.rms,
        num_rows=len(layer.positions),
        num_columns=layer.spec.config.intermediate_size,
        bias_offset=layer.bias("gate_up"),
        operand=layer.operand("down"),
        positions=layer.positions,
        backend=layer.spec.backend,
    )
