"""What `vramjax plan` and `--plan` say: what a run would do, with no weights read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import pytest
from commands import IDS, NUM_LAYERS, Run

from vramjax.checkpoint.packed import HEAD_FILE, Packed, layer_file

pytestmark = pytest.mark.usefixtures("no_array_is_left")


@pytest.mark.parametrize(
    "window",
    [
        ("--keep=1",),
        ("--keep=3",),
        ("--keep=9",),
        ("--keep=2", "--policy=past"),
        ("--keep=2", "--policy=both_sides"),
        ("--device_budget=1GiB",),
        (),
    ],
)
def test_plan_agrees_with_the_run(
    decode: Any, run: Run, packed: Path, window: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, stats = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--context=64", *window)
    with monkeypatch.context() as patch:
        for name in ("load_layer", "read_layer_into", "load_head", "read_head_into"):
            patch.setattr(Packed, name, None)
        done = run(f"--model={packed}", "--plan", "--context=64", *window)
    assert (done.code, done.err) == (0, "")
    assert f"{stats['uploads_per_token']} uploads a token" in done.out
    pinned, streamed = stats["pinned_layers"], stats["uploads_per_token"]
    passing = stats["peak_resident_layers"] - pinned
    assert re.search(rf"^  {pinned} of {NUM_LAYERS} layers +stay for good ", done.out, re.MULTILINE)
    assert done.out.count("use ") == NUM_LAYERS
    assert done.out.count("load ") == streamed
    if stats["policy"] == "resident":
        assert "nothing is streamed" in done.out and "GB/s" not in done.out
    else:
        assert re.search(
            rf"^  {streamed} of {NUM_LAYERS} layers +streamed, {passing} at a time ", done.out, re.MULTILINE
        )
        rate, time = re.search(r"ran at ([\d.]+) GB/s", done.out), re.search(r"expected: ([\d.]+) ms a token", done.out)
        assert rate and float(rate[1]) > 0
        assert time and float(time[1]) >= 0
        assert ("the device is a CPU" in done.out) == (jax.default_backend() == "cpu")
    total = re.search(r"at the peak +([\d.]+) MiB", done.out)
    assert total and float(total[1]) == pytest.approx(stats["planned_peak_bytes"] / 2**20, abs=0.051)
    budget = re.search(r"^  budget +(auto|as asked)", done.out, re.MULTILINE)
    assert (budget and budget[1]) == ("as asked" if "--device_budget=1GiB" in window else None if window else "auto")


def test_plan_needs_no_weights(
    run: Run, packed: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vramjax.residency.link.link_bytes_per_s", lambda device: 5e10)
    ruined = tmp_path / "ruined"
    ruined.mkdir()
    for file in packed.iterdir():
        content = file.read_bytes()
        is_weights = file.name in (HEAD_FILE, *map(layer_file, range(NUM_LAYERS)))
        (ruined / file.name).write_bytes(b"x" * len(content) if is_weights else content)
    assert run(f"--model={ruined}", "--plan", "--keep=2").out == run(f"--model={packed}", "--plan", "--keep=2").out
    assert "head.safetensors" in run(f"--model={ruined}", f"--prompt_ids={IDS}", "--noprogress").error()
    # Nor does it convert anything, or want a prompt; a config.json is enough.
    config = tmp_path / "config_only" / "config.json"
    config.parent.mkdir()
    config.write_bytes((checkpoint / "config.json").read_bytes())
    expected = run("plan", f"--model={packed}", "--keep=2").out
    assert "expected: " in expected
    for model in (checkpoint, config, config.parent):
        assert run(f"--model={model}", "--plan", "--keep=2", "--prompt=Hi").out == expected
        assert run("plan", f"--model={model}", "--keep=2").out == expected
    assert not (tmp_path / "cache").exists()
    config.write_text("[]")
    assert "is not a JSON object" in run("plan", f"--model={config}").error()


def test_plan_of_a_model_on_the_hub(
    run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.json is all that is downloaded."""

    def download(repo_id: str, *, allow_patterns: list[str]) -> str:
        assert (repo_id, allow_patterns) == ("some/model", ["config.json"])
        (tmp_path / "hub").mkdir(exist_ok=True)
        (tmp_path / "hub" / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
        return str(tmp_path / "hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    done = run("plan", "--model=some/model", "--keep=2")
    assert (done.code, done.err) == (0, "")
    assert "4 of 5 layers       streamed, 1 at a time" in done.out


def test_plan_of_the_demo_model(run: Run, smollm2: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a link of 50 GB/s: 26 layers of 3.77 MiB take 2.06 ms."""
    monkeypatch.setattr("vramjax.residency.link.link_bytes_per_s", lambda device: 5e10)
    done = run("plan", f"--model={smollm2.path}", "--keep=6")
    assert done.code == 0
    assert "26 uploads a token, 98.1 MiB" in done.out
    assert "26 of 30 layers     streamed, 2 at a time" in done.out
    assert "expected: 2.1 ms a token" in done.out


def test_plan_says_what_it_does_not_know(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not measured, and on a full device the link cannot be."""
    with monkeypatch.context() as patch:
        patch.setattr("vramjax.residency.link.link_bytes_per_s", lambda device: 5e10)
        pinned, mapped = (
            run("plan", f"--model={packed}", "--keep=1", f"--host={host}").out for host in ("pinned", "mapped")
        )
    assert re.search(r"expected: [\d.]+ ms a token, unless computing takes longer", pinned)
    assert re.search(r"expected: at least [\d.]+ ms a token, as the disk", mapped)

    def fail(*args: object, **kwargs: object) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    monkeypatch.setattr("vramjax.residency.link.jax.device_put", fail)
    done = run("plan", f"--model={packed}", "--keep=1")
    assert (done.code, done.err) == (0, "")
    assert "5 uploads a token" in done.out and "link not measured" in done.out and "expected" not in done.out


def test_the_plan_of_a_batch(run: Run, packed: Path) -> None:
    done = run(f"--model={packed}", "--plan", "--context=64", "--keep=1", "--batch=12")
    assert done.code == 0, done.err
    assert f"{NUM_LAYERS} uploads a sweep, which gives up to 12 tokens" in done.out
    assert "ms a sweep, which gives up to 12 tokens" in done.out and "12 x 64 positions" in done.out
    one = run(f"--model={packed}", "--plan", "--context=64", "--keep=1").out

    def kv_mib(text: str) -> float:
        (found,) = re.findall(r"^  KV cache .* ([\d.]+) MiB$", text, re.MULTILINE)
        return float(found)

    assert kv_mib(done.out) == pytest.approx(12 * kv_mib(one), abs=0.7)
