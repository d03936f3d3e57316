"""GGUF metadata to a ModelConfig.

The rules, where metadata leaves room:

- Biases, and whether the output matrix is the embedding, are told by which tensors there are.
- RoPE: `rope.scaling.type` none, linear or yarn; a factor without a type means linear, as llama.cpp has it. Llama 3's
  scaling comes as the tensor rope_freqs.weight (`freq_factors`). A missing `rope.freq_base` means 10000 for
  architecture "llama", with a note, and is an error for every other.
- Stop ids are the eos, eot and eom ids, and the ids of control tokens that end a turn or a text in any model
  (`<|im_end|>` and so on), as files often name only one of them.
- Metadata that would change the arithmetic (experts, soft-capping, sliding windows, scales) is refused by its key.

Standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from vramjax.config import (
    LLAMA_THETA,
    Family,
    ModelConfig,
    RopeConfig,
    check_number,
    check_size,
    shown,
    stop_notes,
)
from vramjax.errors import ConfigError

FAMILY_OF_ARCHITECTURE: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3vl": "qwen3_vl",
}

_END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
_CONTROL_TOKEN_TYPES = (3, 4)  # control, user-defined

# Keys that change what is computed, and the values that mean "not used".
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "use_parallel_residual": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.temperature_scale": (0,),
    "rope.scaling.alpha": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.yarn_attn_factor": (0, 1),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_log_multiplier": (0,),
}


def model_config_from_gguf(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    freq_factors: Sequence[float] | None,
    notes: list[str],
) -> ModelConfig:
    """Reads the metadata of a GGUF file.

    Args:
      metadata: key -> int, float, bool, str, or a list of one of them.
      shapes: GGUF's tensor name -> shape, slowest dimension first.
      freq_factors: what the tensor rope_freqs.weight holds, if there is one.
      notes: gets one sentence for each choice that a reader should know about.

    Raises:
      ConfigError: a value is missing, contradictory, or of a model that vramjax cannot run.
    """
    architecture = metadata.get("general.architecture")
    family = FAMILY_OF_ARCHITECTURE.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILY_OF_ARCHITECTURE))
        raise ConfigError(f"general.architecture is {shown(architecture)}; expected one of {known}")
    kind = metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"general.type is {shown(kind)}; expected 'model', a file that holds a whole model")
    values = _Values(metadata, str(architecture))
    _refuse_other_arithmetic(values)

    num_heads = values.integer("attention.head_count")
    hidden_size = values.integer("embedding_length")
    head_dim = _head_dim(values, hidden_size, num_heads)
    config = ModelConfig(
        family=family,
        num_layers=_num_layers(values, shapes),
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        vocab_size=_vocab_size(values, shapes),
        max_positions=values.integer("context_length"),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        qkv_bias=family == "qwen2" or _has(shapes, "attn_q.bias", "attn_k.bias", "attn_v.bias"),
        o_bias=_has(shapes, "attn_output.bias"),
        mlp_bias=_has(shapes, "ffn_gate.bias", "ffn_up.bias", "ffn_down.bias"),
        qk_norm=family in ("qwen3", "qwen3_vl"),
        tied_embeddings="output.weight" not in shapes,
        rope=_rope(values, freq_factors, notes),
        bos_token_id=_token_id(metadata, "bos"),
        eos_token_ids=_stop_ids(metadata),
    )
    notes.extend(stop_notes(config))
    return config


class _Values:
    """Hyperparameters of one architecture, by the part of the key after its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.metadata = metadata
        self.architecture = architecture

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def get(self, name: str) -> Any:
        return self.metadata.get(self.key(name))

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if isinstance(value, list) and value:
            # One number for each layer: fine as long as all layers are alike.
            if any(v != value[0] for v in value):
                raise ConfigError(f"{self.key(name)} differs between layers: {shown(value)}; expected one value")
            value = value[0]
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"the metadata has no {self.key(name)}; expected a whole number")
        return check_size(self.key(name), value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"the metadata has no {self.key(name)}; expected a number")
        return _shortest(check_number(self.key(name), value))


