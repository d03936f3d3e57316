"""Tiny checkpoints that are the same on every machine, and the golden logits that belong to them. numpy only.

    tiny = tiny_model("qwen3")                      # config, generation config, tensors, all in memory
    write_model(tmp_path / "m", tiny, dtype="bfloat16", shards=2)
    write_tiny(tmp_path / "n", "qwen3")             # both steps in one
    golden = load_golden("qwen3")

Weights: every matrix is integers in [-127, 127] times one power of two for the whole tensor, and each aligned group
of 32 inputs of each row holds a 127 or a -127. So it is exact in float32, bfloat16 and float16, and quantising it
to Q8 at group 32, 64 or 128 (or to GGUF's Q8_0) is exact too: the goldens hold for all of them, with no tolerance
for quantisation. Norms and biases are 7-bit integers times a power of two. Scales are such that attention is peaked
and logits are of order 1 to 10: a wrong rope, norm or permutation changes them grossly.

Goldens (tests/goldens/<variant>.npz, made by tests/make_goldens.py):
  tokens         int32 [P + 16]       a prompt of P = 40 ids, then 16 ids chosen greedily (stop ids are ignored)
  num_prompt     int                  P
  logits         float32 [P + 16, V]  logits[i] follows tokens[: i + 1]; its argmax is tokens[i + 1] for i >= P - 1
  weights_sha256 str                  fingerprint(tiny_model(variant)) of the weights they were made with
and for the variants in LONG_VARIANTS, where positions matter:
  long_tokens    int32 [300]
  long_logits    float32 [4, V]       at the last 4 positions
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent / "goldens"
LONG_VARIANTS = ("llama", "llama3_rope", "llama_linear_rope", "llama_yarn_rope", "qwen3_vl")

Tensors = dict[str, np.ndarray]

_BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-6}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_theta": 1e6, "head_dim": 32}

# What each variant changes in _BASE; None removes a key.
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 192, "head_dim": None},
    "llama_head_dim": {"head_dim": 32, "num_hidden_layers": 2},
    "llama_bias": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    "llama3_rope": {
        "head_dim": 32,
        "num_hidden_layers": 2,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama_linear_rope": {"num_hidden_layers": 2, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_yarn_rope": {
        "head_dim": 32,
        "num_hidden_layers": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
    "qwen2": {**_QWEN2, "head_dim": None, "attention_bias": None, "mlp_bias": None},
    "qwen3": {**_QWEN3, "mlp_bias": None, "tie_word_embeddings": True},
    "qwen3_untied": {**_QWEN3, "mlp_bias": None, "num_key_value_heads": 1, "num_hidden_layers": 2},
    # K = 72 is not a multiple of 32, 9 heads share 3 kv heads, as in SmolLM2-135M.
    "smollm2": {
        "hidden_size": 72,
        "num_hidden_layers": 5,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": None,
        "vocab_size": 150,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl_text",
        "head_dim": 32,
        "rope_theta": 5e6,
        "mlp_bias": None,
        "rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True},
        "tie_word_embeddings": True,
    },
}


@dataclass
class TinyModel:
    """A checkpoint in memory, free to be changed before it is written: `tensors` are float32 by Hugging Face name."""

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tensors: Tensors


def tiny_model(variant: str) -> TinyModel:
    """The checkpoint of a variant; equal on every machine, platform and numpy version."""
    text = {k: v for k, v in (_BASE | copy.deepcopy(VARIANTS[variant])).items() if v is not None}
    vocab = text["vocab_size"]
    text |= {"bos_token_id": 1, "eos_token_id": vocab - 2}
    tensors = _text_tensors(variant, text)
    config = text
    if variant == "qwen3_vl":
        tensors = {name.replace("model.", "model.language_model."): t for name, t in tensors.items()}
        tensors |= _visual_tensors(variant)
        config = _qwen3_vl_config(text)
    generation = {"bos_token_id": 1, "eos_token_id": [vocab - 2, vocab - 1]}
    return TinyModel(config=config, generation_config=generation, tensors=tensors)


def write_tiny(
    directory: Path,
    variant: str,
    *,
    dtype: str = "float32",
    shards: int = 1,
    config_updates: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a variant as a Hugging Face directory and returns it. `config_updates` go to the top level of the
    config; an update to None removes the key."""
    tiny = tiny_model(variant)
    updated = tiny.config | dict(config_updates or {})
    tiny.config = {k: v for k, v in updated.items() if v is not None}
    return write_model(directory, tiny, dtype=dtype, shards=shards)


