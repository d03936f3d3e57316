"""GGUF files hold the same model as the safetensors they were made from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from packed_dirs import assert_same_weights
from tiny import VARIANTS, tiny_model, write_safetensors, write_tiny
from tiny_gguf import QuantType, gguf_tensors, write_tiny_gguf

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.gguf import canonical_from_gguf, gguf_from_canonical, open_gguf
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.names import canonical_from_hf, expected_tensors, hf_from_canonical
from vramjax.checkpoint.packed import open_packed
from vramjax.checkpoint.source import Source
from vramjax.config import ModelConfig, RopeConfig
from vramjax.errors import CheckpointError
from vramjax.language_model import LanguageModel
from vramjax.model.rope import inverse_frequencies
from vramjax.quantize import Q8Matrix, dequantize, quantize


def hf_tensors(variant: str) -> dict[str, np.ndarray]:
    named = {canonical_from_hf(name): tensor for name, tensor in tiny_model(variant).tensors.items()}
    return {name: tensor for name, tensor in named.items() if name is not None}


def assert_reads_exactly(source: Source, expected: dict[str, np.ndarray]) -> None:
    """Every tensor as float32, with nothing to note."""
    for name, tensor in expected.items():
        read = source.read(name)
        assert isinstance(read, np.ndarray) and read.dtype == np.float32
        np.testing.assert_array_equal(read, tensor, err_msg=name)
    assert source.notes == []


# The same model


@pytest.mark.parametrize("variant", VARIANTS)
def test_tensors_equal_those_of_the_safetensors(tmp_path: Path, variant: str):
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", variant))
    expected = hf_tensors(variant)
    assert source.tensors.keys() == expected.keys() == expected_tensors(source.config).keys()
    assert_reads_exactly(source, expected)


def test_llama_rows_are_really_permuted_in_the_file():
    stored, plain = gguf_tensors(tiny_model("llama_bias")), hf_tensors("llama_bias")
    for name in ("layers.0.q.weight", "layers.0.k.weight", "layers.1.q.bias", "layers.1.k.bias"):
        assert (stored[gguf_from_canonical(name)] != plain[name]).mean() > 0.5
    assert (stored["blk.0.attn_v.weight"] == plain["layers.0.v.weight"]).all()
    qwen = gguf_tensors(tiny_model("qwen2"))
    assert (qwen["blk.0.attn_q.weight"] == hf_tensors("qwen2")["layers.0.q.weight"]).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_equals_that_of_the_safetensors(tmp_path: Path, variant: str):
    tiny = tiny_model(variant)
    expected = ModelConfig.from_hf(tiny.config, tiny.generation_config)
    config = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", variant)).config
    assert set(config.eos_token_ids) == set(expected.eos_token_ids)
    config = dataclasses.replace(config, eos_token_ids=expected.eos_token_ids)
    if variant == "llama3_rope":  # the same scaling, as one number for each frequency
        frequencies = inverse_frequencies(config.rope, config.head_dim)
        np.testing.assert_allclose(frequencies, inverse_frequencies(expected.rope, config.head_dim), rtol=2e-7)
        factors = config.rope.freq_factors
        assert factors is not None and factors[0] == 1 and factors[-1] == 8 and len(factors) == 16
        assert config.rope == RopeConfig(theta=5e5, freq_factors=factors)
        config = dataclasses.replace(config, rope=expected.rope)
    assert config == expected


@pytest.mark.parametrize("kind", [QuantType.F16, QuantType.BF16])
def test_float_types_are_read_without_a_note(tmp_path: Path, kind: QuantType):
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama", matrix_type=kind))
    assert source.tensors["layers.0.q.weight"].dtype == kind.name
    assert_reads_exactly(source, hf_tensors("llama"))


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        *((variant, QuantType.F32) for variant in VARIANTS if variant != "llama3_rope"),
        # Rows of smollm2 (72) are no multiple of 32.
        *((variant, QuantType.Q8_0) for variant in VARIANTS if variant not in ("llama3_rope", "smollm2")),
    ],
)
def test_packed_weights_equal_those_of_the_safetensors(tmp_path: Path, variant: str, kind: QuantType):
    """All that is streamed is equal bit for bit, and the config too: so are the logits."""
    group = 32 if kind == QuantType.Q8_0 else 128
    hf, source = (
        open_hf(write_tiny(tmp_path / "hf", variant)),
        write_tiny_gguf(tmp_path / "m.gguf", variant, matrix_type=kind),
    )
    convert(hf, tmp_path / "a", group=group, progress=False)
    convert(open_gguf(source), tmp_path / "b", group=128, progress=False)
    assert_same_weights(tmp_path / "a", tmp_path / "b")


def test_names_go_both_ways():
    config = open_config(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
    for name in expected_tensors(config):
        assert canonical_from_gguf(gguf_from_canonical(name)) == name
    for other in ("blk.0.attn_qkv.weight", "blk.00.attn_q.weight", "output.bias", "blk.0.ffn_gate_exps.weight"):
        assert canonical_from_gguf(other) is None


def open_config(**changes: bool) -> ModelConfig:
    tiny = tiny_model("llama")
    return dataclasses.replace(ModelConfig.from_hf(tiny.config, None), **changes)


# Quantised types


@pytest.mark.parametrize("variant", ["llama", "llama_head_dim", "qwen3_untied"])
def test_q8_0_is_carried_over_bit_for_bit(tmp_path: Path, variant: str):
    """Scales that are no powers of two, so that requantising would show."""
    tiny = tiny_model(variant)
    rng = np.random.default_rng(1)
    for tensor in tiny.tensors.values():
        if tensor.ndim == 2:
            tensor *= rng.uniform(0.3, 3.0, (tensor.shape[0], 1)).astype(np.float32)
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", variant, matrix_type=QuantType.Q8_0, tiny=tiny))
    assert source.notes == []
    matrices = [name for name, info in source.tensors.items() if info.q8_group == 32]
    assert len(matrices) == 7 * source.config.num_layers + 2
    for hf_name, tensor in tiny.tensors.items():
        name = canonical_from_hf(hf_name)
        assert name is not None
        read = source.read(name)
        if tensor.ndim == 1:
            np.testing.assert_array_equal(read, tensor)
            continue
        n, k = tensor.shape
        blocks = gguf.quantize(tensor, QuantType.Q8_0).reshape(n, k // 32, 34)  # of the rows in plain order
        assert isinstance(read, Q8Matrix) and read.group == 32 and read.k == k
        np.testing.assert_array_equal(read.values, blocks[:, :, 2:].reshape(n, k).view(np.int8), err_msg=name)
        bits = read.scales.T.astype(np.float16, order="C").view(np.uint8).reshape(n, k // 32, 2)
        np.testing.assert_array_equal(bits, blocks[:, :, :2], err_msg=name)
        assert (read.scales.astype(np.float16) == read.scales).all()


def test_q8_0_of_the_tiny_weights_is_what_quantising_at_32_gives(tmp_path: Path):
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama", matrix_type=QuantType.Q8_0))
    for name, tensor in hf_tensors("llama").items():
        if tensor.ndim == 2:
            read, expected = source.read(name), quantize(tensor, 32)
            assert isinstance(read, Q8Matrix)
            np.testing.assert_array_equal(read.values, expected.values)
            np.testing.assert_array_equal(read.scales, expected.scales)
            np.testing.assert_array_equal(dequantize(read), tensor)


@pytest.mark.parametrize("kind", [QuantType.Q4_0, QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1])
def test_other_types_are_dequantised_with_one_note(tmp_path: Path, kind: QuantType):
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "llama", matrix_type=kind))
    assert source.notes == [f"tensors stored as {kind.name} (23 of 30) are dequantised, and quantised again to Q8"]
    for name, tensor in hf_tensors("llama").items():
        read = source.read(name)
        assert isinstance(read, np.ndarray) and read.dtype == np.float32 and read.shape == tensor.shape
        if tensor.ndim == 2:
            # Rows out of order would be off by far more than rounding to 4 bits is.
            assert np.abs(read - tensor).mean() < 0.3 * np.abs(tensor).mean(), name


def test_k_quants_and_mixed_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Q6_K: -32 where all bits are 0, 31 where all are 1, times one of 16 scales, times the scale of the block."""
    monkeypatch.setitem(
        VARIANTS, "wide", {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    )
    rows = np.zeros((256, 210), np.uint8)  # 128 low nibbles, 64 high bits, 16 int8 scales, float16
    rows[1::2, :192] = 255
    rows[:, 192:208] = np.arange(1, 17)
    rows[:, 208:] = np.array([0.25], np.float16).view(np.uint8)

    def edit(writer: gguf.GGUFWriter) -> None:
        del writer.tensors[-1]["blk.0.ffn_up.weight"]
        writer.add_tensor("blk.0.ffn_up.weight", rows, raw_dtype=QuantType.Q6_K)

    types = {"blk.0.ffn_down.weight": QuantType.Q4_1, "blk.0.ffn_gate.weight": QuantType.Q8_0}
    source = open_gguf(write_tiny_gguf(tmp_path / "m.gguf", "wide", type_of=types, edit=edit))
    assert [note.split(")")[0] for note in source.notes] == [
        "tensors stored as Q6_K (1 of 12",
        "tensors stored as Q4_1 (1 of 12",
    ]
    up = source.read("layers.0.up.weight")
    assert isinstance(up, np.ndarray)
    scales = np.repeat(np.arange(1, 17) * 0.25, 16).astype(np.float32)
    np.testing.assert_array_equal(up[0], -32 * scales)
    np.testing.assert_array_equal(up[1], 31 * scales)


# Split files


def test_split_file(tmp_path: Path):
    first = write_tiny_gguf(tmp_path / "m.gguf", "qwen3", split_tensors=9)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 4 and first == parts[0]
    for path in (parts[0], parts[2]):
        source = open_gguf(path)
        assert {info.file for info in source.tensors.values()} == set(parts)
        for name, tensor in hf_tensors("qwen3").items():
            np.testing.assert_array_equal(source.read(name), tensor)

    renamed = tmp_path / "renamed.gguf"
    shutil.copy(first, renamed)
    with pytest.raises(CheckpointError, match=r"renamed\.gguf is one of 4 parts .* NAME-00001-of-00004\.gguf"):
        open_gguf(renamed)
    shutil.copy(parts[1], parts[2])
    with pytest.raises(CheckpointError, match=r"00003-of-00004\.gguf says that it is part 1 .* expected 2 of 4"):
        open_gguf(first)
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"00003-of-00004\.gguf does not exist; expected all 4 parts"):
        open_gguf(first)