def _refuse_other_arithmetic(values: _Values) -> None:
    for name, neutral in _NEUTRAL.items():
        value = values.get(name)
        if value is not None and value not in neutral:
            raise ConfigError(
                f"{values.key(name)} is {shown(value)}, which is not supported; expected it to be absent or "
                f"{' or '.join(str(n) for n in neutral)}"
            )
    window = values.get("attention.sliding_window")
    if window and values.integer("attention.sliding_window") < values.integer("context_length"):
        raise ConfigError(
            f"{values.key('attention.sliding_window')} is {window}; expected none, as sliding-window attention is not "
            "supported"
        )


def _num_layers(values: _Values, shapes: Mapping[str, tuple[int, ...]]) -> int:
    num_layers = values.integer("block_count")
    stored = {name.split(".")[1] for name in shapes if name.startswith("blk.")}
    if num_layers > len(stored):
        raise ConfigError(
            f"{values.key('block_count')} is {num_layers}, but the file has tensors of {len(stored)} layers; expected "
            "tensors of all"
        )
    return num_layers


def _head_dim(values: _Values, hidden_size: int, num_heads: int) -> int:
    if values.get("attention.key_length") is None and hidden_size % num_heads:
        raise ConfigError(
            f"{values.key('embedding_length')} is {hidden_size}; expected a multiple of "
            f"{values.key('attention.head_count')}, which is {num_heads}, as there is no attention.key_length"
        )
    head_dim = values.integer("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (other := values.integer(name, head_dim)) != head_dim:
            raise ConfigError(f"{values.key(name)} is {other}; expected the size of a head, which is {head_dim}")
    return head_dim


def _vocab_size(values: _Values, shapes: Mapping[str, tuple[int, ...]]) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None:
        raise ConfigError("the file has no tensor token_embd.weight; expected the embedding")
    vocab_size = values.integer("vocab_size", shape[0])
    if vocab_size != shape[0]:
        raise ConfigError(
            f"{values.key('vocab_size')} is {vocab_size}, but tensor token_embd.weight has shape {list(shape)}; "
            "expected as many rows"
        )
    return vocab_size


def _rope(values: _Values, freq_factors: Sequence[float] | None, notes: list[str]) -> RopeConfig:
    if values.get("rope.freq_base") is None and values.architecture == "llama":
        notes.append(f"the metadata has no llama.rope.freq_base: used {LLAMA_THETA:.0f}, which is what that means")
        theta = LLAMA_THETA
    else:
        theta = values.number("rope.freq_base")
    factors = None if freq_factors is None else tuple(freq_factors)

    # A factor of 0 means that there is none.
    factor_key = "rope.scaling.factor" if values.get("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = values.number(factor_key) if values.get(factor_key) else 1.0
    kind = values.get("rope.scaling.type")
    if kind is None:
        kind = "none" if factor == 1.0 else "linear"
    if kind == "none":
        return RopeConfig(theta=theta, freq_factors=factors)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=factor, freq_factors=factors)
    if kind == "yarn":
        return RopeConfig(
            kind="yarn",
            theta=theta,
            factor=factor,
            original_max_positions=values.integer("rope.scaling.original_context_length"),
            beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
            freq_factors=factors,
        )
    raise ConfigError(f"{values.key('rope.scaling.type')} is {shown(kind)}; expected one of linear, none, yarn")


def _stop_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    ids = [_token_id(metadata, name) for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        ids += [
            token_id
            for token_id, (token, kind) in enumerate(zip(tokens, types, strict=False))
            if kind in _CONTROL_TOKEN_TYPES and token in _END_TOKENS
        ]
    return tuple(dict.fromkeys(i for i in ids if i is not None))


def _token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is not None and (type(value) is not int or value < 0):
        raise ConfigError(f"{key} is {shown(value)}; expected a token id")
    return value


def _has(shapes: Mapping[str, tuple[int, ...]], *suffixes: str) -> bool:
    return any(name.startswith("blk.") and name.endswith(suffixes) for name in shapes)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05 for what a float32 makes of it, 9.99999974737875e-06."""
    single = struct.unpack("f", struct.pack("f", value))[0] if abs(value) < 3e38 else value
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 3e38 and struct.unpack("f", struct.pack("f", short))[0] == single == value:
            return short
    return value
