"""config.json to ModelConfig: what is read, what wins, what is refused."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from tiny import VARIANTS, tiny_model

from vramjax.checkpoint.names import (
    HF_PREFIXES,
    canonical_from_hf,
    expected_tensors,
    hf_from_canonical,
    is_quantised_name,
    skip_reason,
)
from vramjax.config import ModelConfig, RopeConfig
from vramjax.errors import ConfigError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def config_of(variant: str = "llama", **updates: Any) -> dict[str, Any]:
    """A variant's config.json; an update to None removes the key."""
    config = tiny_model(variant).config | updates
    return {key: value for key, value in config.items() if value is not None}


def read(config: dict[str, Any], generation: dict[str, Any] | None = None) -> tuple[ModelConfig, list[str]]:
    notes: list[str] = []
    before = copy.deepcopy(config)
    model = ModelConfig.from_hf(config, generation, notes=notes)
    assert config == before  # reading changes nothing
    return model, notes


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_reads_without_notes_and_survives_json(variant: str):
    tiny = tiny_model(variant)
    model, notes = read(tiny.config, tiny.generation_config)
    assert not notes
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model
    hash(model)
    prefix = "model.language_model." if variant == "qwen3_vl" else "model."
    expected = {hf_from_canonical(name, prefix): shape for name, shape in expected_tensors(model).items()}
    stored = {name: t.shape for name, t in tiny.tensors.items() if not skip_reason(name, model.family)}
    assert stored == expected


def test_llama():
    model, _ = read(config_of(), {"eos_token_id": [190, 191]})
    assert model == ModelConfig(
        family="llama",
        num_layers=3,
        hidden_size=64,
        intermediate_size=160,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=192,
        max_positions=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        bos_token_id=1,
        eos_token_ids=(190, 191),
    )


def test_families_differ_in_biases_and_norms():
    qwen2, _ = read(config_of("qwen2"))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    biased, _ = read(config_of("llama_bias"))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias, biased.qk_norm) == (True, True, True, False)
    qwen3, _ = read(config_of("qwen3"))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.mlp_bias, qwen3.qk_norm) == (False, False, False, True)
    assert qwen3.tied_embeddings and qwen3.head_dim == 32


def test_head_dim_is_its_own_number():
    assert read(config_of("llama_head_dim"))[0].head_dim == 32  # hidden 64, 4 heads
    assert read(config_of("llama", head_dim=None))[0].head_dim == 16
    assert read(config_of("qwen3", head_dim=None))[0].head_dim == 128
    with pytest.raises(ConfigError, match="hidden_size is 66; expected a multiple of num_attention_heads"):
        read(config_of("llama", hidden_size=66))


# --- RoPE ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_old_and_new_rope_keys_mean_the_same(variant: str):
    old = tiny_model(variant).config
    new = copy.deepcopy(old)
    holder = new.get("text_config", new)
    table = holder.pop("rope_scaling", None) or {}
    table["rope_type"] = table.pop("type", table.get("rope_type", "default"))
    holder["rope_parameters"] = table | {"rope_theta": holder.pop("rope_theta")}
    assert read(new) == read(old)


def test_rope_theta_is_never_a_silent_default():
    model, notes = read(config_of("llama", rope_theta=None))
    assert model.rope.theta == 10000 and "no rope_theta" in notes[0]
    for variant in ("qwen2", "qwen3"):
        with pytest.raises(ConfigError, match=f"no rope_theta.*expected one for {variant}"):
            read(config_of(variant, rope_theta=None))


