"""GGUF files that are damaged, or whose tensors and metadata do not fit, are refused in one sentence."""

from __future__ import annotations

import os
import re
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny as tiny_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_model
from tiny_gguf import QuantType, write_tiny_gguf

from vramjax.checkpoint.gguf import canonical_from_gguf, open_gguf
from vramjax.checkpoint.gguf_header import read_header
from vramjax.config import RopeConfig
from vramjax.errors import CheckpointError, ConfigError, VramjaxError

# Damaged files


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "small.gguf", "llama", matrix_type=QuantType.Q8_0)


def test_every_truncation_is_one_clear_error(small_file: Path, tmp_path: Path):
    whole = small_file.read_bytes()
    tensors = read_header(small_file).tensors
    data_start = min(t.offset for t in tensors)
    end = max(t.offset + t.nbytes for t in tensors)
    cut = tmp_path / "cut.gguf"
    for size in [*range(1, data_start), *range(data_start, end, 997), end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as caught:
            open_gguf(cut)
        message = str(caught.value)
        assert str(cut) in message and "expected" in message and "\n" not in message
        if size >= 4:
            assert f"is {size} bytes" in message
            expected = re.search(r"expected (?:at least )?(\d+) bytes", message)
            assert expected and size < int(expected[1]) <= end
        if size >= data_start:
            assert f"expected {end} bytes" in message
    cut.write_bytes(whole[:end])  # only padding is gone
    open_gguf(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damaged_header_is_refused_or_harmless(small_file: Path, tmp_path: Path, data: st.DataObject):
    content = bytearray(small_file.read_bytes())
    header_bytes = min(t.offset for t in read_header(small_file).tensors)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header_bytes - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    try:
        source = open_gguf(path)
        for name in source.tensors:
            source.read(name)
    except VramjaxError as error:
        assert str(path) in str(error)


def test_what_is_no_gguf_file(tmp_path: Path, small_file: Path):
    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"m\.gguf cannot be read: No such file"):
        open_gguf(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"m\.gguf is empty \(0 bytes\); expected a GGUF file"):
        open_gguf(path)
    path.write_bytes(b"\x10\0\0\0\0\0\0\0{}" + bytes(100))
    with pytest.raises(CheckpointError, match=r"begins with b'.*'; expected b'GGUF': it is not a GGUF file"):
        open_gguf(path)
    for version, message in [(1, "version 1; expected version 2 or 3"), (4, "version 4"), (3 << 24, "big-endian")]:
        path.write_bytes(b"GGUF" + struct.pack("<I", version) + small_file.read_bytes()[8:])
        with pytest.raises(CheckpointError, match=message):
            open_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 2) + small_file.read_bytes()[8:])
    open_gguf(path)
    with pytest.raises(CheckpointError, match="is a directory; expected a GGUF file"):
        open_gguf(tmp_path)


def test_unknown_tensor_type(tmp_path: Path, small_file: Path):
    content = small_file.read_bytes()
    name = b"blk.1.ffn_up.weight"
    at = content.index(name) + len(name) + 4 + 16  # after the number of dimensions and two dimensions
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:at] + struct.pack("<I", 77) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\.weight in .* has type number 77; expected"):
        open_gguf(path)
    path.write_bytes(content[:at] + struct.pack("<I", QuantType.I8) + content[at + 4 :])
    with pytest.raises(CheckpointError, match=r"tensor blk\.1\.ffn_up\.weight in .* has type I8, which .* cannot"):
        open_gguf(path)


def test_a_tensor_past_the_end(tmp_path: Path, small_file: Path):
    content = small_file.read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8 + 4
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:at] + struct.pack("<Q", 1 << 40) + content[at + 8 :])
    with pytest.raises(CheckpointError, match=rf"is {len(content)} bytes; expected \d+ bytes, as tensor output_norm"):
        open_gguf(path)
    path.write_bytes(content[:at] + struct.pack("<Q", 0) + content[at + 8 :])
    with pytest.raises(CheckpointError, match=r"tensors .* and .* overlap"):
        open_gguf(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["blk.0.attn_k.weight", "blk.0.attn_norm.weight"])
def test_a_value_that_is_not_finite_names_tensor_and_file(tmp_path: Path, small_file: Path, name: str, value: float):
    tensor = next(t for t in read_header(small_file).tensors if t.name == name)
    content = bytearray(small_file.read_bytes())
    bits = np.array([value], np.float16 if tensor.type == QuantType.Q8_0 else np.float32).tobytes()
    content[tensor.offset : tensor.offset + len(bits)] = bits
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    source = open_gguf(path)
    canonical = canonical_from_gguf(name)
    assert canonical is not None
    with pytest.raises(CheckpointError, match=rf"tensor {re.escape(name)} in .*m\.gguf has (nan|inf) at \[0"):
        source.read(canonical)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path, small_file: Path):
    path = tmp_path / "m.gguf"
    shutil.copy(small_file, path)
    source = open_gguf(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="has changed since it was opened"):
        for name in source.tensors:
            source.read(name)


# Tensors and metadata that do not fit