# A real file


def test_smollm2(smollm2_gguf: Path):
    source = open_gguf(smollm2_gguf)
    assert source.config == ModelConfig(
        family="llama",
        num_layers=30,
        hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=49152,
        max_positions=8192,
        rms_norm_eps=1e-5,
        tied_embeddings=True,
        rope=RopeConfig(theta=1e5),
        bos_token_id=1,
        eos_token_ids=(2, 0),
    )
    assert source.notes == ["tensors stored as Q4_1 (210 of 272) are dequantised, and quantised again to Q8"]
    reader = gguf.GGUFReader(smollm2_gguf)
    stored = {t.name: t for t in reader.tensors}
    assert {info.stored_name for info in source.tensors.values()} == set(stored)

    embed = source.read("embed.weight")
    assert isinstance(embed, Q8Matrix)
    token_embd = stored["token_embd.weight"]
    np.testing.assert_array_equal(dequantize(embed), gguf.dequantize(token_embd.data, token_embd.tensor_type))
    down, q = source.read("layers.29.down.weight"), source.read("layers.7.q.weight")
    assert isinstance(down, np.ndarray) and isinstance(q, np.ndarray)
    ffn_down, attn_q = stored["blk.29.ffn_down.weight"], stored["blk.7.attn_q.weight"]
    np.testing.assert_array_equal(down, gguf.dequantize(ffn_down.data, ffn_down.tensor_type))
    interleaved = gguf.dequantize(attn_q.data, attn_q.tensor_type)
    for head in (0, 8):
        np.testing.assert_array_equal(q[head * 64 : head * 64 + 32], interleaved[head * 64 : head * 64 + 64 : 2])
        np.testing.assert_array_equal(
            q[head * 64 + 32 : head * 64 + 64], interleaved[head * 64 + 1 : head * 64 + 64 : 2]
        )