def test_rope_theta_inside_the_table_wins_with_a_note():
    model, notes = read(config_of(rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    assert model.rope.theta == 1e6
    assert len(notes) == 1 and "two values of rope_theta" in notes[0]


def test_two_rope_tables_must_agree():
    both = config_of(rope_parameters=YARN | {"rope_theta": 1e4}, rope_scaling=YARN)
    assert read(both)[0].rope.kind == "yarn"
    with pytest.raises(ConfigError, match=r"factor is 4\.0 in rope_parameters and 8\.0 in rope_scaling"):
        read(config_of(rope_parameters=YARN, rope_scaling=YARN | {"factor": 8.0}))


def test_rope_kinds():
    assert read(config_of(rope_scaling={"type": "linear", "factor": 4}))[0].rope == RopeConfig(
        kind="linear", theta=1e4, factor=4.0
    )
    assert read(config_of(rope_scaling=LLAMA3))[0].rope == RopeConfig(
        kind="llama3",
        theta=1e4,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=64,
    )
    yarn = read(config_of(rope_scaling=YARN | {"beta_fast": 16, "truncate": False}))[0].rope
    assert yarn == RopeConfig(
        kind="yarn", theta=1e4, factor=4.0, original_max_positions=128, beta_fast=16.0, truncate=False
    )


def test_mrope_of_text_is_default_rope():
    for table in (
        {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        {"type": "mrope", "mrope_section": [16, 24, 24]},
    ):
        model, notes = read(config_of("qwen3", rope_scaling=table))
        assert model.rope == RopeConfig(theta=1e6) and not notes


def test_yarn_factors_that_follow_from_others():
    rope = read(config_of(rope_scaling=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}))[0].rope
    assert rope.attention_factor == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
    rope = read(config_of(rope_scaling=YARN | {"attention_factor": 1.5}))[0].rope
    assert rope.attention_factor == 1.5
    rope, notes = read(config_of(rope_scaling={"rope_type": "yarn", "factor": 4.0}))
    assert rope.rope.original_max_positions == 512 and "original_max_position_embeddings" in notes[0]
    rope, _ = read(config_of(rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 128}))
    assert rope.rope.factor == 4.0


@pytest.mark.parametrize("name", ["dynamic", "longrope", "su", "proportional", "ntk"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_rope_kinds_are_refused_by_name(name: str, key: str):
    with pytest.raises(ConfigError, match=f"rope_type is '{name}'; expected one of"):
        read(config_of(rope_scaling={key: name, "factor": 2.0}))


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor is '4'"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}}, "no low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor is 1.0; expected more than"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; expected a JSON object"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*expected a number above 0 and at most"),
        ({"rope_theta": 1e-320}, "rope theta is 1e-320; expected a number above 1"),
        ({"rope_theta": 1.0, "rope_scaling": YARN}, r"rope theta is 1\.0; expected a number above 1"),
        ({"rope_scaling": YARN | {"factor": 10**400}}, "factor is 1000"),
        ({"rope_scaling": {"type": "linear", "factor": 1e-320}}, "factor is 1e-320; expected a number of at least"),
        ({"rope_scaling": YARN | {"mscale": "1", "mscale_all_dim": 1.0}}, "mscale is '1'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type is \['yarn'\]; expected one of"),
        ({"rope_scaling": {"type": ["linear"]}}, r"rope_type is \['linear'\]; expected one of"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e6}}},
            "a table for each of full_attention, sliding_attention",
        ),
    ],
)
def test_unusable_rope_is_refused(updates: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(config_of(**updates))


def test_one_table_for_full_attention_is_the_table():
    model, _ = read(config_of(rope_theta=None, rope_parameters={"full_attention": LLAMA3 | {"rope_theta": 5e5}}))
    assert model.rope.kind == "llama3" and model.rope.theta == 5e5


def test_keys_that_a_rope_kind_ignores_are_noted():
    _, notes = read(config_of(rope_scaling={"rope_type": "default", "factor": 8.0}))
    assert notes == ["config.json's rope table has factor, which rope_type 'default' ignores"]


# --- Nested configs, token ids ---


def test_text_config_wins_over_the_top_level():
    config = tiny_model("qwen3_vl").config
    expected, _ = read(config)
    conflicting = config | {"hidden_size": 4096, "num_hidden_layers": 99, "rope_theta": 1e4, "vocab_size": 160}
    model, notes = read(conflicting)
    assert model == expected and model.family == "qwen3_vl"
    assert [note.split(":")[0] for note in notes] == [
        f"config.json has two values of {key}" for key in ("hidden_size", "num_hidden_layers", "rope_theta")
    ]


def test_what_text_config_lacks_comes_from_the_top_level():
    config = tiny_model("qwen3_vl").config
    del config["text_config"]["tie_word_embeddings"]
    assert read(config)[0].tied_embeddings
    assert not read(config | {"tie_word_embeddings": False})[0].tied_embeddings


def test_text_tower_alone():
    config = tiny_model("qwen3_vl").config
    alone = read(config["text_config"] | {"model_type": "qwen3_vl_text"})[0]
    assert alone == read(config)[0]


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (2, {"eos_token_id": [5, 7]}, (5, 7, 2)),
        (2, {"eos_token_id": 2}, (2,)),
        ([2, 3], None, (2, 3)),
        (None, {"eos_token_id": 9}, (9,)),
        (None, None, ()),
        (4, {}, (4,)),
    ],
)
def test_every_stop_id_counts(config_eos: Any, generation: Any, expected: tuple[int, ...]):
    assert read(config_of(eos_token_id=config_eos), generation)[0].eos_token_ids == expected


