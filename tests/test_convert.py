"""Converting: exact where it can be, of a size that is known beforehand, bounded in memory."""

from __future__ import annotations

import io
import json
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from fake_source import FakeSource, small_config
from packed_dirs import assert_intact, assert_nothing_left
from rich.console import Console
from safetensors.numpy import load_file
from tiny import VARIANTS, tiny_model, write_tiny
from tiny_tokenizers import byte_level_json

from vramjax import progress
from vramjax.checkpoint import convert as convert_module
from vramjax.checkpoint.convert import choose_groups, convert, packed_bytes
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.names import canonical_from_hf, expected_tensors
from vramjax.checkpoint.packed import open_packed
from vramjax.checkpoint.source import Source
from vramjax.layout import PARTS
from vramjax.quantize import Q8Matrix, dequantize, quantize


def unpack(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a packed directory in float32, by vramjax's name, read with the safetensors library."""
    packed = open_packed(path)
    config = packed.config
    heads, kv, Hd, F = config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size
    rows = {"q": heads * Hd, "k": kv * Hd, "v": kv * Hd, "gate": F, "up": F}
    rows |= {"o": config.hidden_size, "down": config.hidden_size}
    tensors = {}
    for i in range(config.num_layers):
        arrays = load_file(path / f"layer-{i:05d}.safetensors")
        params = arrays["params"]

        def param(name: str, params=params) -> np.ndarray | None:
            entry = packed.layout.param(name)
            return None if entry is None else params[entry.offset : entry.stop].reshape(entry.shape)

        for name, spec in packed.layout:
            scales = param(f"{name}_scales")
            assert scales is not None
            whole = dequantize(Q8Matrix(values=arrays[name], scales=scales, k=spec.k, group=spec.group))
            bias = param(f"{name}_bias")
            row = 0
            for part in PARTS[name]:
                tensors[f"layers.{i}.{part}.weight"] = whole[row : row + rows[part]]
                if bias is not None:
                    tensors[f"layers.{i}.{part}.bias"] = bias[row : row + rows[part]]
                row += rows[part]
            assert not whole[row:].any() and (bias is None or not bias[row:].any())
        for norm in ("input_norm", "post_norm", "q_norm", "k_norm"):
            if (values := param(norm)) is not None:
                tensors[f"layers.{i}.{norm}.weight"] = values
    head = load_file(path / "head.safetensors")
    for name in ("embed", "head"):
        if name in head:
            q8 = Q8Matrix(
                values=head[name],
                scales=head[f"{name}_scales"],
                k=config.hidden_size,
                group=packed.groups[name],
            )
            tensors[f"{name}.weight"] = dequantize(q8)[: config.vocab_size]
    return tensors | {"final_norm.weight": head["final_norm"]}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [32, 128])
def test_every_tensor_survives_exactly(tmp_path: Path, variant: str, group: int):
    # The tiny weights are exact in Q8, so that nothing may change at all.
    source = open_hf(write_tiny(tmp_path / "m", variant, dtype="bfloat16", shards=2))
    assert convert(source, tmp_path / "packed", group=group, progress=False) == tmp_path / "packed"
    tensors = unpack(tmp_path / "packed")
    stored = {canonical_from_hf(name): t for name, t in tiny_model(variant).tensors.items()}
    assert set(tensors) == set(source.tensors)
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, stored[name], err_msg=name)
    packed = open_packed(tmp_path / "packed")
    assert packed.config == source.config and packed.notes == source.notes
    assert set(packed.groups.values()) == {group}
    assert_intact(tmp_path / "packed")
    assert_nothing_left(tmp_path, "m", "packed")


@pytest.mark.parametrize("dtype", ["float32", "float16", "mixed"])
def test_the_same_weights_give_the_same_bytes(tmp_path: Path, dtype: str):
    for name, dtype_of, shards in (("a", "bfloat16", 1), ("b", dtype, 3)):
        source = open_hf(write_tiny(tmp_path / f"m{name}", "qwen2", dtype=dtype_of, shards=shards))
        convert(source, tmp_path / name, progress=False)
    for path in (tmp_path / "a").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_rounding_is_that_of_quantize(tmp_path: Path):
    source = FakeSource(small_config(hidden_size=72, head_dim=18))
    tensors = unpack(convert(source, tmp_path / "packed", group=32, progress=False))
    for name, values in tensors.items():
        raw = source.read(name)
        assert isinstance(raw, np.ndarray)
        expected = dequantize(quantize(raw, 32)) if raw.ndim == 2 else raw
        np.testing.assert_array_equal(values, expected)


