"""Converting: exact where it can be, atomic always, bounded in memory and disk."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from packed_dirs import assert_intact
from safetensors.numpy import load_file
from tiny import VARIANTS, tiny_model, write_model, write_tiny

from vramjax.checkpoint import convert as convert_module
from vramjax.checkpoint.convert import choose_groups, convert, packed_bytes
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.names import canonical_from_hf, expected_tensors
from vramjax.checkpoint.packed import open_packed
from vramjax.checkpoint.source import Source, TensorInfo
from vramjax.config import ModelConfig
from vramjax.errors import BudgetError, CheckpointError, ConfigError
from vramjax.layout import PARTS
from vramjax.quantize import Q8Matrix, dequantize, quantize


class FakeSource:
    """A checkpoint in memory. `q8` are stored as Q8; reading `fail_at` raises `failure`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        q8: dict[str, Q8Matrix] | None = None,
        fail_at: str = "",
        failure: BaseException | None = None,
    ) -> None:
        self.path = Path("fake")
        self.config = config
        self.notes = ["a note"]
        self.q8 = q8 or {}
        self.fail_at, self.failure = fail_at, failure
        self.tensors = {
            name: TensorInfo(
                name=name,
                stored_name=name,
                shape=shape,
                dtype="F32",
                file=self.path,
                q8_group=self.q8[name].group if name in self.q8 else None,
            )
            for name, shape in expected_tensors(config).items()
        }

    def read(self, name: str) -> np.ndarray | Q8Matrix:
        if name == self.fail_at and self.failure is not None:
            raise self.failure
        if name in self.q8:
            return self.q8[name]
        rng = np.random.default_rng(sum(name.encode()))
        return rng.standard_normal(self.tensors[name].shape, np.float32)

    def write_text_files(self, dst: Path) -> None:
        (dst / "tokenizer.json").write_text("{}")


def small_config(**updates) -> ModelConfig:
    config = ModelConfig.from_hf(tiny_model("llama").config | {"vocab_size": 150, "max_position_embeddings": 128}, None)
    return dataclasses.replace(config, **updates)


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


def assert_nothing_left(tmp_path: Path, *allowed: str) -> None:
    assert {p.name for p in tmp_path.iterdir()} <= set(allowed)


# --- What comes out ---


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
    (directory / "tokenizer.json").write_text('{"a": 1}')
    convert(open_hf(directory), tmp_path / "packed", progress=False)
    assert (tmp_path / "packed" / "tokenizer.json").read_text() == '{"a": 1}'
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


# --- What must not happen ---


def test_a_taken_destination_is_not_touched(tmp_path: Path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "precious").write_text("x")
    (tmp_path / "file").write_text("y")
    for dst in (taken, tmp_path / "file"):
        with pytest.raises(CheckpointError, match=f"{dst} exists already; expected a new path"):
            convert(FakeSource(small_config()), dst, progress=False)
    assert (taken / "precious").read_text() == "x" and (tmp_path / "file").read_text() == "y"
    assert_nothing_left(tmp_path, "taken", "file")


@pytest.mark.parametrize("fail_at", ["layers.0.q.weight", "layers.2.down.weight", "head.weight", "final_norm.weight"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("a bug"), CheckpointError("damaged")])
def test_interruptions_leave_nothing(tmp_path: Path, fail_at: str, failure: BaseException):
    source = FakeSource(small_config(), fail_at=fail_at, failure=failure)
    with pytest.raises(type(failure)):
        convert(source, tmp_path / "packed", progress=False)
    assert_nothing_left(tmp_path)
    source.fail_at = ""
    assert_intact(convert(source, tmp_path / "packed", progress=False))


@pytest.mark.parametrize("step", ["mkdir", "rename"])
def test_interruptions_at_the_ends_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    def interrupted(*args):
        raise KeyboardInterrupt

    if step == "mkdir":
        monkeypatch.setattr(convert_module, "_write_all", interrupted)
    else:
        monkeypatch.setattr(convert_module.os, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(FakeSource(small_config()), tmp_path / "packed", progress=False)
    assert_nothing_left(tmp_path)


def test_a_bad_weight_is_named_and_leaves_nothing(tmp_path: Path):
    tiny = tiny_model("llama")
    tiny.tensors["model.layers.2.mlp.up_proj.weight"][3, 7] = np.nan
    source = open_hf(write_model(tmp_path / "m", tiny))
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.up_proj\.weight in .*safetensors has nan at \[3, 7\]"):
        convert(source, tmp_path / "packed", progress=False)
    assert_nothing_left(tmp_path, "m")


KILLED = """
import sys, time
from pathlib import Path
from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
source = open_hf(Path(sys.argv[1]))
read = source.read
def slow(name):
    if name == "final_norm.weight":
        print("now", flush=True)
        time.sleep(60)
    return read(name)
source.read = slow
convert(source, Path(sys.argv[2]), progress=False)
"""


def test_what_a_killed_process_left_never_loads_and_is_cleared(tmp_path: Path):
    source = open_hf(write_tiny(tmp_path / "m", "llama"))
    dst = tmp_path / "packed"
    child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "m", dst], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None and child.stdout.readline() == "now\n"
        with pytest.raises(CheckpointError, match=f"another process is writing {dst}"):
            convert(source, dst, progress=False)
        child.kill()
    left = next(tmp_path.glob(".packed.partial-*"))
    assert not dst.exists()
    with pytest.raises(CheckpointError, match="what an interrupted conversion left"):
        open_packed(left)
    convert(source, dst, progress=False)
    assert_intact(dst)
    assert_nothing_left(tmp_path, "m", "packed")