def test_a_stop_id_outside_the_vocabulary_is_noted():
    model, notes = read(config_of(eos_token_id=[2, 192]))
    assert model.eos_token_ids == (2, 192)
    assert notes == ["the stop id 192 is not in the vocabulary of 192: decoding never stops on it"]


def test_token_ids_that_are_none_are_refused():
    with pytest.raises(ConfigError, match="eos_token_id is '</s>'"):
        read(config_of(eos_token_id="</s>"))
    assert read(config_of(bos_token_id=None))[0].bos_token_id is None


# --- Refusals ---


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_moe", "smollm3", "mistral", None, 3])
def test_unknown_model_types_are_refused_by_name(model_type: Any):
    with pytest.raises(ConfigError, match=f"model_type is {model_type!r}; expected one of llama, qwen2"):
        read(tiny_model("llama").config | {"model_type": model_type})


@pytest.mark.parametrize(
    ("key", "table", "method"),
    [
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ("quantization_config", {"quant_method": "gptq", "bits": 4}, "gptq"),
        ("quantization_config", {"load_in_4bit": True}, "quantization_config"),
        ("quantization", {"group_size": 64, "bits": 4}, "4-bit"),
        ("compression_config", {"quant_method": "compressed-tensors"}, "compressed-tensors"),
    ],
)
def test_quantised_checkpoints_are_refused_naming_the_method(key: str, table: dict[str, Any], method: str):
    with pytest.raises(ConfigError, match=f"already quantised .*method {method}"):
        read(config_of() | {key: table})


