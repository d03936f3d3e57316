"""Everything that can go wrong on the command line is one clear line, said before any work where that is possible."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest
from commands import MAX_POSITIONS, Run
from huggingface_hub import constants as hub_constants
from huggingface_hub import errors as hub_errors

from vramjax.checkpoint.packed import Packed, open_packed

pytestmark = pytest.mark.usefixtures("no_array_is_left")


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails the test if weights are read: what is wrong has to be noticed before that."""

    def fail(*args: object) -> None:
        raise AssertionError("weights were read")

    for name in ("load_layer", "read_layer_into", "load_head", "read_head_into"):
        monkeypatch.setattr(Packed, name, fail)
    monkeypatch.setattr("vramjax.checkpoint.resolve.convert", fail)


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
        (["--policy=future"], ["--policy is 'future'", "pinned_ring, past, both_sides"]),
        (["--release=later"], ["--release is 'later'", "pool, free"]),
        (["--nochat=true"], ["--nochat=true does not take an argument", "--help"]),
        (["--chat=maybe"], ["--chat is 'maybe'", "true or false"]),
        (["--keeep=3"], ["no flag --keeep", "--keep?", "--help"]),
        (["--xyzzy"], ["no flag --xyzzy", "--help"]),
        (["--stats_json"], ["--stats_json", "value"]),
        (["stray"], ["'stray'", "flags only"]),
        (["--prompt_ids=1,2"], ["--prompt and --prompt_ids", "one prompt flag"]),
        (["--prompts_file=f", "--out=o"], ["--prompt and --prompts_file", "one prompt flag"]),
        (["--out=o"], ["--prompts_file and --out", "both or neither"]),
        (["--device_budget=6G"], ["device_budget is '6G'", "'6GiB'"]),
        (["--device_budget=0"], ["device_budget is '0'", "at least 1"]),
        (["--device_budget="], ["device_budget is ''"]),
        (["--device_budget=1GiB", "--keep=2"], ["keep is 2", "device_budget is '1GiB'", "one of the two"]),
        (["--device_budget=auto", "--keep=2"], ["keep is 2", "device_budget is 'auto'", "one of the two"]),
        (["--speculate=16"], ["speculate is 16", "auto, off", "0 .. 15"]),
        (["--speculate=-1"], ["speculate is -1"]),
        (["--speculate=on"], ["speculate is 'on'"]),
        ([f"--speculate={'9' * 5000}"], ["speculate is '999"]),
        (["--plan", "--batch=4294967296"], ["batch is 4294967296", "1 .. 2147483647"]),
        (["--host=gpu"], ["--host is 'gpu'", "auto, pinned, mapped"]),
        (["--host_budget=auto"], ["host_budget is 'auto'", "'6GiB'"]),
        (["plan", "--keep=2"], ["plan comes after a flag", "vramjax plan --model"]),
        (["convert", "a", "b"], ["convert comes after a flag", "vramjax convert SRC DST"]),
        (["--plan", "--stats_json=s"], ["--plan", "--stats_json", "one of the two"]),
        (["--cache_dir=~nosuchuser/x"], ["--cache_dir is '~nosuchuser/x'"]),
    ],
)
def test_bad_flags(run: Run, packed: Path, no_weights: None, args: list[str], parts: list[str]) -> None:
    message = run(f"--model={packed}", "--prompt=Hi", *args).error()
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("flag", ["keep", "devices", "prompt_ids", "speculate"])
def test_a_long_value_is_cut(run: Run, packed: Path, flag: str) -> None:
    prompt = () if flag == "prompt_ids" else ("--prompt=Hi",)
    message = run(f"--model={packed}", f"--{flag}={'x' * 5000}", *prompt).error()
    assert f"{flag} is 'xxx" in message and "...; expected " in message and len(message) < 200, message


