"""The command line: what it prints, what it writes, and that everything that can go wrong is one clear line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from commands import MAX_POSITIONS, NUM_LAYERS, PROJECT, STOP_ID, Done, Run, finish, run_here, start, write_chat_model
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors

import vramjax
from vramjax._version import __version__
from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.packed import HEAD_FILE, Packed, layer_file, open_packed
from vramjax.text.tokenizer import Tokenizer

IDS = "1,40,50,60,70"
STATS_KEYS = {  # what scripts rely on; more may come
    *("token_ids", "text", "num_layers", "policy", "keep", "uploads_per_token", "bytes_streamed_per_token"),
    *("peak_resident_layers", "end_resident_layers", "resident_entries_end", "pool_hits", "pool_misses"),
    *("pool_fallback_frees", "prefill_s", "ms_per_token", "device", "jax_version"),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("hf") / "chat")


@pytest.fixture(scope="module")
def packed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(open_hf(checkpoint), tmp_path_factory.mktemp("packed") / "chat", progress=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command in this process; whatever it leaves in the process or in the cache is gone afterwards."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("VRAMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default"))
    return partial(run_here, capsys)


@pytest.fixture
def decode(run: Run, packed: Path, tmp_path: Path) -> Any:
    """Decodes with the tiny model; returns what was printed and the stats."""

    def decode(*args: object) -> tuple[Done, dict[str, Any]]:
        path = tmp_path / "stats.json"
        done = run(f"--model={packed}", "--max_new_tokens=12", "--noprogress", f"--stats_json={path}", *args)
        assert done.code == 0, done.err
        return done, json.loads(path.read_text(encoding="utf-8"))

    return decode


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if weights are read: what is wrong has to be noticed before that."""

    def fail(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Packed, "load_layer", fail)
    monkeypatch.setattr(Packed, "load_head", fail)
    monkeypatch.setattr("vramjax.checkpoint.resolve.convert", fail)


# What is printed and written


def test_streamed_text_is_the_whole_text(decode: Any, packed: Path) -> None:
    done, stats = decode("--prompt=Once upon a time", "--max_new_tokens=48", "--ignore_stop")
    assert done.out == stats["text"] + "\n"
    assert len(stats["token_ids"]) == 48
    assert stats["text"] == Tokenizer.from_dir(packed).decode(stats["token_ids"])
    assert "�" in stats["text"]  # random weights: characters that never become whole are in it
    assert "tokens/s" in done.err and "nothing is streamed" in done.err


def test_stats_have_what_scripts_rely_on(decode: Any) -> None:
    _, stats = decode(f"--prompt_ids={IDS}", "--keep=2", "--ignore_stop")
    assert set(stats) >= STATS_KEYS
    assert stats["prefill_s"] > 0 and stats["ms_per_token"] > 0
    assert stats["num_prompt_tokens"] == 5 and stats["finish_reason"] == "length"


@pytest.mark.parametrize("keep", [1, 2, 3, NUM_LAYERS - 1])
@pytest.mark.parametrize("release", ["pool", "free"])
@pytest.mark.parametrize("policy", ["past", "both_sides"])
def test_stats_of_a_window(decode: Any, packed: Path, policy: str, release: str, keep: int) -> None:
    _, resident = decode(f"--prompt_ids={IDS}", "--ignore_stop")
    done, stats = decode(
        f"--prompt_ids={IDS}", "--ignore_stop", f"--keep={keep}", f"--policy={policy}", f"--release={release}"
    )
    uploads = NUM_LAYERS - keep if policy == "past" else NUM_LAYERS
    peak = min(NUM_LAYERS, 2 * keep) if policy == "past" else keep
    assert stats["token_ids"] == resident["token_ids"]
    assert (stats["policy"], stats["keep"], stats["num_layers"]) == (policy, keep, NUM_LAYERS)
    assert stats["uploads_per_token"] == uploads
    assert stats["bytes_streamed_per_token"] == uploads * open_packed(packed).layer_nbytes > 0
    assert stats["uploads"] == NUM_LAYERS + 11 * uploads  # the prompt's sweep, and one for each token but the last
    assert stats["peak_resident_layers"] == peak
    assert stats["end_resident_layers"] == keep
    assert stats["resident_entries_end"] == 7 * keep + 1
    if release == "pool":
        assert (stats["pool_misses"], stats["pool_fallback_frees"]) == (peak, 0)
        assert stats["pool_hits"] == stats["uploads"]  # the slots are made in advance
    else:
        assert stats["pool_hits"] == 0
        assert stats["pool_misses"] == stats["uploads"]
    assert f"{uploads} layers a token" in done.err