def test_a_complete_directory_that_was_not_renamed_does_not_load(tmp_path: Path):
    convert(FakeSource(small_config()), tmp_path / "packed", progress=False)
    (tmp_path / "packed").rename(tmp_path / ".packed.partial-1")
    with pytest.raises(CheckpointError, match="what an interrupted conversion left"):
        open_packed(tmp_path / ".packed.partial-1")


def test_two_processes_do_not_write_the_same(tmp_path: Path):
    with (tmp_path / ".packed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing"):
            convert(FakeSource(small_config()), tmp_path / "packed", progress=False)
    convert(FakeSource(small_config()), tmp_path / "packed", progress=False)  # a lock of the dead does not hold
    assert_nothing_left(tmp_path, "packed")


def test_what_another_process_finished_is_taken(tmp_path: Path):
    dst = convert(FakeSource(small_config()), tmp_path / "packed", progress=False)
    late = FakeSource(small_config(), fail_at="layers.0.q.weight", failure=AssertionError("work was done"))
    assert convert(late, dst, progress=False, wait=True) == dst
    with pytest.raises(CheckpointError, match="exists already"):
        convert(late, dst, progress=False)


@pytest.mark.parametrize("name", ["out[1]", "*", "x.partial-1", "out.partial-", ".hidden", "a\nb"])
def test_any_name_will_do_and_only_its_own_leftovers_are_cleared(tmp_path: Path, name: str):
    others = {".out1.partial-7", ".xy.partial-7", ".x.partial-7", ".out.partial-7", f"{name}.partial-7"}
    for other in [*others, f".{name}.partial-7"]:
        (tmp_path / other).mkdir()
    assert_intact(convert(FakeSource(small_config()), tmp_path / name, progress=False))
    assert {p.name for p in tmp_path.iterdir()} == others | {name}


def test_a_name_that_is_kept_for_unfinished_conversions(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"\.x\.partial-7 has a name that is kept for unfinished conversions"):
        convert(FakeSource(small_config()), tmp_path / ".x.partial-7", progress=False)
    assert_nothing_left(tmp_path)


def test_all_is_on_disk_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced = []
    fsync, rename = os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked_rename(partial: Path, dst: Path) -> None:
        assert {path.stat().st_ino for path in [partial, *partial.iterdir()]} <= set(synced)
        synced.clear()
        rename(partial, dst)

    monkeypatch.setattr(convert_module.os, "fsync", recording_fsync)
    monkeypatch.setattr(convert_module.os, "rename", checked_rename)
    convert(FakeSource(small_config()), tmp_path / "packed", progress=False)
    assert synced == [tmp_path.stat().st_ino]


def test_a_group_that_does_not_exist(tmp_path: Path):
    with pytest.raises(ConfigError, match="group is 48; expected one of 32, 64, 128"):
        convert(FakeSource(small_config()), tmp_path / "packed", group=48, progress=False)


def test_a_destination_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(FakeSource(small_config()), tmp_path / "file" / "packed", progress=False)


# --- Budgets ---


def test_a_full_disk_is_seen_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 10 << 20))
    source = FakeSource(small_config(), fail_at="layers.0.q.weight", failure=AssertionError("work was done"))
    with pytest.raises(BudgetError, match=r"needs \d+\.\d MiB of disk; there are 10\.0 MiB free"):
        convert(source, tmp_path / "packed", progress=False)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, number: int):
    failure = OSError(number, os.strerror(number))
    source = FakeSource(small_config(), fail_at="layers.2.q.weight", failure=failure)
    with pytest.raises(
        BudgetError, match=rf"{tmp_path}/packed cannot be written \({failure.strerror}\); expected room"
    ):
        convert(source, tmp_path / "packed", progress=False)
    assert_nothing_left(tmp_path)


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