@pytest.mark.parametrize(
    ("variant", "updates", "message"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected silu"),
        ("llama", {"num_key_value_heads": 3}, "num_heads is 4; expected a multiple of num_kv_heads, which is 3"),
        ("llama", {"head_dim": 15}, "head_dim is 15; expected an even number"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64'"),
        ("llama", {"vocab_size": True}, "vocab_size is True"),
        ("llama", {"hidden_size": None}, "no hidden_size"),
        ("llama", {"rms_norm_eps": None}, "no rms_norm_eps"),
        ("llama", {"max_position_embeddings": None}, "no max_position_embeddings"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; expected true or false"),
        ("llama", {"sliding_window": 128}, "sliding_window is 128; expected none"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128}, "sliding_window is 128"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "for layer 1"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": "28"}, "layers is '28'"),
        ("llama", {"layer_types": 5}, "layer_types is 5; expected a list"),
        ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ("llama", {"rms_norm_eps": 1e-320}, "rms_norm_eps is 1e-320; expected a number of at least 1e-30"),
        ("llama", {"rms_norm_eps": 2}, "rms_norm_eps is 2.0; expected .* at most 1"),
        (
            "llama",
            {"hidden_size": 10**12},
            "hidden_size is 1000000000000; expected a whole number from 1 to",
        ),
        ("llama", {"num_hidden_layers": 10**9}, "num_layers is 1000000000; expected a whole number from 1 to 2000"),
        ("llama", {"text_config": 3}, "text_config is 3"),
    ],
)
def test_what_cannot_be_run_is_refused(variant: str, updates: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read(config_of(variant, **updates))


@pytest.mark.parametrize(
    "updates",
    [
        {"use_sliding_window": False, "sliding_window": 128},
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 3},
        {"use_sliding_window": True, "sliding_window": 512},
        {"layer_types": ["full_attention"] * 3, "sliding_window": 128},
    ],
)
def test_a_sliding_window_that_no_layer_uses_is_fine(updates: dict[str, Any]):
    assert read(config_of("qwen2", **updates)) == read(config_of("qwen2"))


def test_stored_configs_are_read_strictly():
    data = read(config_of())[0].to_json()
    with pytest.raises(ConfigError, match="lacks 'num_heads'"):
        ModelConfig.from_json({k: v for k, v in data.items() if k != "num_heads"})
    with pytest.raises(ConfigError, match="has 'extra'"):
        ModelConfig.from_json(data | {"extra": 1})
    with pytest.raises(ConfigError, match="a stored RopeConfig is None"):
        ModelConfig.from_json(data | {"rope": None})
    with pytest.raises(ConfigError, match="model family is 'bert'"):
        ModelConfig.from_json(data | {"family": "bert"})


def test_freq_factors_survive_json_and_fit_the_head():
    data = read(config_of())[0].to_json()
    data["rope"]["freq_factors"] = [1.0] * 8
    model = ModelConfig.from_json(json.loads(json.dumps(data)))
    assert model.rope.freq_factors == (1.0,) * 8
    assert ModelConfig.from_json(model.to_json()) == model
    data["rope"]["freq_factors"] = [1.0] * 7
    with pytest.raises(ConfigError, match="freq_factors has 7 numbers; expected head_dim / 2, which is 8"):
        ModelConfig.from_json(data)


# --- Names ---


@pytest.mark.parametrize("prefix", HF_PREFIXES)
def test_names_are_found_at_every_prefix(prefix: str):
    for variant in ("llama_bias", "qwen3_untied"):
        for name in expected_tensors(read(config_of(variant))[0]):
            assert canonical_from_hf(hf_from_canonical(name, prefix)) == name
    assert canonical_from_hf(f"{prefix}lm_head.weight") == "head.weight"


@pytest.mark.parametrize(
    "stored",
    [
        "model.layers.0.self_attn.q_proj.weights",
        "model.layers.0.self_attn.qkv_proj.weight",
        "model.layers.-1.mlp.up_proj.weight",
        "model.layers.01.mlp.up_proj.weight",
        "model.visual.layers.0.mlp.up_proj.weight",
        "model.model.norm.weight",
        "",
    ],
)
def test_other_names_have_no_place(stored: str):
    assert canonical_from_hf(stored) is None


def test_skip_list_depends_on_the_family():
    assert skip_reason("model.layers.0.self_attn.rotary_emb.inv_freq", "llama")
    assert skip_reason("model.visual.blocks.0.norm1.weight", "qwen3_vl")
    assert skip_reason("visual.patch_embed.proj.weight", "qwen3_vl")
    assert skip_reason("model.visual.blocks.0.norm1.weight", "llama") is None
    assert skip_reason("model.norm.weight", "qwen3_vl") is None


@pytest.mark.parametrize(
    "suffix",
    ["weight_scale", "weight_scale_inv", "input_scale", "scales", "biases", "qweight", "qzeros", "g_idx", "SCB"],
)
def test_quantised_names(suffix: str):
    assert is_quantised_name(f"model.layers.0.mlp.up_proj.{suffix}")
    assert not any(is_quantised_name(name) for v in VARIANTS for name in tiny_model(v).tensors)