@pytest.mark.parametrize("warm", [True, False])
def test_warm_and_lazy_start_are_alike(decode: Any, warm: bool) -> None:
    _, resident = decode(f"--prompt_ids={IDS}", "--ignore_stop")
    _, stats = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--keep=2", f"--warmup={warm}")
    assert stats["token_ids"] == resident["token_ids"]
    # Warm: the window's two layers, then steady sweeps; lazy: the first sweep uploads every layer.
    assert stats["uploads"] == (2 + 12 * 3 if warm else 5 + 11 * 3)


@pytest.mark.parametrize("keep", [NUM_LAYERS, NUM_LAYERS + 1, 1000])
def test_a_window_that_holds_all_layers_streams_nothing(decode: Any, keep: int) -> None:
    done, stats = decode(f"--prompt_ids={IDS}", "--ignore_stop", f"--keep={keep}")
    assert "everything fits, nothing is streamed" in done.err
    assert stats["policy"] == "resident"
    assert stats["uploads_per_token"] == stats["bytes_streamed_per_token"] == stats["evictions"] == 0
    assert stats["uploads"] == stats["peak_resident_layers"] == stats["end_resident_layers"] == NUM_LAYERS


def test_prompt_ids_are_the_prompt(decode: Any, packed: Path) -> None:
    tokenizer = Tokenizer.from_dir(packed)
    ids = tokenizer.encode("Once upon")
    _, plain = decode("--prompt=Once upon", "--nochat")
    _, by_id = decode(f"--prompt_ids={','.join(map(str, ids))}")
    assert plain["num_prompt_tokens"] == len(ids)
    assert plain["token_ids"] == by_id["token_ids"]
    assert decode("--prompt_ids= 1, 40 ,50")[1]["num_prompt_tokens"] == 3


def test_chat_is_on_if_there_is_a_template(decode: Any, run: Run, packed: Path, tmp_path: Path) -> None:
    rendered = Tokenizer.from_dir(packed).encode("user: Hi\nreply: ")
    by_default, asked = decode("--prompt=Hi")[1], decode("--prompt=Hi", "--chat")[1]
    assert by_default["num_prompt_tokens"] == len(rendered)
    assert by_default["token_ids"] == asked["token_ids"]
    assert decode("--prompt=Hi", "--nochat")[1]["num_prompt_tokens"] < len(rendered)

    plain = write_chat_model(tmp_path / "plain", chat=False)
    done = run(f"--model={plain}", "--prompt=Hi", "--chat", "--noprogress")
    assert "no chat template" in done.error()
    assert run(f"--model={plain}", "--prompt=Hi", "--max_new_tokens=2", "--noprogress").code == 0


def test_sampling_is_reproducible(decode: Any) -> None:
    sampled = (f"--prompt_ids={IDS}", "--ignore_stop", "--temperature=1.5", "--top_k=50")
    first, again = decode(*sampled, "--seed=7")[1], decode(*sampled, "--seed=7", "--keep=1")[1]
    other = decode(*sampled, "--seed=8")[1]
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_a_model_without_tokenizer_takes_ids(run: Run, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "bare", tokenizer=False)
    stats = tmp_path / "stats.json"
    done = run(f"--model={model}", f"--prompt_ids={IDS}", "--max_new_tokens=4", "--noprogress", f"--stats_json={stats}")
    assert (done.code, done.out) == (0, "\n"), done.err
    assert 0 < len(json.loads(stats.read_text())["token_ids"]) <= 4
    assert "tokenizer.json" in run(f"--model={model}", "--prompt=Hi", "--noprogress").error()