def test_missing_extra_and_misshapen_tensors(tmp_path: Path):
    def without(writer: gguf.GGUFWriter) -> None:
        del writer.tensors[-1]["blk.2.ffn_norm.weight"]

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32))

    path = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match=r"has no tensor blk\.2\.ffn_norm\.weight of shape \[64\]"):
        open_gguf(write_tiny_gguf(path, "llama", edit=without))
    with pytest.raises(CheckpointError, match=r"tensor blk\.0\.attn_sinks\.weight in .*m\.gguf.* is not part of"):
        open_gguf(write_tiny_gguf(path, "llama", edit=extra))
    tiny = tiny_model("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    tiny.tensors[name] = np.ascontiguousarray(tiny.tensors[name].T)
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\..* \[64, 160\]; expected \[160, 64\].*transpose"):
        open_gguf(write_tiny_gguf(path, "llama", tiny=tiny))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "gemma3", r"general\.architecture is 'gemma3'; expected one of llama, qwen2"),
        ("general.type", "adapter", r"general\.type is 'adapter'; expected 'model'"),
        ("llama.expert_count", 8, r"llama\.expert_count is 8, which is not supported"),
        ("llama.attention.sliding_window", 128, r"sliding_window is 128; expected none"),
        ("llama.final_logit_softcapping", 30.0, r"llama\.final_logit_softcapping is 30\.0"),
        ("llama.rope.scaling.type", "longrope", r"llama\.rope\.scaling\.type is 'longrope'; expected one of linear"),
        ("llama.rope.dimension_count", 8, r"rope\.dimension_count is 8; expected the size of a head, which is 16"),
        ("llama.attention.value_length", 32, r"attention\.value_length is 32; expected the size of a head"),
        ("llama.vocab_size", 200, r"llama\.vocab_size is 200, but tensor token_embd\.weight has shape \[160, 64\]"),
        ("llama.block_count", None, r"the metadata has no llama\.block_count; expected a whole number"),
        ("llama.block_count", 1 << 30, r"block_count is 1073741824, but the file has tensors of 2 layers"),
        ("llama.rope.freq_base", -1.0, r"llama\.rope\.freq_base is -1\.0; expected a number above 0 and at most"),
        ("llama.attention.head_count", 3, r"num_heads is 3; expected a multiple of num_kv_heads"),
        ("llama.feed_forward_length", [160, 32], r"feed_forward_length differs between layers: \[160, 32\]"),
        ("tokenizer.ggml.eos_token_id", "2", r"tokenizer\.ggml\.eos_token_id is '2'; expected a token id"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, key: str, value: object, message: str):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama_head16", edit=setter({key: value}), tiny=head16())
    with pytest.raises(ConfigError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, RopeConfig(theta=1e4)),
        ({"llama.rope.scaling.factor": 4.0}, RopeConfig(kind="linear", theta=1e4, factor=4.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeConfig(kind="linear", theta=1e4, factor=2.0)),
        ({"llama.rope.scaling.factor": 0.0}, RopeConfig(theta=1e4)),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 128,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            RopeConfig(kind="yarn", theta=1e4, factor=4.0, original_max_positions=128, beta_fast=16.0),
        ),
    ],
)
def test_rope_metadata(tmp_path: Path, changes: dict[str, object], rope: RopeConfig):
    path = write_tiny_gguf(tmp_path / "m.gguf", "llama_head16", edit=setter(changes), tiny=head16())
    assert open_gguf(path).config.rope == rope


def test_a_missing_theta_is_never_silent(tmp_path: Path):
    path = tmp_path / "m.gguf"
    source = open_gguf(write_tiny_gguf(path, "llama", edit=setter({"llama.rope.freq_base": None})))
    assert source.config.rope.theta == 10000 and "rope.freq_base" in source.notes[0]
    with pytest.raises(ConfigError, match=r"the metadata has no qwen3\.rope\.freq_base"):
        open_gguf(write_tiny_gguf(path, "qwen3", edit=setter({"qwen3.rope.freq_base": None})))


def test_stop_ids_of_metadata_and_vocabulary(tmp_path: Path):
    def edit(writer: gguf.GGUFWriter) -> None:
        tokens = [f"t{i}" for i in range(192)]
        tokens[5], tokens[7], tokens[9] = "<|endoftext|>", "<|im_end|>", "<|eot_id|>"
        types = [gguf.TokenType.NORMAL] * 192
        types[5] = types[7] = gguf.TokenType.CONTROL  # 9 only looks like one
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_eom_token_id(11)

    assert open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=edit)).config.eos_token_ids == (
        190,
        191,
        11,
        5,
        7,
    )


def test_a_stop_id_outside_the_vocabulary_is_noted(tmp_path: Path):
    edit = setter({"tokenizer.ggml.eos_token_id": 99_999})
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama_head16", edit=edit, tiny=head16()))
    assert any("stop id 99999 is not in the vocabulary of 160" in note for note in source.notes)


def head16() -> tiny_module.TinyModel:
    """A llama whose metadata names head_dim, 16."""
    tiny = tiny_model("llama_linear_rope")
    del tiny.config["rope_scaling"]
    return tiny


def setter(changes: dict[str, object]):
    """An edit that sets metadata keys, or takes them away where the value is None."""

    def edit(writer: gguf.GGUFWriter) -> None:
        for key, value in changes.items():
            writer.kv_data[0].pop(key, None)
            if value is not None:
                kind = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
                writer.add_key_value(key, value, kind)

    return edit
