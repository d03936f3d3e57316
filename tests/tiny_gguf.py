"""The tiny checkpoints of tests/tiny.py as GGUF files, laid out as llama.cpp's converter does it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tiny import TinyModel, tiny_model

QuantType = gguf.GGMLQuantizationType

_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_vl_text": "qwen3vl"}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_tiny_gguf(
    path: Path,
    variant: str,
    *,
    matrix_type: QuantType = QuantType.F32,
    type_of: Mapping[str, QuantType] | None = None,
    split_tensors: int = 0,
    edit: Callable[[gguf.GGUFWriter], None] | None = None,
    tiny: TinyModel | None = None,
) -> Path:
    """Writes a variant as GGUF and returns the path of the file (of the first part of a split one).

    Args:
      matrix_type: how matrices are stored; norms and biases are always F32.
      type_of: GGUF name -> another type for that matrix.
      split_tensors: tensors in each part of a split file; 0 writes one file.
      edit: may add metadata and tensors, or take some back, just before writing.
      tiny: the model to write, if it is not `tiny_model(variant)` as it is.
    """
    tiny = tiny or tiny_model(variant)
    config = tiny.config.get("text_config", tiny.config)
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config["model_type"]], split_max_tensors=split_tensors)
    _add_metadata(writer, config)
    for name, tensor in gguf_tensors(tiny).items():
        kind = matrix_type if tensor.ndim == 2 else QuantType.F32
        kind = (type_of or {}).get(name, kind)
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split_tensors:
        return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]
    return path


def gguf_tensors(tiny: TinyModel) -> dict[str, np.ndarray]:
    """float32 by GGUF name; q and k of a llama with their rows in interleaved order."""
    config = tiny.config.get("text_config", tiny.config)
    tensors = {}
    for hf_name, tensor in tiny.tensors.items():
        if ".visual." in hf_name:
            continue
        module, kind = hf_name.replace("language_model.", "").rsplit(".", 1)
        if layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
            name = f"blk.{layer[1]}.{_NAMES[layer[2]]}.{kind}"
        else:
            name = f"{_NAMES[module]}.{kind}"
        if config["model_type"] == "llama" and (side := re.search(r"attn_([qk])\.", name)):
            tensor = _interleave(tensor, config["num_attention_heads" if side[1] == "q" else "num_key_value_heads"])
        tensors[name] = tensor
    if (scaling := config.get("rope_scaling")) and scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(config, scaling)
    return tensors


def _interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(tensor.shape)


def _llama3_factors(config: dict[str, Any], scaling: dict[str, Any]) -> np.ndarray:
    dim = config["head_dim"]
    low, high, factor = (scaling[k] for k in ("low_freq_factor", "high_freq_factor", "factor"))
    context = scaling["original_max_position_embeddings"]
    factors = []
    for i in range(0, dim, 2):
        turns = context / (2 * math.pi * config["rope_theta"] ** (i / dim))  # within the original context
        if turns > high:
            factors.append(1.0)
        elif turns < low:
            factors.append(factor)
        else:
            smooth = (turns - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def _add_metadata(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_type("model")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_dimension_count(config["head_dim"])
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if sections := scaling.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_eot_token_id(config["vocab_size"] - 1)