def test_what_is_not_packed_is_packed_once(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    command = (f"--model={checkpoint}", f"--prompt_ids={IDS}", "--max_new_tokens=2", "--noprogress")
    first = run(*command)
    (made,) = (tmp_path / "cache" / "packed").iterdir()
    stamp = made.stat().st_mtime_ns
    second = run(*command)
    assert first.code == second.code == 0
    assert first.out == second.out
    assert [p.stat().st_mtime_ns for p in (tmp_path / "cache" / "packed").iterdir()] == [stamp]
    elsewhere = tmp_path / "elsewhere"
    assert run(*command, f"--cache_dir={elsewhere}").code == 0
    assert len(list((elsewhere / "packed").iterdir())) == 1


def test_help_and_version(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    for flag in ("--prompts_file", "--keep", "--policy", "--[no]plan", "vramjax convert SRC DST"):
        assert flag in done.out, flag
    assert run("-h").out == done.out == run("decode", "--help").out
    assert run("--version").out == run("convert", "--version").out == f"{__version__}\n"


# The end of an answer


@pytest.mark.parametrize("prompt", [f"--prompt_ids={IDS}", "--prompt=Hi"])
def test_no_new_tokens(decode: Any, prompt: str) -> None:
    done, stats = decode(prompt, "--max_new_tokens=0")
    assert done.out == "\n"
    assert stats["token_ids"] == [] and stats["text"] == "" and stats["finish_reason"] == "length"
    assert "no token was decoded" in done.err


def test_one_new_token(decode: Any) -> None:
    done, stats = decode(f"--prompt_ids={IDS}", "--max_new_tokens=1", "--keep=2")
    assert len(stats["token_ids"]) == 1 and stats["ms_per_token"] is None
    assert stats["uploads_per_token"] == 3  # known from the schedule, though no token was decoded from another
    assert "first token after" in done.err


def test_stop_id_first(decode: Any, run: Run, packed: Path, tmp_path: Path) -> None:
    _, stats = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--max_new_tokens=6")
    first = stats["token_ids"][0]
    # The same model, with its first answer declared a stop id.
    checkpoint = write_chat_model(tmp_path / "stops")
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [STOP_ID, first]}))
    path = tmp_path / "s.json"
    done = run(f"--model={checkpoint}", f"--prompt_ids={IDS}", f"--stats_json={path}", "--noprogress")
    stats = json.loads(path.read_text())
    assert done.code == 0
    assert (stats["token_ids"], stats["finish_reason"], stats["ms_per_token"]) == ([first], "stop", None)


@pytest.mark.parametrize("context", [5, 6, 9])
def test_a_full_context_ends_the_answer(decode: Any, context: int) -> None:
    _, stats = decode(f"--prompt_ids={IDS}", "--ignore_stop", f"--context={context}")
    assert len(stats["token_ids"]) == context - 5 + 1  # the last token needs no position
    assert stats["finish_reason"] == "context"


def test_context_follows_the_request(decode: Any) -> None:
    _, needed = decode(f"--prompt_ids={IDS}", "--ignore_stop")
    assert needed["context"] == 256  # a whole number of pieces
    _, asked = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--context=300")
    assert asked["context"] == 512
    assert asked["kv_bytes"] == 2 * needed["kv_bytes"]
    assert asked["token_ids"] == needed["token_ids"]  # so that a rerun over fewer prompts gives the same answers


# The plan


