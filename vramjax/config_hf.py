"""Hugging Face's config.json to a ModelConfig.

The rules, where a config.json leaves room:

- A value nested in `text_config` wins over one of the same key at the top level; each such conflict is a note.
- RoPE: `rope_scaling` (old) and `rope_parameters` (new) are one table; a key in both with two values is an error.
  A `rope_theta` inside the table wins over one beside it, with a note. Without any `rope_theta`, model type "llama"
  means 10000, its constant from before the key existed, with a note; for every other type it is an error.
- Stop ids are those of generation_config.json and of config.json together.
- `tie_word_embeddings` absent means false. Sizes, `rms_norm_eps` and `max_position_embeddings` are never guessed.

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vramjax.config import (
    LLAMA_THETA,
    Family,
    ModelConfig,
    RopeConfig,
    RopeKind,
    check_number,
    check_size,
    shown,
    stop_notes,
)
from vramjax.errors import ConfigError

# config.json's model_type -> family. SmolLM2 and most other "llama-like" models call themselves llama.
FAMILY_OF_MODEL_TYPE: dict[str, Family] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_text": "qwen3_vl",
}

_HEAD_DIM_OF_QWEN3 = 128  # fixed for the family where head_dim is absent, whatever hidden_size is

# Same arithmetic as "default" when only text positions are used: its three position streams are then equal.
_ROPE_TYPES: dict[str, RopeKind] = {
    "default": "default",
    "mrope": "default",
    "linear": "linear",
    "llama3": "llama3",
    "yarn": "yarn",
}

# Keys of the rope table that each kind reads; a table with others is still used, and the others noted.
_ROPE_KEYS_READ: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "original_max_position_embeddings",
        }
    ),
}
_ROPE_KEYS_ALWAYS = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
)


def model_config_from_hf(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, notes: list[str]
) -> ModelConfig:
    """See `ModelConfig.from_hf`."""
    model_type = config.get("model_type")
    family = FAMILY_OF_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        known = ", ".join(sorted(FAMILY_OF_MODEL_TYPE))
        raise ConfigError(f"model_type is {shown(model_type)}; expected one of {known}")
    values = _merge_text_config(config, notes)
    _refuse_quantised(values)
    _refuse_other_arithmetic(values)

    num_heads = _integer(values, "num_attention_heads")
    hidden_size = _integer(values, "hidden_size")
    max_positions = _integer(values, "max_position_embeddings")
    attention_bias = _flag(values, "attention_bias")
    result = ModelConfig(
        family=family,
        num_layers=_integer(values, "num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=_integer(values, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=_integer(values, "num_key_value_heads", num_heads),
        head_dim=_head_dim(values, family, hidden_size, num_heads),
        vocab_size=_integer(values, "vocab_size"),
        max_positions=max_positions,
        rms_norm_eps=_number(values, "rms_norm_eps"),
        # Qwen2 has these biases by definition; its config has no key for them.
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family != "qwen2" and attention_bias,
        mlp_bias=family == "llama" and _flag(values, "mlp_bias"),
        qk_norm=family in ("qwen3", "qwen3_vl"),
        tied_embeddings=_flag(values, "tie_word_embeddings"),
        rope=_rope(values, str(model_type), max_positions, notes),
        bos_token_id=_first_id(values, generation_config, "bos_token_id"),
        eos_token_ids=_all_ids(generation_config, values, config, key="eos_token_id"),
    )
    notes.extend(stop_notes(result))
    return result


def _merge_text_config(config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    text = config.get("text_config")
    if text is None:
        return dict(config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config is {shown(text)}; expected a JSON object")
    # These describe the file or the whole model, so that differing is not a conflict.
    own = {"model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}
    notes.extend(
        f"config.json has two values of {key}: used {text[key]!r} of text_config, not {config[key]!r} of the top level"
        for key in sorted(set(text) & set(config) - own)
        if config[key] is not None and text[key] != config[key]
    )
    return {**config, **text}


def _refuse_quantised(values: Mapping[str, Any]) -> None:
    for key in ("quantization_config", "quantization", "compression_config"):
        table = values.get(key)
        if not table:
            continue
        method = key
        if isinstance(table, Mapping):
            method = table.get("quant_method") or (f"{table['bits']}-bit" if "bits" in table else key)
        raise ConfigError(
            f"the checkpoint is already quantised ({key} in config.json, method {method}); expected f32, f16 or bf16 "
            "weights: use the original checkpoint, or a GGUF file"
        )


def _refuse_other_arithmetic(values: Mapping[str, Any]) -> None:
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"hidden_act is {shown(activation)}; expected silu")

    layer_types = values.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ConfigError(f"layer_types is {shown(layer_types)}; expected a list with a name for each layer")
        for layer_idx, layer_type in enumerate(layer_types):
            if layer_type != "full_attention":
                raise ConfigError(
                    f"layer_types has {shown(layer_type)} for layer {layer_idx}; expected full_attention everywhere"
                )
    elif _uses_sliding_window(values):
        raise ConfigError(
            f"sliding_window is {values['sliding_window']}; expected none, as sliding-window attention is not supported"
        )


def _uses_sliding_window(values: Mapping[str, Any]) -> bool:
    window = values.get("sliding_window")
    if window is None or not values.get("use_sliding_window", True):
        return False
    if _integer(values, "sliding_window") >= _integer(values, "max_position_embeddings"):
        return False  # never reached
    # Layers below max_window_layers attend to everything.
    first = values.get("max_window_layers") if "use_sliding_window" in values else None
    return not first or _integer(values, "max_window_layers") < _integer(values, "num_hidden_layers")


def _head_dim(values: Mapping[str, Any], family: Family, hidden_size: int, num_heads: int) -> int:
    if values.get("head_dim") is not None:
        return _integer(values, "head_dim")
    if family in ("qwen3", "qwen3_vl"):
        return _HEAD_DIM_OF_QWEN3
    if hidden_size % num_heads:
        raise ConfigError(
            f"hidden_size is {hidden_size}; expected a multiple of num_attention_heads, which is {num_heads}, "
            "as there is no head_dim"
        )
    return hidden_size // num_heads


def _rope(values: Mapping[str, Any], model_type: str, max_positions: int, notes: list[str]) -> RopeConfig:
    table = _rope_table(values)
    name = table.get("rope_type", "default")
    if not isinstance(name, str) or name not in _ROPE_TYPES:
        raise ConfigError(f"rope_type is {shown(name)}; expected one of {', '.join(sorted(_ROPE_TYPES))}")
    kind = _ROPE_TYPES[name]
    for holder in (table, values):
        partial = holder.get("partial_rotary_factor")
        if partial is not None and partial != 1:
            raise ConfigError(f"partial_rotary_factor is {shown(partial)}; expected 1: all of a head is rotated")
    ignored = sorted(set(table) - _ROPE_KEYS_ALWAYS - _ROPE_KEYS_READ[kind])
    if ignored:
        notes.append(f"config.json's rope table has {', '.join(ignored)}, which rope_type {name!r} ignores")

    theta = _rope_theta(table, values, model_type, notes)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=_number(table, "factor"))

    original = values.get("original_max_position_embeddings")
    if original is None:
        original = table.get("original_max_position_embeddings")
    if original is None:
        original = max_positions
        notes.append(
            f"config.json has no original_max_position_embeddings for rope_type {name!r}: used "
            f"max_position_embeddings, {max_positions}"
        )
    original = _integer({"original_max_position_embeddings": original}, "original_max_position_embeddings")
    if kind == "llama3":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=_number(table, "factor"),
            original_max_positions=original,
            low_freq_factor=_number(table, "low_freq_factor"),
            high_freq_factor=_number(table, "high_freq_factor"),
        )
    factor = max_positions / original if table.get("factor") is None else _number(table, "factor")
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_positions=original,
        beta_fast=_number(table, "beta_fast", 32.0),
        beta_slow=_number(table, "beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(table, factor),
        truncate=_flag(table, "truncate", True),
    )


def _rope_table(values: Mapping[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for source in ("rope_parameters", "rope_scaling"):
        table = values.get(source)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise ConfigError(f"{source} is {shown(table)}; expected a JSON object")
        per_layer_type = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        if set(per_layer_type) == {"full_attention"}:
            table = per_layer_type["full_attention"]
        elif per_layer_type:
            raise ConfigError(
                f"{source} has a table for each of {', '.join(sorted(per_layer_type))}; expected one for all layers"
            )
        table = dict(table)
        old_name = table.pop("type", None)
        if old_name is not None:
            table.setdefault("rope_type", old_name)
        for key, value in table.items():
            if key in merged and merged[key] != value:
                raise ConfigError(
                    f"{key} is {merged[key]!r} in rope_parameters and {value!r} in rope_scaling; expected one value: "
                    "remove the wrong one from config.json"
                )
            merged[key] = value
    return merged


def _rope_theta(table: Mapping[str, Any], values: Mapping[str, Any], model_type: str, notes: list[str]) -> float:
    inside, beside = table.get("rope_theta"), values.get("rope_theta")
    if inside is not None:
        if beside is not None and beside != inside:
            notes.append(f"config.json has two values of rope_theta: used {inside!r} of the rope table, not {beside!r}")
        return _number(table, "rope_theta")
    if beside is not None:
        return _number(values, "rope_theta")
    if model_type == "llama":
        notes.append(f"config.json has no rope_theta: used {LLAMA_THETA:.0f}, what llama meant before the key existed")
        return LLAMA_THETA
    raise ConfigError(
        f"config.json has no rope_theta, neither at the top level nor in rope_parameters; expected one for {model_type}"
    )


def _yarn_attention_factor(table: Mapping[str, Any], factor: float) -> float | None:
    if table.get("attention_factor") is not None:
        return _number(table, "attention_factor")
    if not (table.get("mscale") and table.get("mscale_all_dim")):
        return None
    return _yarn_mscale(factor, _number(table, "mscale")) / _yarn_mscale(factor, _number(table, "mscale_all_dim"))


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {key}; expected a whole number")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return check_size(key, value)


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"config.json has no {key}; expected a number")
    return check_number(key, value)


def _flag(values: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{key} is {shown(value)}; expected true or false")
    return value


def _all_ids(*holders: Mapping[str, Any] | None, key: str) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for holder in holders:
        value = None if holder is None else holder.get(key)
        for token_id in value if isinstance(value, list) else [value]:
            if token_id is None:
                continue
            if type(token_id) is not int or token_id < 0:
                raise ConfigError(f"{key} is {shown(value)}; expected a token id or a list of them")
            found[token_id] = None
    return tuple(found)


def _first_id(values: Mapping[str, Any], generation_config: Mapping[str, Any] | None, key: str) -> int | None:
    ids = _all_ids(values, generation_config, key=key)
    return ids[0] if ids else None
