"""Packed directories: what was written comes back, and whatever changed since is named."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from packed_dirs import pack_tiny
from safetensors.numpy import load_file
from tiny import write_tiny
from tiny_tokenizers import byte_level_json

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.packed import VERSION, head_shapes, is_packed, manifest_digest, open_packed
from vramjax.errors import CheckpointError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("packed")
    source = write_tiny(root / "m", "llama_bias")
    (source / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    return convert(open_hf(source), root / "packed", progress=False)


@pytest.fixture
def packed(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "packed"))


def refuses(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_packed(path)
    assert "\n" not in str(caught.value)


def edit_manifest(path: Path, **updates) -> None:
    """A manifest as a conversion would have written it: its digest is right."""
    manifest = json.loads((path / "vramjax.json").read_text()) | updates
    (path / "vramjax.json").write_text(json.dumps(manifest | {"digest": manifest_digest(manifest)}))


def test_arrays_are_those_on_disk(packed: Path):
    opened = open_packed(packed)
    for i in range(opened.config.num_layers):
        arrays = opened.load_layer(i)
        assert {n: (a.shape, a.dtype) for n, a in arrays.items()} == opened.layout.shapes
        assert list(arrays) == ["qkv", "o", "gate_up", "down", "params"]
        for name, array in load_file(packed / f"layer-{i:05d}.safetensors").items():
            np.testing.assert_array_equal(arrays[name], array)
        assert sum(a.nbytes for a in arrays.values()) == opened.layer_nbytes
    head = opened.load_head()
    assert {n: (a.shape, a.dtype) for n, a in head.items()} == head_shapes(opened.config, opened.groups)
    assert sum(a.nbytes for a in head.values()) == opened.head_nbytes


def test_head_of_a_tied_model_has_no_lm_head(tmp_path: Path):
    opened = pack_tiny(tmp_path, "smollm2")
    assert set(opened.load_head()) == {"embed", "embed_scales", "final_norm"}
    assert set(opened.groups) == {"qkv", "o", "gate_up", "down", "embed"}
    assert opened.load_head()["embed"].shape == (192, 128)  # vocabulary 150, hidden 72


def test_threads_read_the_same(packed: Path):
    opened = open_packed(packed)
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(opened.load_layer, [0, 1, 0, 1, 0, 1]))
    for i, arrays in enumerate(loaded):
        assert all((arrays[name] == loaded[i % 2][name]).all() for name in arrays)


def test_a_layer_is_read_into_memory_that_is_given(packed: Path):
    opened = open_packed(packed)
    arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in opened.layout.shapes.items()}
    for layer_idx in (1, 0, 1):
        opened.will_need_layer(layer_idx)
        opened.read_layer_into(layer_idx, arrays, drop_pages=True)
        for name, array in opened.load_layer(layer_idx).items():
            np.testing.assert_array_equal(arrays[name], array)
    (packed / "layer-00001.safetensors").write_bytes(b"")
    opened.read_layer_into(0, arrays)
    with pytest.raises(CheckpointError, match=r"layer-00001\.safetensors has 0 bytes and had"):
        opened.read_layer_into(1, arrays)


def test_is_packed(packed: Path, tmp_path: Path):
    assert is_packed(packed)
    assert not is_packed(tmp_path)
    assert not is_packed(packed.rename(tmp_path / ".x.partial-7"))
    for name in ("x.partial-7", ".x.partial-a", ".x.partial-7b"):
        shutil.copytree(tmp_path / ".x.partial-7", tmp_path / name)
        assert is_packed(tmp_path / name) and open_packed(tmp_path / name)


def test_no_packed_directory(tmp_path: Path):
    refuses(tmp_path, r"has no vramjax\.json")
    refuses(tmp_path / "absent", r"has no vramjax\.json")


@pytest.mark.parametrize(
    "name", ["layer-00001.safetensors", "head.safetensors", "tokenizer.json", "generation_config.json"]
)
def test_missing_and_resized_files(packed: Path, name: str):
    path = packed / name
    size = path.stat().st_size
    with path.open("ab") as file:
        file.truncate(size - 1)
    refuses(packed, f"{name} has {size - 1} bytes; expected {size}")
    path.unlink()
    refuses(packed, f"{name} is missing")


@pytest.mark.parametrize("position", [0, 20, 5000, -1])
def test_a_changed_byte_is_found_on_the_first_read(packed: Path, position: int):
    path = packed / "layer-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    opened = open_packed(packed)
    opened.load_layer(0)
    for _ in range(2):  # what failed once is not taken as checked
        with pytest.raises(CheckpointError, match=r"layer-00001\.safetensors"):
            opened.load_layer(1)


def test_a_changed_text_file_is_found_on_opening(packed: Path):
    content = (packed / "tokenizer.json").read_bytes()
    (packed / "tokenizer.json").write_bytes(bytes([content[0] ^ 1]) + content[1:])
    refuses(packed, r"tokenizer\.json has SHA-256 .*; expected .*: it changed since it was written")


def test_the_head_of_another_model(packed: Path, tmp_path: Path):
    other = pack_tiny(tmp_path, "llama", group=32).path
    shutil.copy(other / "head.safetensors", packed / "head.safetensors")
    files = json.loads((packed / "vramjax.json").read_text())["files"]
    files["head.safetensors"] = json.loads((other / "vramjax.json").read_text())["files"]["head.safetensors"]
    edit_manifest(packed, files=files)
    with pytest.raises(
        CheckpointError, match=r"head\.safetensors: embed is int8 \[192, 64\]; expected int8 \[192, 128"
    ):
        open_packed(packed).load_head()


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (
            {"version": 1},
            f"'vramjax-q8' version 1; expected 'vramjax-q8' version {VERSION}: convert",
        ),
        ({"format": "other"}, f"'other' version {VERSION}; expected"),
        ({"config": {}}, "lacks"),
        ({"config": None}, "a stored ModelConfig is None"),
        ({"groups": {"qkv": 128}}, "expected qkv, o, gate_up, down, embed, head"),
        ({"groups": None}, "is damaged"),
        ({"files": {}}, r"does not list head\.safetensors"),
        ({"files": {"head.safetensors": 3}}, "is damaged"),
        ({"files": {"head.safetensors": {"bytes": float("inf"), "sha256": ""}}}, "is damaged"),
    ],
)
def test_unusable_manifest(packed: Path, updates: dict, message: str):
    edit_manifest(packed, **updates)
    refuses(packed, message)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ({"eos_token_ids": [[1]]}, r"eos_token_ids is \(\[1\],\)"),
        ({"eos_token_ids": 1}, "is damaged"),
        ({"bos_token_id": "1"}, "bos_token_id is '1'"),
        ({"qkv_bias": 1}, "qkv_bias is 1; expected true or false"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None"),
        ({"num_layers": 10**9}, "num_layers is 1000000000"),
        ({"num_layers": 1}, r"lists layer-00001\.safetensors, which a model of 1 layers does not use"),
        ({"num_layers": 3}, r"does not list layer-00002\.safetensors"),
    ],
)
def test_unusable_config_in_a_manifest(packed: Path, updates: dict, message: str):
    config = json.loads((packed / "vramjax.json").read_text())["config"]
    edit_manifest(packed, config=config | updates)
    refuses(packed, message)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"num_layers": 2', '"num_layers": 1'),
        ('"theta": ', '"theta": 1'),
        ('"rms_norm_eps": ', '"rms_norm_eps": 1'),
        ('"notes": [', '"notes": ["edited"'),
        ('"digest": "', '"digest": "0'),
    ],
)
def test_an_edited_manifest_is_refused(packed: Path, before: str, after: str):
    text = (packed / "vramjax.json").read_text()
    assert before in text
    (packed / "vramjax.json").write_text(text.replace(before, after))
    refuses(packed, r"vramjax\.json has digest .*; expected .*: it changed since it was written")


def test_the_digest_is_that_of_the_model_not_of_the_text(packed: Path, tmp_path: Path):
    digest = open_packed(packed).digest
    assert re.fullmatch("[0-9a-f]{64}", digest)
    manifest = json.loads((packed / "vramjax.json").read_text())
    (packed / "vramjax.json").write_text(json.dumps(dict(reversed(manifest.items()))))
    assert open_packed(packed).digest == digest
    edit_manifest(packed, notes=["another"])
    assert open_packed(packed).digest != digest


def test_a_manifest_does_not_reach_outside(packed: Path):
    files = json.loads((packed / "vramjax.json").read_text())["files"]
    edit_manifest(packed, files=files | {"../secret": {"bytes": 1, "sha256": ""}})
    refuses(packed, r"lists '\.\./secret'; expected a file beside it")


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00", "[" * 100_000, '{"a":' * 100_000])
def test_manifest_that_is_no_json(packed: Path, content: str):
    (packed / "vramjax.json").write_text(content)
    refuses(packed, r"vramjax\.json is not readable")


def test_groups_that_do_not_exist(packed: Path):
    groups = json.loads((packed / "vramjax.json").read_text())["groups"]
    edit_manifest(packed, groups=groups | {"qkv": 48})
    refuses(packed, "has groups")