@pytest.mark.parametrize(("policy", "keep"), [("past", 1), ("past", 2), ("past", 9), ("both_sides", 2), ("past", None)])
def test_plan_agrees_with_the_run(
    decode: Any, run: Run, packed: Path, policy: str, keep: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = () if keep is None else (f"--keep={keep}", f"--policy={policy}")
    _, stats = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--context=64", *window)
    with monkeypatch.context() as patch:
        patch.setattr(Packed, "_load", None)
        done = run(f"--model={packed}", "--plan", "--context=64", *window)
    assert (done.code, done.err) == (0, "")
    assert f"{stats['uploads_per_token']} uploads a token" in done.out
    layers = re.search(r"layers +(\d+) of (\d+) at", done.out)
    assert layers and layers.groups() == (str(stats["peak_resident_layers"]), str(NUM_LAYERS))
    assert done.out.count("use ") == NUM_LAYERS
    assert done.out.count("load ") == stats["uploads_per_token"]
    assert ("nothing is streamed" in done.out) == (stats["policy"] == "resident")
    total = re.search(r"at the peak +([\d.]+) MiB", done.out)
    assert total and float(total[1]) == pytest.approx(stats["planned_peak_bytes"] / 2**20, abs=0.051)


def test_plan_needs_no_weights(run: Run, packed: Path, checkpoint: Path, tmp_path: Path) -> None:
    ruined = tmp_path / "ruined"
    ruined.mkdir()
    for file in packed.iterdir():
        content = file.read_bytes()
        is_weights = file.name in (HEAD_FILE, *map(layer_file, range(NUM_LAYERS)))
        (ruined / file.name).write_bytes(b"x" * len(content) if is_weights else content)
    assert run(f"--model={ruined}", "--plan", "--keep=2").out == run(f"--model={packed}", "--plan", "--keep=2").out
    assert "layer-00000" in run(f"--model={ruined}", f"--prompt_ids={IDS}", "--noprogress").error()
    # Nor does it convert anything, or want a prompt.
    done = run(f"--model={checkpoint}", "--plan", "--keep=2", "--prompt=Hi")
    assert done.out == run(f"--model={packed}", "--plan", "--keep=2").out
    assert not (tmp_path / "cache").exists()


def test_plan_of_the_demo_model(run: Run, smollm2: Packed) -> None:
    done = run(f"--model={smollm2.path}", "--plan", "--keep=4")
    assert done.code == 0
    assert "26 uploads a token" in done.out
    assert "8 of 30" in done.out


# What goes wrong: one line


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--keep=x"], ["--keep is 'x'", "positive integer"]),
        (["--keep=0"], ["--keep", "'0'", "positive"]),
        (["--keep=-1"], ["--keep", "'-1'", "positive"]),
        (["--context=0"], ["--context", "'0'", "positive"]),
        (["--context=1e3"], ["--context", "'1e3'"]),
        (["--max_new_tokens=-1"], ["--max_new_tokens", "non-negative"]),
        (["--max_new_tokens=2.5"], ["--max_new_tokens", "'2.5'", "integer"]),
        (["--temperature=-1"], ["--temperature", "'-1'", "non-negative number"]),
        (["--temperature=hot"], ["--temperature", "'hot'", "number"]),
        (["--temperature=nan"], ["temperature", "nan"]),
        (["--temperature=inf"], ["temperature", "inf"]),
        (["--top_k=-1"], ["--top_k", "non-negative"]),
        (["--top_p=0"], ["top_p is 0.0", "more than 0 and at most 1"]),
        (["--top_p=1.5"], ["top_p is 1.5", "at most 1"]),
        (["--top_p=nan"], ["top_p is nan"]),
        (["--seed=-1"], ["--seed", "non-negative"]),
        (["--seed=4294967296"], ["seed is 4294967296", "2**32 - 1"]),
        (["--policy=future"], ["--policy is 'future'", "past, both_sides"]),
        (["--release=later"], ["--release is 'later'", "pool, free"]),
        (["--chat=maybe"], ["--chat is 'maybe'", "true or false"]),
        (["--keeep=3"], ["no flag --keeep", "--keep?", "--help"]),
        (["--xyzzy"], ["no flag --xyzzy", "--help"]),
        (["--stats_json"], ["--stats_json", "value"]),
        (["stray"], ["'stray'", "flags only"]),
        (["--prompt_ids=1,2"], ["--prompt and --prompt_ids", "one prompt flag"]),
        (["--prompts_file=f", "--out=o"], ["--prompt and --prompts_file", "one prompt flag"]),
        (["--out=o"], ["--prompts_file and --out", "both or neither"]),
    ],
)
def test_bad_flags(run: Run, packed: Path, no_weights: None, args: list[str], parts: list[str]) -> None:
    message = run(f"--model={packed}", "--prompt=Hi", *args).error()
    assert all(part in message for part in parts), message


