"""GGUF files, converted and run through the layer step, give the logits of transformers on the same weights.

One variant for each thing that GGUF stores in its own way: rows of q and k permuted (llama), not permuted (qwen2),
Llama 3's rope as a tensor of factors. That the others are packed to the same bytes as from safetensors is in
test_gguf.py.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import load_golden
from tiny_gguf import QuantType, write_tiny_gguf

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.gguf import open_gguf
from vramjax.checkpoint.packed import Packed, open_packed
from vramjax.model.head import HeadSpec, embed, logits
from vramjax.model.kv_cache import make_cache
from vramjax.model.layer import LayerSpec, layer_steps

# Float32 itself is off float64 by up to 1e-4 here; a wrong rope, norm or order of rows is off by 1 to 20.
TOLERANCE = 1e-3


@pytest.mark.parametrize("variant", ["llama", "qwen2", "llama3_rope"])
def test_logits(tmp_path: Path, variant: str):
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", variant, matrix_type=QuantType.Q8_0))
    packed = open_packed(convert(source, tmp_path / "packed", progress=False))
    golden = load_golden(variant)
    np.testing.assert_allclose(run(packed, golden["tokens"]), golden["logits"], rtol=0, atol=TOLERANCE)
    if variant == "llama3_rope":
        last = run(packed, golden["long_tokens"])[-4:]
        np.testing.assert_allclose(last, golden["long_logits"], rtol=0, atol=TOLERANCE)


def run(packed: Packed, tokens: np.ndarray) -> np.ndarray:
    """Logits [T, V] of tokens [T], all in one block."""
    config, groups = packed.config, packed.groups
    layer = LayerSpec(config=config, layout=packed.layout, backend="reference")
    head = HeadSpec(
        config=config, embed_group=groups["embed"], head_group=groups.get("head", groups["embed"]), backend="reference"
    )
    head_weights = jax.tree.map(jnp.asarray, packed.load_head())
    caches = [make_cache(config, 1, len(tokens), jnp.float32, jax.devices()[0]) for _ in range(config.num_layers)]
    h = embed(head_weights, jnp.asarray(tokens), head)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)
    for layer_idx, kv in enumerate(caches):
        weights = jax.tree.map(jnp.asarray, packed.load_layer(layer_idx))
        h, _ = layer_steps([weights], [kv], h, jnp.int32(0), positions, spec=layer)
    return np.asarray(logits(head_weights, h, head))