def write_model(directory: Path, tiny: TinyModel, *, dtype: str = "float32", shards: int = 1) -> Path:
    """Writes config.json, generation_config.json and model*.safetensors (plus an index if `shards` > 1).

    `dtype` is float32, bfloat16 or float16, or "mixed": bfloat16 matrices, float32 norms and biases, and the last
    matrix in float16.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = tiny.config | {"torch_dtype": "bfloat16" if dtype == "mixed" else dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    (directory / "generation_config.json").write_text(json.dumps(tiny.generation_config, indent=2))

    names = list(tiny.tensors)
    dtypes = dict.fromkeys(names, dtype)
    if dtype == "mixed":
        matrices = [n for n in names if tiny.tensors[n].ndim > 1]
        dtypes = {n: "bfloat16" if n in matrices else "float32" for n in names} | {matrices[-1]: "float16"}
    if shards == 1:
        write_safetensors(directory / "model.safetensors", tiny.tensors, dtypes)
        return directory

    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {n: tiny.tensors[n] for n in names[len(names) * i // shards : len(names) * (i + 1) // shards]}
        write_safetensors(directory / file, part, dtypes)
        weight_map |= dict.fromkeys(part, file)
    total_bytes = sum(len(_encode(t, dtypes[n])[1]) for n, t in tiny.tensors.items())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return directory


def write_safetensors(path: Path, tensors: Tensors, dtypes: Mapping[str, str] | None = None) -> None:
    """Writes one safetensors file. Tensors are float32 and stored as `dtypes[name]` (default float32); uint8 ones are
    stored as they are, under `dtypes[name]` if it names a one-byte safetensors type such as F8_E4M3."""
    dtypes = dtypes or {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    chunks = []
    offset = 0
    for name, tensor in tensors.items():
        tag, data = _encode(tensor, dtypes.get(name, "float32"))
        header[name] = {"dtype": tag, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(chunks))


def load_golden(variant: str) -> dict[str, np.ndarray]:
    """The arrays of tests/goldens/<variant>.npz; the module docstring says what they are."""
    with np.load(GOLDENS / f"{variant}.npz") as file:
        return dict(file)


def fingerprint(tiny: TinyModel) -> str:
    """sha256 over names and values of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(tiny.tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tiny.tensors[name], dtype="<f4").tobytes())
    return digest.hexdigest()


def prompt_ids(variant: str, length: int, attempt: int = 0) -> np.ndarray:
    """int32 [length]: bos, then ids that are neither special nor stop ids; another prompt for each `attempt`."""
    config = tiny_model(variant).config
    vocab = config.get("text_config", config)["vocab_size"]
    ids = 2 + (_random_bits(f"{variant}/prompt/{attempt}", length) >> np.uint64(8)) % np.uint64(vocab - 10)
    return np.concatenate([[1], ids[1:]]).astype(np.int32)