def test_q8_is_carried_over_exactly_with_its_group(tmp_path: Path):
    config = small_config()
    rng = np.random.default_rng(0)

    def random_q8(rows: int, k: int) -> Q8Matrix:
        return Q8Matrix(
            values=rng.integers(-128, 128, (rows, k)).astype(np.int8),  # -128 too: not ours to change
            scales=rng.random((k // 32, rows), np.float32),
            k=k,
            group=32,
        )

    shapes = expected_tensors(config)
    names = ("layers.1.k.weight", "layers.0.down.weight", "embed.weight")
    source = FakeSource(config, q8={name: random_q8(*shapes[name]) for name in names})
    expected = {"qkv": 32, "o": 128, "gate_up": 128, "down": 32, "embed": 32, "head": 128}
    assert choose_groups(source, 128) == expected
    tensors = unpack(convert(source, tmp_path / "packed", progress=False))
    assert open_packed(tmp_path / "packed").groups == expected
    for name in names:
        np.testing.assert_array_equal(tensors[name], dequantize(source.q8[name]))
    for name, group in (("layers.1.q.weight", 32), ("layers.0.k.weight", 32), ("layers.1.o.weight", 128)):
        raw = source.read(name)
        assert isinstance(raw, np.ndarray)
        np.testing.assert_array_equal(tensors[name], dequantize(quantize(raw, group)))


def test_text_files_and_provenance(tmp_path: Path):
    directory = write_tiny(tmp_path / "m", "llama", dtype="mixed")
    (directory / "tokenizer.json").write_text(byte_level_json(), encoding="utf-8")
    convert(open_hf(directory), tmp_path / "packed", progress=False)
    assert (tmp_path / "packed" / "tokenizer.json").read_text("utf-8") == byte_level_json()
    manifest = json.loads((tmp_path / "packed" / "vramjax.json").read_text())
    assert manifest["source"] == {"name": "m", "dtypes": ["BF16", "F16", "F32"]}
    assert set(manifest["files"]) == {p.name for p in (tmp_path / "packed").iterdir()} - {"vramjax.json"}


def test_notes_are_kept(tmp_path: Path):
    convert(FakeSource(small_config()), tmp_path / "packed", progress=False)
    assert open_packed(tmp_path / "packed").notes == ["a note"]


def test_an_empty_directory_and_absent_parents_are_fine(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    convert(FakeSource(small_config()), tmp_path / "link", progress=False)
    convert(FakeSource(small_config()), tmp_path / "a" / "b" / "c", progress=False)
    assert open_packed(tmp_path / "empty").config == open_packed(tmp_path / "a" / "b" / "c").config


def test_sizes_are_known_beforehand(tmp_path: Path):
    source: Source = FakeSource(small_config())
    groups = choose_groups(source, 64)
    packed = open_packed(convert(source, tmp_path / "packed", group=64, progress=False))
    assert packed_bytes(source, groups) == 3 * packed.layer_nbytes + packed.head_nbytes
    on_disk = sum(p.stat().st_size for p in (tmp_path / "packed").glob("*.safetensors"))
    assert 0 <= on_disk - packed_bytes(source, groups) < 4 * 1024


def test_memory_is_bounded_by_one_matrix_not_by_the_model(tmp_path: Path):
    config = small_config(num_layers=4, hidden_size=512, intermediate_size=1536, head_dim=128, vocab_size=8192)
    source = FakeSource(config)
    convert(source, tmp_path / "warm", progress=False)
    largest_f32 = config.vocab_size * config.hidden_size * 4  # 16 MiB
    whole_f32 = sum(int(np.prod(info.shape)) for info in source.tensors.values()) * 4
    tracemalloc.start()
    try:
        convert(source, tmp_path / "packed", progress=False)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # One tensor in float32, its Q8 form, and the temporaries of a few blocks of 4 MiB in up to 8 threads.
    blocks = min(8, convert_module.os.cpu_count() or 1) * 6 * (4 << 20)
    assert peak < largest_f32 * 1.3 + blocks, (peak, largest_f32)
    assert whole_f32 > 4 * largest_f32


def test_a_conversion_shows_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seen = []

    @contextmanager
    def fake_bar(description, *, total, unit="bytes", enabled=True):
        yield seen.append
        assert (description, enabled, unit) == ("Converting fake", True, "bytes")
        assert 0.99 * total <= sum(seen) <= total

    monkeypatch.setattr(convert_module, "progress_bar", fake_bar)
    convert(FakeSource(small_config()), tmp_path / "packed")
    assert len(seen) > 10


def test_a_bar_shows_a_name_as_it_is(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=terminal, force_terminal=True, width=80))
    with progress.progress_bar("Converting [red]model", total=1) as advance:
        advance(1)
    assert "Converting [red]model" in terminal.getvalue()