def test_what_is_missing(run: Run, packed: Path) -> None:
    assert "--model is missing" in run("--prompt=Hi").error()
    assert "no prompt" in run(f"--model={packed}").error()
    assert "both or neither" in run(f"--model={packed}", "--prompts_file=f.txt").error()
    assert "--model is missing" in run("--plan").error()
    assert "--model is missing" in run().error()


@pytest.mark.parametrize("keep", [(), ("--keep=1",)])
@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        (["--prompt=", "--nochat"], ["--prompt: the prompt has no tokens"]),
        (["--prompt_ids="], ["--prompt_ids: the prompt has no tokens"]),
        (["--prompt_ids=1,x"], ["--prompt_ids is '1,x'", "whole numbers"]),
        (["--prompt_ids=1,2.0"], ["--prompt_ids is '1,2.0'"]),
        (["--prompt_ids=1,,2"], ["--prompt_ids is '1,,2'"]),
        (["--prompt_ids=5,-1"], ["token id -1 at index 1", "0 .. "]),
        (["--prompt_ids={vocab}"], ["token id {vocab} at index 0", "0 .. {last}"]),
        (["--prompt_ids=1,{vocab}1,2"], ["token id {vocab}1 at index 1", "0 .. {last}"]),
        (["--prompt_ids=99999999999999999999"], ["token id 99999999999999999999", "0 .. {last}"]),
        (["--prompt_ids=1,2,3,4,5", "--context=4"], ["5 tokens", "at most 4", "raise it or cut"]),
        (["--prompt=Once upon a time", "--context=4"], ["--prompt: ", "at most 4", "raise it or cut"]),
        (["--prompt_ids={long}"], ["4097 tokens", "at most 4096", "the model's maximum"]),
        (["--prompt=Hi", "--context=4097"], ["context is 4097", "1 .. 4096"]),
        (["--prompt=\udcff"], ["surrogates"]),
    ],
)
def test_prompts_that_cannot_be_used(
    run: Run, packed: Path, no_weights: None, keep: tuple[str], prompt: list[str], parts: list[str]
) -> None:
    vocab = open_packed(packed).config.vocab_size
    names = {"vocab": vocab, "last": vocab - 1, "long": ",".join(["5"] * (MAX_POSITIONS + 1))}
    message = run(f"--model={packed}", *(arg.format(**names) for arg in prompt), *keep).error()
    assert all(part.format(**names) in message for part in parts), message