def random_matrix(key: str, rows: int, cols: int, exponent: int) -> np.ndarray:
    """float32 [rows, cols]: integers in [-127, 127], one 127 or -127 in each aligned group of 32 columns, times
    2**-exponent. Their standard deviation is about 46 * 2**-exponent."""
    # The sum of 8 random bytes is close to normal; integer arithmetic gives the same bits everywhere.
    octets = _random_bits(key, rows * cols).view(np.uint8).reshape(rows, cols, 8).astype(np.int64)
    values = np.clip((octets.sum(axis=2) - 1020) // 5, -126, 126)
    row = np.arange(rows)
    for g, start in enumerate(range(0, cols, 32)):
        width = min(32, cols - start)
        bits = _random_bits(f"{key}/peak/{g}", rows)
        column = start + (bits >> np.uint64(16)) % np.uint64(width)
        values[row, column.astype(np.int64)] = np.where(bits & np.uint64(1), 127, -127)
    return (values * 2.0**-exponent).astype(np.float32)


def random_vector(key: str, size: int, low: int, high: int, exponent: int) -> np.ndarray:
    """float32 [size]: integers in [low, high] times 2**-exponent."""
    bits = (_random_bits(key, size) >> np.uint64(8)) % np.uint64(high - low + 1)
    return ((bits.astype(np.int64) + low) * 2.0**-exponent).astype(np.float32)


def _text_tensors(variant: str, config: dict[str, Any]) -> Tensors:
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", D // heads)
    qwen2, qwen3 = config["model_type"] == "qwen2", config["model_type"].startswith("qwen3")
    tensors: Tensors = {}

    def matrix(name: str, rows: int, cols: int, exponent: int, *, bias: bool = False, bias_exponent: int = 7):
        tensors[f"{name}.weight"] = random_matrix(f"{variant}/{name}", rows, cols, exponent)
        if bias:
            tensors[f"{name}.bias"] = random_vector(f"{variant}/{name}.bias", rows, -127, 127, bias_exponent)

    def norm(name: str, size: int, low: int = 32, high: int = 127):
        tensors[f"{name}.weight"] = random_vector(f"{variant}/{name}", size, low, high, 6)

    matrix("model.embed_tokens", V, D, 7)
    attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
    qkv_bias = attention_bias or qwen2
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        norm(f"{layer}.input_layernorm", D)
        # Qwen2's biases are far larger than what they are added to.
        large = 4 if qwen2 else 6
        attn = f"{layer}.self_attn"
        matrix(f"{attn}.q_proj", heads * head_dim, D, 8, bias=qkv_bias, bias_exponent=large)
        matrix(f"{attn}.k_proj", kv_heads * head_dim, D, 8, bias=qkv_bias, bias_exponent=large)
        matrix(f"{attn}.v_proj", kv_heads * head_dim, D, 8, bias=qkv_bias, bias_exponent=large + 1)
        matrix(f"{attn}.o_proj", D, heads * head_dim, 9, bias=attention_bias)
        if qwen3:
            norm(f"{attn}.q_norm", head_dim, 48, 127)
            norm(f"{attn}.k_norm", head_dim, 48, 127)
        norm(f"{layer}.post_attention_layernorm", D)
        mlp = f"{layer}.mlp"
        matrix(f"{mlp}.gate_proj", F, D, 8, bias=mlp_bias)
        matrix(f"{mlp}.up_proj", F, D, 8, bias=mlp_bias)
        matrix(f"{mlp}.down_proj", D, F, 10, bias=mlp_bias)
    norm("model.norm", D)
    if not config["tie_word_embeddings"]:
        matrix("lm_head", V, D, 7)
    return tensors


def _visual_tensors(variant: str) -> Tensors:
    name = "model.visual.patch_embed.proj"
    return {
        f"{name}.weight": random_matrix(f"{variant}/{name}", 32, 3 * 2 * 4 * 4, 9).reshape(32, 3, 2, 4, 4),
        f"{name}.bias": random_vector(f"{variant}/{name}.bias", 32, -127, 127, 9),
        "model.visual.blocks.0.norm1.weight": random_vector(f"{variant}/norm1", 32, 32, 127, 6),
    }


def _qwen3_vl_config(text: dict[str, Any]) -> dict[str, Any]:
    text = dict(text)
    vocab = text["vocab_size"]
    text.pop("architectures")
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": vocab - 3,
        "video_token_id": vocab - 4,
        "vision_start_token_id": vocab - 5,
        "vision_end_token_id": vocab - 6,
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
        "vision_config": {
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0],
            "depth": 1,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 32,
            "in_channels": 3,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_position_embeddings": 16,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }


def _encode(tensor: np.ndarray, dtype: str) -> tuple[str, bytes]:
    if tensor.dtype == np.uint8:
        return (dtype if dtype.isupper() else "U8"), tensor.tobytes()
    encoders: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
        "float32": ("F32", lambda t: t.astype("<f4")),
        "float16": ("F16", lambda t: t.astype("<f2")),
        # The weights are exact in bfloat16: its bits are the upper half of the float32.
        "bfloat16": ("BF16", lambda t: (np.ascontiguousarray(t, "<f4").view("<u4") >> 16).astype("<u2")),
    }
    tag, encode = encoders[dtype]
    return tag, encode(tensor).tobytes()


def _random_bits(key: str, count: int) -> np.ndarray:
    """uint64 [count]: the splitmix64 sequence from a seed that is a hash of `key`."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.array([seed], np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).astype("<u8")