@pytest.mark.slow
def test_smollm2_as_safetensors_is_the_same_model(smollm2_gguf: Path, tmp_path: Path):
    source = open_gguf(smollm2_gguf)
    tensors = {}
    for name in source.tensors:
        values = source.read(name)
        tensors[hf_from_canonical(name)] = dequantize(values) if isinstance(values, Q8Matrix) else values
    hf = tmp_path / "hf"
    hf.mkdir()
    write_safetensors(hf / "model.safetensors", tensors)
    config = {
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": [0, 2],
    }
    (hf / "config.json").write_text(json.dumps(config))
    convert(open_hf(hf), tmp_path / "a", group=32, progress=False)
    convert(source, tmp_path / "b", group=32, progress=False)
    assert_same_weights(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b" / "tokenizer.json").exists()
    (ids, logits), (expected_ids, expected) = two_tokens(tmp_path / "b"), two_tokens(tmp_path / "a")
    assert ids == expected_ids
    np.testing.assert_array_equal(logits, expected)


def two_tokens(path: Path) -> tuple[list[int], np.ndarray]:
    """Ids and logits [2, V] after a short prompt, of which every layer is streamed."""
    rows: list[np.ndarray] = []
    with LanguageModel(open_packed(path), None, keep=1, context=64, progress=False) as model:
        answer = model.generate(
            [1, 504, 3575], max_new_tokens=2, ignore_stop=True, on_logits=lambda r: rows.append(r.copy())
        )
        answer.finish()
    return answer.token_ids, np.stack(rows)