def test_models_that_there_are_not(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("no model")
    (tmp_path / "x.gguf").write_bytes(b"GG")
    for model, parts in {
        "nowhere": ["'nowhere' does not exist", "Hub id", "demo"],
        "": ["'' does not exist"],
        "./a/b": ["does not exist"],
        "../b": ["'../b' does not exist"],
        "~nobody/b": ["'~nobody/b' does not exist"],
        "/a/b": ["'/a/b' does not exist"],
        "models/x.gguf": ["'models/x.gguf' does not exist"],
        tmp_path / "empty": ["empty has no"],
        tmp_path / "note.txt": ["note.txt", ".gguf"],
        tmp_path / "x.gguf": ["x.gguf"],
        "a" * 300: ["a" * 300],
    }.items():
        for extra in ((), ("--plan",)):
            message = run(f"--model={model}", "--prompt=Hi", *extra).error()
            assert all(part in message for part in parts), message


@pytest.mark.parametrize("plan", [(), ("--plan",)])
def test_hub_offline(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: tuple[str]) -> None:
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    message = run("--model=some/model", "--prompt=Hi", *plan).error()
    assert "some/model is neither a local path nor in the cache" in message
    assert "HF_HUB_OFFLINE" in message


@pytest.mark.parametrize("plan", [(), ("--plan",)])
@pytest.mark.parametrize(
    ("error", "parts"),
    [
        (hub_errors.LocalEntryNotFoundError("Got: ConnectError\nmore"), ["could not be downloaded", "network"]),
        (ConnectionError("no route"), ["could not be downloaded", "(no route)", "local copy"]),
        (OSError(), ["could not be downloaded", "(OSError)"]),
        (hub_errors.HFValidationError("Repo id must\nbe"), ["cannot be a repository", "Repo id must"]),
    ],
)
def test_hub_errors(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, parts: list[str], plan: tuple[str]
) -> None:
    def raise_it(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raise_it)
    message = run("--model=some/model", "--prompt=Hi", *plan).error()
    assert all(part in message for part in ("some/model", *parts)), message


def test_files_that_cannot_be_written(run: Run, packed: Path, no_weights: None, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n")
    command = (f"--model={packed}", "--prompt=Hi")
    assert "--stats_json" in run(*command, f"--stats_json={tmp_path}/no/s.json").error()
    assert "--stats_json" in run(*command, f"--stats_json={tmp_path}").error()
    assert "--stats_json" in run(*command, "--stats_json=").error()
    command = (f"--model={packed}", f"--prompts_file={prompts}")
    assert "--out" in run(*command, f"--out={tmp_path}/no/o.jsonl").error()
    assert "--out" in run(*command, f"--out={tmp_path}").error()
    assert "--out" in run(*command, "--out=/dev/null").error()


def test_a_cache_that_cannot_be_written(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for model in (checkpoint, "demo"):
        message = run(f"--model={model}", "--prompt=Hi", f"--cache_dir={tmp_path / 'file'}", "--noprogress").error()
        assert str(tmp_path / "file") in message
        assert "Not a directory" in message or "File exists" in message


def test_a_check_of_the_stats_file_leaves_nothing(run: Run, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    for name in ("new.json", "old.json"):
        assert run(f"--model={packed}", "--prompt_ids=-1", f"--stats_json={tmp_path / name}").error()
    assert not (tmp_path / "new.json").exists()
    assert (tmp_path / "old.json").read_text() == "{}"


def test_too_little_memory(run: Run, packed: Path, no_weights: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_bytes = open_packed(packed).layer_nbytes
    needed: list[int] = []

    def check(needed_bytes: Any, *args: Any) -> None:
        needed.append(needed_bytes.fixed_bytes)
        check_bytes(needed_bytes, *args)

    check_bytes = vramjax.language_model.DeviceBytes.check  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setattr(vramjax.language_model.DeviceBytes, "check", check)  # pyright: ignore
    free = [0]
    monkeypatch.setattr("vramjax.language_model.free_device_bytes", lambda device: free[0])
    command = (f"--model={packed}", "--prompt=Hi")
    assert "--keep 1, needs" in run(*command).error()
    free[0] = needed[0] + 4 * layer_bytes
    assert "--keep 2 would fit" in run(*command).error()
    assert "--keep 2 would fit" in run(*command, "--keep=3").error()


def test_no_device(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to initialize\nbackend 'cuda'")

    monkeypatch.setattr("jax.devices", fail)
    for extra in ((), ("--plan",)):
        message = run(f"--model={packed}", "--prompt=Hi", *extra).error()
        assert "JAX has no device (Unable to initialize backend 'cuda')" in message


def test_a_device_that_fills_up(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    monkeypatch.setattr("vramjax.decode.engine.make_cache", fail)
    assert "no memory left" in run(f"--model={packed}", "--prompt=Hi", "--noprogress").error()


def test_our_own_bugs_are_not_hidden(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("vramjax.decode.engine.make_cache", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run(f"--model={packed}", "--prompt=Hi", "--noprogress")


# vramjax convert


def test_convert(run: Run, checkpoint: Path, tmp_path: Path, decode: Any) -> None:
    done = run("convert", checkpoint, tmp_path / "a", "--noprogress")
    assert (done.code, done.out, done.err) == (0, f"{tmp_path / 'a'}\n", "")
    assert set(open_packed(tmp_path / "a").groups.values()) == {128}
    assert run("convert", checkpoint, tmp_path / "b", "--noprogress", "--group=32").code == 0
    assert set(open_packed(tmp_path / "b").groups.values()) == {32}
    # The weights are exact at every group, and so are the answers.
    assert decode(f"--prompt_ids={IDS}", f"--model={tmp_path / 'b'}")[1]["token_ids"]


def test_convert_errors(run: Run, checkpoint: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for args, parts in (
        ([], ["0 arguments", "SRC DST"]),
        ([checkpoint], ["1 arguments", "SRC DST"]),
        ([checkpoint, "a", "b"], ["3 arguments"]),
        ([checkpoint, tmp_path / "a", "--group=48"], ["--group is '48'", "32, 64, 128"]),
        ([checkpoint, tmp_path / "a", "--keep=1"], ["no flag --keep"]),
        ([tmp_path / "none", tmp_path / "a"], ["does not exist"]),
        ([packed, tmp_path / "a"], ["packed already"]),
        ([checkpoint, tmp_path / "taken"], ["exists already"]),
        ([checkpoint, tmp_path / "taken" / "file" / "a"], ["cannot be written"]),
    ):
        message = run("convert", *args).error()
        assert all(part in message for part in parts), message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["taken"]


# As processes


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers can be long enough to be interrupted."""
    directory = tmp_path_factory.mktemp("long")
    checkpoint = write_chat_model(directory / "hf")
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 1 << 16}
    (checkpoint / "config.json").write_text(json.dumps(config))
    return convert(open_hf(checkpoint), directory / "packed", progress=False)


def test_scripts(checkpoint: Path, tmp_path: Path, decode: Any) -> None:
    packed = tmp_path / "packed"
    convert_script = [sys.executable, "scripts/convert.py", str(checkpoint), str(packed)]
    done = subprocess.run(convert_script, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{packed}\n"), done.stderr
    # Text of any kind comes out, whatever the terminal can show.
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    args = [f"--model={packed}", f"--prompt_ids={IDS}", "--max_new_tokens=12"]
    done = subprocess.run(
        [sys.executable, "scripts/decode.py", *args, "--ignore_stop"],
        cwd=PROJECT,
        capture_output=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    expected = decode(f"--prompt_ids={IDS}", "--ignore_stop")[1]["text"] + "\n"
    assert done.stdout == expected.encode("ascii", "replace")


def test_hub_id_offline(tmp_path: Path) -> None:
    done = finish(start("--model=some/model", "--prompt=Hi", env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}))
    assert "some/model is neither a local path nor in the cache" in done.error()


def test_interrupt(long_model: Path) -> None:
    process = start(f"--model={long_model}", "--prompt=Hi", "--ignore_stop", "--max_new_tokens=60000", "--keep=1")
    assert process.stdout
    first = process.stdout.read(8)  # it is decoding
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert first
    assert (done.code, done.err.strip()) == (130, "interrupted")


@pytest.mark.parametrize("args", [["--prompt=Hi", "--ignore_stop", "--max_new_tokens=60000"], ["--plan"], ["--help"]])
def test_broken_pipe_is_quiet(long_model: Path, args: list[str]) -> None:
    process = start(f"--model={long_model}", "--noprogress", *args)
    assert process.stdout and process.stderr
    first = process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert len(first) == 5
    assert err == b""


# A real model


def test_demo_model_answers(run: Run, smollm2: Packed, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    question = "--prompt=What is the capital of France?"
    done = run(f"--model={smollm2.path}", question, "--keep=4", f"--stats_json={path}", "--noprogress")
    assert (done.code, done.out) == (0, "The capital of France is Paris.\n"), done.err
    stats = json.loads(path.read_text())
    assert stats["finish_reason"] == "stop" and stats["token_ids"][-1] == 2
    assert (stats["uploads_per_token"], stats["peak_resident_layers"], stats["end_resident_layers"]) == (26, 8, 4)
    assert stats["resident_entries_end"] == 29


@pytest.fixture(autouse=True)
def _no_array_is_left() -> Iterator[None]:
    """Nothing that a command loaded outlives it."""
    import jax

    before = {id(a) for a in jax.live_arrays()}
    yield
    left = [a for a in jax.live_arrays() if id(a) not in before and a.nbytes > np.dtype(np.float32).itemsize * 256]
    assert not left, left
