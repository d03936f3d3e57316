"""Converting: all or nothing, whatever is in the way, interrupts it or fills the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fake_source import FakeSource, small_config
from packed_dirs import assert_intact, assert_nothing_left
from tiny import tiny_model, write_model, write_tiny
from tiny_gguf import write_tiny_gguf

from vramjax.checkpoint import convert as convert_module
from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.gguf import open_gguf
from vramjax.checkpoint.hf import HfSource, open_hf
from vramjax.checkpoint.packed import open_packed
from vramjax.errors import BudgetError, CheckpointError, ConfigError, TextError


def test_a_taken_destination_is_not_touched(tmp_path: Path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "precious").write_text("x")
    (tmp_path / "file").write_text("y")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for dst in (taken, tmp_path / "file", tmp_path / "loop"):
        with pytest.raises(CheckpointError, match=f"{dst} exists already; expected a new path"):
            convert(FakeSource(small_config()), dst, progress=False)
    assert (taken / "precious").read_text() == "x" and (tmp_path / "file").read_text() == "y"
    assert_nothing_left(tmp_path, "taken", "file", "loop")


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


@pytest.mark.parametrize("change", [os.replace, lambda other, file: file.unlink()])
def test_a_checkpoint_that_changes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path, Path], None]
):
    """A file in the place of another one has the same names and sizes, and other weights."""
    source = open_hf(write_tiny(tmp_path / "m", "llama", shards=2))
    file = source.tensors["layers.1.q.weight"].file
    other = Path(shutil.copy(file, tmp_path / "other"))
    read = HfSource.read

    def read_and_change(self: HfSource, name: str) -> np.ndarray:
        weights = read(self, name)
        if name == "final_norm.weight":  # the last that is read
            change(other, file)
        return weights

    monkeypatch.setattr(HfSource, "read", read_and_change)
    with pytest.raises(CheckpointError, match=f"{file} was changed or removed while it was converted; expected no"):
        convert(source, tmp_path / "packed", progress=False)
    other.unlink(missing_ok=True)
    assert_nothing_left(tmp_path, "m")


def test_a_tokenizer_that_cannot_be_used_is_noticed_before_weights_are_read(tmp_path: Path):
    directory = write_tiny(tmp_path / "m", "llama")
    (directory / "tokenizer.json").write_text("{}")
    file = write_tiny_gguf(tmp_path / "m.gguf", "llama", edit=lambda writer: writer.add_tokenizer_model("t5"))
    for source, message in ((open_hf(directory), f"{directory}: tokenizer.json"), (open_gguf(file), "'t5'; expected")):
        source.tensors = {}  # of which none can be read
        with pytest.raises(TextError, match=message):
            convert(source, tmp_path / "packed", progress=False)
    assert_nothing_left(tmp_path, "m", "m.gguf")


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


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(convert_module.fcntl, "flock", refuse)
    with pytest.raises(CheckpointError, match=r"\.packed\.lock cannot be locked: Function not implemented; expected"):
        convert(FakeSource(small_config()), tmp_path / "packed", progress=False)
    assert_nothing_left(tmp_path)


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
    (tmp_path / f".{name}.partial-8").symlink_to(tmp_path)  # what is no directory is no leftover
    (tmp_path / f".{name}.partial-9").touch()
    assert_intact(convert(FakeSource(small_config()), tmp_path / name, progress=False))
    assert {p.name for p in tmp_path.iterdir()} == others | {name, f".{name}.partial-8", f".{name}.partial-9"}


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
