"""Hugging Face directories: what is read is what was stored, and whatever is wrong is said before any work."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny import VARIANTS, TinyModel, tiny_model, write_model, write_safetensors, write_tiny

from vramjax.checkpoint.hf import HfSource, open_hf
from vramjax.checkpoint.names import canonical_from_hf, expected_tensors
from vramjax.checkpoint.safetensors_io import read_float32, read_header
from vramjax.errors import CheckpointError, ConfigError

Q = "model.layers.1.self_attn.q_proj.weight"
K = "model.layers.1.self_attn.k_proj.weight"


def assert_reads(source: HfSource, tiny: TinyModel) -> None:
    stored = {canonical_from_hf(name): t for name, t in tiny.tensors.items()}
    assert list(source.tensors) == list(expected_tensors(source.config))
    for name in source.tensors:
        values = source.read(name)
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, stored[name])


def refuses(directory: Path, message: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error, match=message) as caught:
        open_hf(directory)
    assert "\n" not in str(caught.value)


def edited(directory: Path, edit: Callable[[TinyModel], object], variant: str = "llama", **options) -> Path:
    tiny = tiny_model(variant)
    edit(tiny)
    return write_model(directory, tiny, **options)


# --- Reading ---


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(tmp_path: Path, variant: str):
    source = open_hf(write_tiny(tmp_path / "m", variant))
    assert_reads(source, tiny_model(variant))
    assert (len(source.notes) == 1) == (variant == "qwen3_vl"), source.notes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "mixed"])
@pytest.mark.parametrize("shards", [1, 3])
def test_dtypes_and_shards(tmp_path: Path, dtype: str, shards: int):
    source = open_hf(write_tiny(tmp_path, "llama", dtype=dtype, shards=shards))
    assert_reads(source, tiny_model("llama"))
    if dtype == "mixed":
        assert {info.dtype for info in source.tensors.values()} == {"F32", "F16", "BF16"}


def test_bfloat16_is_exact_for_every_finite_number(tmp_path: Path):
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    numbers = bits.view(np.float32)
    numbers = np.where(np.isfinite(numbers), numbers, np.float32(0))
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"x": numbers}, {"x": "bfloat16"})

    read = read_float32(path, read_header(path)["x"])
    assert (read.view(np.uint32) == numbers.view(np.uint32)).all()


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "language_model.", "model.", ""])
def test_prefixes_read_the_same(tmp_path: Path, prefix: str):
    def rename(tiny: TinyModel) -> None:
        tiny.config["num_hidden_layers"] = 3
        tiny.tensors = {name.replace("model.", prefix, 1): t for name, t in tiny.tensors.items()}

    source = open_hf(edited(tmp_path, rename, shards=2))
    plain = tiny_model("llama")
    for name, tensor in plain.tensors.items():
        np.testing.assert_array_equal(source.read(canonical_from_hf(name) or ""), tensor)


def test_twelve_layers_under_a_long_prefix(tmp_path: Path):
    tiny = tiny_model("llama")
    layer0 = {n: t for n, t in tiny.tensors.items() if ".layers.0." in n}
    for i in range(3, 12):
        tiny.tensors |= {n.replace(".0.", f".{i}."): t * (1 + i) for n, t in layer0.items()}
    tiny.config["num_hidden_layers"] = 12
    plain = open_hf(write_model(tmp_path / "plain", tiny, shards=4))
    tiny.tensors = {n.replace("model.", "model.language_model."): t for n, t in tiny.tensors.items()}
    prefixed = open_hf(write_model(tmp_path / "prefixed", tiny, shards=4))
    assert list(plain.tensors) == list(prefixed.tensors)
    assert all((plain.read(name) == prefixed.read(name)).all() for name in plain.tensors)


def test_vision_tower_is_skipped_with_a_note(tmp_path: Path):
    source = open_hf(write_tiny(tmp_path, "qwen3_vl", dtype="bfloat16", shards=2))
    assert source.notes == ["3 tensors skipped: the vision tower, as only text is decoded"]


def test_numbered_shards_without_an_index(tmp_path: Path):
    write_tiny(tmp_path, "qwen2", shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_reads(open_hf(tmp_path), tiny_model("qwen2"))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refuses(tmp_path, "model-00002-of-00003.safetensors is missing")
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    refuses(tmp_path, "model-00001-of-00003.safetensors is missing; model-00003-of-00003.safetensors is one of 3 files")


def test_one_file_of_any_name(tmp_path: Path):
    write_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert_reads(open_hf(tmp_path), tiny_model("llama"))


def test_rotary_buffers_are_skipped(tmp_path: Path):
    def add(tiny: TinyModel) -> None:
        tiny.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    source = open_hf(edited(tmp_path, add))
    assert source.notes == ["1 tensors skipped: buffers of the rotary embedding, which are computed"]


# --- Files ---


def test_missing_shard(tmp_path: Path):
    write_tiny(tmp_path, "llama", shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    refuses(tmp_path, "model-00002-of-00002.safetensors is missing")


def test_index_that_names_the_wrong_shard(tmp_path: Path):
    write_tiny(tmp_path, "llama", shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    refuses(tmp_path, "model-00001-of-00002.safetensors has no tensor lm_head.weight")


@pytest.mark.parametrize("weight_map", [None, {}, {"lm_head.weight": "../model.safetensors"}, {"lm_head.weight": 3}])
def test_unusable_index(tmp_path: Path, weight_map):
    write_tiny(tmp_path, "llama", shards=2)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refuses(tmp_path, "expected tensor names and their files|expected a file beside it")


def test_a_single_file_wins_over_an_index_with_a_note(tmp_path: Path):
    write_tiny(tmp_path, "llama", shards=2)
    write_tiny(tmp_path, "llama")
    assert "used model.safetensors" in open_hf(tmp_path).notes[0]


def test_no_weights(tmp_path: Path):
    write_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    refuses(tmp_path, f"no safetensors weights in {tmp_path}$")
    (tmp_path / "model.safetensors").mkdir()  # a directory of that name is no file
    refuses(tmp_path, f"no safetensors weights in {tmp_path}$")
    (tmp_path / "pytorch_model.bin").touch()
    refuses(tmp_path, "no safetensors weights in .*PyTorch .bin files are not read")


def test_no_checkpoint_at_all(tmp_path: Path):
    refuses(tmp_path, "has no config.json")
    refuses(tmp_path / "absent", "is not a directory")
    (tmp_path / "config.json").write_text("{")
    refuses(tmp_path, "config.json is not a readable JSON object")
    (tmp_path / "config.json").write_text("[]")
    refuses(tmp_path, "config.json is not a readable JSON object: it holds list")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(("content", "message"), [("[" * 100_000, "nested too deeply"), ("[]", "it holds list")])
def test_json_that_cannot_be_used(tmp_path: Path, name: str, content: str, message: str):
    (write_tiny(tmp_path, "llama", shards=2) / name).write_text(content)
    refuses(tmp_path, f"{name} is not a readable JSON object: .*{message}")


def test_a_config_that_cannot_be_used_is_named(tmp_path: Path):
    write_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_size": -1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(tmp_path, f"^{tmp_path}: hidden_size is -1; expected", ConfigError)


def test_more_layers_than_any_file_could_have(tmp_path: Path):
    config_path = write_tiny(tmp_path, "llama") / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"num_hidden_layers": 1_999}))
    refuses(tmp_path, r"has 30 tensors; expected those of 1999 layers, which its config calls for")


def test_several_files_that_do_not_belong_together(tmp_path: Path):
    write_tiny(tmp_path, "llama")
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    write_safetensors(tmp_path / "b.safetensors", {})
    refuses(tmp_path, "a.safetensors, b.safetensors and no model.safetensors.index.json")


@pytest.mark.parametrize("cut", ["one byte", "half the header", "4 bytes", "nothing", "longer"])
@pytest.mark.parametrize("shards", [1, 2])
def test_truncated_file(tmp_path: Path, cut: str, shards: int):
    write_tiny(tmp_path, "llama", shards=shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    header_bytes = int.from_bytes(content[:8], "little")
    size, expected = {
        "one byte": (len(content) - 1, f"expected {len(content)}"),
        "half the header": (8 + header_bytes // 2, f"expected more than {8 + header_bytes}"),
        "4 bytes": (4, "expected at least 8"),
        "nothing": (0, "expected at least 8"),
        "longer": (len(content) + 1, f"expected {len(content)}"),
    }[cut]
    path.write_bytes((content + b"\0")[:size])
    refuses(tmp_path, f"{path.name} has {size} bytes; {expected}")


def test_files_that_are_no_safetensors(tmp_path: Path):
    write_tiny(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refuses(tmp_path, "is a Git LFS pointer")
    path.write_bytes(b"PK\x03\x04" * 10)
    refuses(tmp_path, "expected a safetensors file")


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{",
        "\xff",
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1]}}',
        '{"a": 3}',
        '{"a":' * 100_000,
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        '"b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_headers_that_contradict_themselves(tmp_path: Path, header: str):
    path = tmp_path / "x.safetensors"
    text = header.encode("latin-1")
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(path)


# --- Tensors ---


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [Q, "model.norm.weight"])
def test_what_is_not_finite_is_refused(tmp_path: Path, bad: float, name: str):
    def spoil(tiny: TinyModel) -> None:
        tiny.tensors[name][..., 5] = bad

    source = open_hf(edited(tmp_path, spoil))
    with pytest.raises(CheckpointError, match=rf"tensor {name} in .*model.safetensors has -?(nan|inf) at \[(0, )?5\]"):
        source.read(canonical_from_hf(name) or "")


def test_a_file_that_is_cut_or_gone_after_it_was_opened(tmp_path: Path):
    source = open_hf(write_tiny(tmp_path, "llama"))
    file = source.tensors["layers.2.down.weight"].file
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=f"{file} was cut short while tensor .* was read"):
        for name in source.tensors:
            source.read(name)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"tensor model.norm.weight in {file} cannot be read: No such file"):
        source.read("final_norm.weight")


def test_missing_tensor(tmp_path: Path):
    refuses(
        edited(tmp_path / "a", lambda tiny: tiny.tensors.pop(Q)),
        rf"has no tensor {Q} of shape \[64, 64\]",
    )
    refuses(
        edited(tmp_path / "b", lambda tiny: tiny.tensors.pop("lm_head.weight")),
        "has no tensor lm_head.weight",
    )
    refuses(
        edited(tmp_path / "c", lambda tiny: tiny.config.update(num_hidden_layers=4)),
        r"has no tensor model.layers.3.input_layernorm.weight .*\(9 tensors are missing\)",
    )


def test_missing_tensor_has_the_name_that_the_checkpoint_would_use(tmp_path: Path):
    name = Q.replace("model.", "model.language_model.")
    refuses(edited(tmp_path, lambda tiny: tiny.tensors.pop(name), "qwen3_vl"), f"has no tensor {name}")


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.input_layernorm.weight",  # of a layer that the config lacks
        "model.layers.0.self_attn.q_proj.bias",  # of a model that has no biases
        "model.layers.0.self_attn.q_norm.weight",
        "model.visual.blocks.0.norm1.weight",  # of a family that has no vision tower
        "model.layers.0.mlp.experts.0.weight",
    ],
)
def test_extra_tensor(tmp_path: Path, name: str):
    def add(tiny: TinyModel) -> None:
        tiny.tensors[name] = np.ones(64, np.float32)

    refuses(edited(tmp_path, add), f"tensor {name} in .* is not part of a llama model")


def test_biases_of_qwen2_are_needed_and_used(tmp_path: Path):
    source = open_hf(write_tiny(tmp_path / "a", "qwen2"))  # its config has no key for them
    assert np.abs(source.read("layers.0.q.bias")).max() > 1
    bias = "model.layers.2.self_attn.k_proj.bias"
    refuses(edited(tmp_path / "b", lambda tiny: tiny.tensors.pop(bias), "qwen2"), f"no tensor {bias}")


def test_swapped_tensors(tmp_path: Path):
    def swap(tiny: TinyModel) -> None:
        tiny.tensors[Q], tiny.tensors[K] = tiny.tensors[K], tiny.tensors[Q]

    refuses(edited(tmp_path, swap), rf"tensor {Q} in .* has shape \[32, 64\]; expected \[64, 64\]$")


def test_transposed_tensor(tmp_path: Path):
    def transpose(tiny: TinyModel) -> None:
        tiny.tensors[K] = tiny.tensors[K].T.copy()

    refuses(
        edited(tmp_path, transpose),
        rf"tensor {K} in .* has shape \[64, 32\]; expected \[32, 64\], of which it is the transpose",
    )


def test_tensor_of_another_rank(tmp_path: Path):
    def flatten(tiny: TinyModel) -> None:
        tiny.tensors[K] = tiny.tensors[K].reshape(-1)

    refuses(edited(tmp_path, flatten), rf"has shape \[{32 * 64}\]; expected \[32, 64\]$")


def test_the_same_tensor_under_two_names(tmp_path: Path):
    def repeat(tiny: TinyModel) -> None:
        tiny.tensors["norm.weight"] = tiny.tensors["model.norm.weight"]

    refuses(edited(tmp_path, repeat), "tensor norm.weight in .* are both final_norm.weight; expected it once")


def test_tied_checkpoint_that_stores_lm_head(tmp_path: Path):
    def add(tiny: TinyModel, factor: float) -> None:
        tiny.tensors["lm_head.weight"] = tiny.tensors["model.embed_tokens.weight"] * factor

    equal = open_hf(edited(tmp_path / "equal", lambda t: add(t, 1), "qwen3", dtype="mixed"))
    assert not equal.notes and "head.weight" not in equal.tensors
    differs = open_hf(edited(tmp_path / "differs", lambda t: add(t, 2), "qwen3", shards=2))
    assert "head.weight" not in differs.tensors
    assert len(differs.notes) == 1
    assert "lm_head.weight is stored and differs from the embedding" in differs.notes[0]
    assert differs.notes[0].endswith("the stored one is ignored")


def test_untied_checkpoint_keeps_a_head_that_equals_the_embedding(tmp_path: Path):
    def copy_embedding(tiny: TinyModel) -> None:
        tiny.tensors["lm_head.weight"] = tiny.tensors["model.embed_tokens.weight"]

    assert "head.weight" in open_hf(edited(tmp_path, copy_embedding)).tensors


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_float8_checkpoint(tmp_path: Path, suffix: str):
    def quantise(tiny: TinyModel) -> None:
        tiny.tensors[Q] = np.zeros((64, 64), np.uint8)
        tiny.tensors[Q + suffix] = np.ones((1, 1), np.float32)

    tiny = tiny_model("llama")
    quantise(tiny)
    write_model(tmp_path, tiny)
    write_safetensors(tmp_path / "model.safetensors", tiny.tensors, {Q: "F8_E4M3"})
    refuses(tmp_path, "F8_E4M3|is of a quantised checkpoint")
    tiny.config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(tiny.config))
    refuses(tmp_path, "already quantised .*method fp8", ConfigError)


def test_a_scale_is_never_ignored(tmp_path: Path):
    def add(tiny: TinyModel) -> None:
        tiny.tensors[Q + "_scale"] = np.ones(1, np.float32)

    refuses(edited(tmp_path, add), f"tensor {Q}_scale in .* is of a quantised checkpoint")


def test_weights_that_are_not_floats(tmp_path: Path):
    tiny = tiny_model("llama")
    tiny.tensors[Q] = np.zeros((64, 64), np.uint8)
    write_model(tmp_path, tiny)
    refuses(tmp_path, f"tensor {Q} in .* is stored as U8; expected one of F32, F16, BF16: save")


# --- Text files ---


def test_text_files_are_carried_along(tmp_path: Path):
    directory = write_tiny(tmp_path / "m", "llama")
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("separate")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    (directory / "README.md").write_text("not this one")
    (tmp_path / "out").mkdir()
    open_hf(directory).write_text_files(tmp_path / "out")
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "tokenizer.json",
        "chat_template.jinja",
        "generation_config.json",
    }
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "separate"


def test_a_tokenizer_that_is_not_read_is_noted(tmp_path: Path):
    directory = write_tiny(tmp_path / "m", "llama")
    (directory / "tokenizer.model").touch()
    (note,) = open_hf(directory).notes
    assert note.startswith("the tokenizer is only there as tokenizer.model; expected tokenizer.json, which")
    (directory / "tokenizer.json").write_text("{}")
    assert open_hf(directory).notes == []


def test_a_processors_template_becomes_the_template(tmp_path: Path):
    directory = write_tiny(tmp_path / "m", "llama")
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    (tmp_path / "out").mkdir()
    open_hf(directory).write_text_files(tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "of a processor"
