"""What the tensors of a checkpoint are called: vramjax's own names, and Hugging Face's for the same tensors.

vramjax's names, with `[N, K]` a matrix of N output features and K input features:

    embed.weight [V, D]    final_norm.weight [D]    head.weight [V, D], only where it is not the embedding
    layers.{i}.input_norm.weight [D]    layers.{i}.post_norm.weight [D]
    layers.{i}.{q,k,v,o,gate,up,down}.weight [N, K]    .bias [N], where the model has it
    layers.{i}.q_norm.weight [Hd]    layers.{i}.k_norm.weight [Hd], where the model has them

Knows shapes and names; reads nothing.
"""

from __future__ import annotations

import re

from vramjax.config import Family, ModelConfig

# Where the decoder sits inside a stored model, longest first so that one is not taken for another.
HF_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")

_HF_TOP = {
    "embed_tokens.weight": "embed.weight",
    "norm.weight": "final_norm.weight",
    "lm_head.weight": "head.weight",
}
_HF_MODULES = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_norm",
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_HF_TOP_OF = {name: stored for stored, name in _HF_TOP.items()}
_HF_MODULE_OF = {name: stored for stored, name in _HF_MODULES.items()}
_HF_LAYER = re.compile(r"layers\.(0|[1-9]\d*)\.(.+)\.(weight|bias)")
_OWN_LAYER = re.compile(r"layers\.(\d+)\.([^.]+)\.(weight|bias)")

# The skip list: tensors that are known, and known not to be needed.
_ROTARY_BUFFER = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")
_VISION_TOWER = re.compile(r"(model\.)?visual\..+")

# What quantisers store beside, or instead of, a float weight.
_QUANTISED = re.compile(
    r".*(_scale|_scale_inv|_scales|\.scales|\.biases|_zero_point|qweight|qzeros|\.g_idx|weight_packed|weight_shape|"
    r"\.absmax|\.quant_map|\.quant_state\..*|\.SCB|_blocks)"
)


def canonical_from_hf(stored: str) -> str | None:
    """vramjax's name of a tensor that Hugging Face calls `stored`, or None where it is no tensor of the decoder.

    Example: `model.language_model.layers.3.mlp.up_proj.weight` is `layers.3.up.weight`.
    """
    for prefix in HF_PREFIXES:
        if not stored.startswith(prefix):
            continue
        rest = stored[len(prefix) :]
        if rest in _HF_TOP:
            return _HF_TOP[rest]
        match = _HF_LAYER.fullmatch(rest)
        if match and match[2] in _HF_MODULES:
            return f"layers.{match[1]}.{_HF_MODULES[match[2]]}.{match[3]}"
    return None


def hf_from_canonical(name: str, prefix: str = "model.") -> str:
    """What Hugging Face calls the tensor `name`, in a model whose decoder sits at `prefix`."""
    if name == "head.weight":
        return "lm_head.weight"
    if name in _HF_TOP_OF:
        return prefix + _HF_TOP_OF[name]
    match = _OWN_LAYER.fullmatch(name)
    assert match, name
    return f"{prefix}layers.{match[1]}.{_HF_MODULE_OF[match[2]]}.{match[3]}"


def skip_reason(stored: str, family: Family) -> str | None:
    """Why a tensor of a Hugging Face checkpoint is left out on purpose, or None where it is not on the skip list."""
    if _ROTARY_BUFFER.fullmatch(stored):
        return "buffers of the rotary embedding, which are computed"
    if family == "qwen3_vl" and _VISION_TOWER.fullmatch(stored):
        return "the vision tower, as only text is decoded"
    return None


def is_quantised_name(stored: str) -> bool:
    """Whether only a quantised checkpoint has a tensor of this name: scales, zero points, packed weights."""
    return _QUANTISED.fullmatch(stored) is not None


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this config has: vramjax's name -> shape, in the order they are used.

    Example: hidden 64, 4 heads and 2 kv heads of 16 give `layers.0.k.weight` the shape (32, 64).
    """
    D, F, Hd = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * Hd, config.num_kv_heads * Hd
    matrices = (  # name, outputs, inputs, whether it has a bias
        ("q", q_rows, D, config.qkv_bias),
        ("k", kv_rows, D, config.qkv_bias),
        ("v", kv_rows, D, config.qkv_bias),
        ("o", D, q_rows, config.o_bias),
        ("gate", F, D, config.mlp_bias),
        ("up", F, D, config.mlp_bias),
        ("down", D, F, config.mlp_bias),
    )
    tensors: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, D)}
    for layer_idx in range(config.num_layers):
        layer = f"layers.{layer_idx}."
        tensors[layer + "input_norm.weight"] = (D,)
        tensors[layer + "post_norm.weight"] = (D,)
        for name, rows, cols, has_bias in matrices:
            tensors[f"{layer}{name}.weight"] = (rows, cols)
            if has_bias:
                tensors[f"{layer}{name}.bias"] = (rows,)
        if config.qk_norm:
            tensors[layer + "q_norm.weight"] = (Hd,)
            tensors[layer + "k_norm.weight"] = (Hd,)
    tensors["final_norm.weight"] = (D,)
    if not config.tied_embeddings:
        tensors["head.weight"] = (config.vocab_size, D)
    return tensors