def test_a_flagfile_that_cannot_be_read(run: Run, packed: Path, tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        message = run(f"--model={packed}", f"--flagfile={path}").error()
        assert message.startswith("--flagfile cannot be read: [Errno"), message
        assert (
            reason in message and str(path) in message and message.endswith("; expected a text file with a flag a line")
        )
    (tmp_path / "flags").write_bytes(b"\xff\xfe--keep=2")
    assert "--flagfile is not UTF-8" in run(f"--model={packed}", f"--flagfile={tmp_path / 'flags'}").error()


def test_what_is_missing(run: Run, packed: Path) -> None:
    assert "--model is missing" in run("--prompt=Hi").error()
    assert "no prompt" in run(f"--model={packed}").error()
    assert "both or neither" in run(f"--model={packed}", "--prompts_file=f.txt").error()
    assert "--model is missing" in run("--plan").error()
    assert "--model is missing" in run("plan").error()
    assert "--model is missing" in run().error()


@pytest.mark.parametrize("keep", [(), ("--keep=1",)])
@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        (["--prompt=", "--nochat"], ["--prompt: the prompt has no tokens"]),
        (["--prompt_ids="], ["--prompt_ids is empty", "whole numbers"]),
        (["--prompt_ids=1,2", "--chat"], ["--chat", "--prompt_ids", "encoded already"]),
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
        "a" * 300: ["a" * 300, " cannot be read or written: File name too long; check the path"],
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


def test_files_of_one_name(run: Run, packed: Path, no_weights: None, tmp_path: Path) -> None:
    prompts, link = tmp_path / "prompts.txt", tmp_path / "link"
    prompts.write_text("Hi")
    link.symlink_to(prompts)
    (tmp_path / "hard").hardlink_to(prompts)
    (tmp_path / "here").symlink_to(tmp_path)
    new, too = tmp_path / "new", tmp_path / "here" / "new"
    for out, stats, flags in (
        (prompts, new, "--prompts_file and --out"),
        (link, new, "--prompts_file and --out"),
        (tmp_path / "hard", new, "--prompts_file and --out"),
        (new, link, "--prompts_file and --stats_json"),
        (new, too, "--out and --stats_json"),
    ):
        message = run(f"--model={packed}", f"--prompts_file={prompts}", f"--out={out}", f"--stats_json={stats}").error()
        assert f"{flags} are the same file" in message
    assert prompts.read_text() == "Hi" and not new.exists()
    for flags in ((f"--model={link}",), (f"--model={packed}", f"--draft_model={link}")):
        message = run(*flags, "--prompt=Hi", f"--stats_json={prompts}").error()
        assert f"model and --stats_json are the same file, {link}" in message
    assert prompts.read_text() == "Hi"


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


def test_statistics_into_a_named_pipe(run: Run, packed: Path, tmp_path: Path) -> None:
    """It is opened once, as its reader sees the end when it is closed."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = (f"--model={packed}", "--prompt_ids=5,6", "--max_new_tokens=2", "--ignore_stop", f"--stats_json={pipe}")

    def read_to_the_end() -> str:
        text = pipe.read_text(encoding="utf-8")
        second.append(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # or who opens it again would wait forever
        return text

    second: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read_to_the_end)
        assert run(*command).code == 0
        text = reading.result()
    os.close(second[0])
    assert len(json.loads(text)["token_ids"]) == 2


def test_too_little_memory(run: Run, packed: Path, no_weights: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_bytes = open_packed(packed).layer_nbytes
    table = run("plan", f"--model={packed}", "--context=64", "--keep=1").out
    in_mib = re.search(r"at the peak +([\d.]+) MiB", table)
    assert in_mib
    smallest = int((float(in_mib[1]) + 0.05) * 2**20)  # one layer, and what the table rounds off
    free = [0]
    monkeypatch.setattr("vramjax.planning.free_device_bytes", lambda device: free[0])
    command = (f"--model={packed}", "--prompt=Hi", "--context=64")
    for asked in ((), ("--device_budget=auto",)):
        message = run(*command, *asked).error()
        assert "0.0 MiB of device memory are free" in message
        assert "512.0 MiB stay in reserve" in message and message.endswith(": free some")
    assert "keep=1, needs" in run(*command, "--keep=3").error()
    free[0] = smallest + 2 * layer_bytes
    assert "keep=3 would fit" in run(*command, "--keep=5").error()
    assert "keep=1 would fit" in run(*command, "--keep=2", "--policy=past").error()
    # A budget that is more than there is: only what it would be used for has to be there.
    message = run(*command, "--device_budget=1TiB").error()
    assert "5 of 5 layers at once" in message and "are free" in message


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("Unable to initialize\nbackend 'cuda'"), "Unable to initialize backend 'cuda'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_no_device(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr("jax.devices", fail)
    for extra in ((), ("--plan",)):
        message = run(f"--model={packed}", "--prompt=Hi", *extra).error()
        assert f"JAX has no device ({reason})" in message


def test_a_device_that_fills_up(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.")

    monkeypatch.setattr("vramjax.decode.layer_loop.make_cache", fail)
    assert "no memory left" in run(f"--model={packed}", "--prompt=Hi", "--noprogress").error()


def test_our_own_bugs_are_not_hidden(run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("vramjax.decode.layer_loop.make_cache", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run(f"--model={packed}", "--prompt=Hi", "--noprogress")


def test_a_prompt_far_too_long_is_refused_unread(run: Run, packed: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hi\n" + "ab " * 10_000)
    for where, flags in (
        ("--prompt: ", (f"--prompt={'ab ' * 10_000}",)),
        (f"{prompts}:2: ", (f"--prompts_file={prompts}", f"--out={tmp_path / 'out'}")),
    ):
        message = run(f"--model={packed}", "--context=64", *flags).error()
        assert message.startswith(where) and "more characters than 64 tokens can stand for" in message, message


def test_convert_errors(run: Run, checkpoint: Path, packed: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    for args, parts in (
        ([], ["0 arguments", "SRC DST"]),
        ([checkpoint], ["1 arguments", "SRC DST"]),
        ([checkpoint, "a", "b"], ["3 arguments"]),
        ([checkpoint, ""], ["DST is empty", "SRC DST"]),
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
