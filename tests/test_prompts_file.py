"""Files of prompts answered into files: going on after an interruption, refusing what does not belong together."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import Run, start, write_chat_model

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.packed import Packed
from vramjax.errors import ConfigError
from vramjax.prompts import AnswerFile, Prompt

TEXTS = [
    "Once upon a time",
    "def main(argv):",
    "It's what they'll say",
    "日本語 🙂",
    "yes!",
    "a little town by the sea",
]
NUM_NEW = 6


@pytest.fixture
def run(run: Run, packed: Path) -> Run:
    return partial(run, f"--model={packed}", f"--max_new_tokens={NUM_NEW}", "--noprogress")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


@pytest.mark.parametrize("batch", [(), ("--batch=1",), ("--batch=4",), ("--batch=100",)])
def test_answers_in_order(run: Run, prompts: Path, tmp_path: Path, batch: tuple[str, ...]) -> None:
    out, stats = tmp_path / "out.jsonl", tmp_path / "stats.json"
    done = run(f"--prompts_file={prompts}", f"--out={out}", f"--stats_json={stats}", "--keep=1", *batch)
    assert (done.code, done.out) == (0, ""), done.err
    answers = records(out)
    assert [a["index"] for a in answers] == list(range(len(TEXTS)))
    assert [a["prompt"] for a in answers] == TEXTS
    # As if each had been asked alone.
    for answer in answers:
        alone = run(f"--prompt={answer['prompt']}", "--chat")
        assert alone.out == answer["text"] + "\n"
        assert len(answer["token_ids"]) == NUM_NEW or answer["finish_reason"] == "stop"
    last = json.loads(stats.read_text())
    assert last["token_ids"] in [answer["token_ids"] for answer in answers]
    assert last["uploads_per_token"] == 5
    num_new = sum(len(answer["token_ids"]) for answer in answers)
    assert (last["num_answers"], last["total_new_tokens"]) == (6, num_new)
    assert last["batch"] == {(): 6, ("--batch=1",): 1, ("--batch=4",): 4, ("--batch=100",): 6}[batch]
    assert last["tokens_per_sweep"] > 0.6 * last["batch"]
    assert f"{num_new} new in {last['num_sweeps']} sweeps" in done.err


def test_all_kinds_of_prompts(run: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": "Hi"}, {"messages": [{"role": "user", "content": "Hi"}]}, {"prompt_ids": [1, 2, 3]}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = (f"--prompts_file={prompts}", f"--out={out}")
    assert run(*command).code == 0
    text, messages, ids = records(out)
    assert text["token_ids"] == messages["token_ids"]
    assert (messages["prompt"], ids["prompt"]) == (lines[1]["messages"], [1, 2, 3])
    content = out.read_bytes()
    assert "3 of 3 prompts are already answered" in run(*command).err
    assert out.read_bytes() == content


def test_each_answer_is_written_at_once(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, seen = tmp_path / "out.jsonl", []
    append = AnswerFile.append

    def append_and_look(self: AnswerFile, prompt: Prompt, generation: Any) -> None:
        append(self, prompt, generation)
        seen.append(len(records(out)))

    monkeypatch.setattr(AnswerFile, "append", append_and_look)
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", [b"", b'{"index": 3, "prompt": "\xe6\x97', b'{"index": ', b"{"])
@pytest.mark.parametrize("num_done", [0, 1, 3, 5])
def test_a_rerun_goes_on(run: Run, prompts: Path, tmp_path: Path, num_done: int, torn: bytes) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    sampling = ("--temperature=1", "--seed=3")
    assert run(f"--prompts_file={prompts}", f"--out={whole}", *sampling).code == 0
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:num_done]) + torn)
    done = run(f"--prompts_file={prompts}", f"--out={out}", *sampling, "--keep=2")  # a window changes nothing
    assert done.code == 0
    assert out.read_bytes() == whole.read_bytes()
    assert ("already answered" in done.err) == (num_done > 0)


def test_answers_are_sorted_in_the_end(tmp_path: Path) -> None:
    """Whatever order they came in; a link to the file stays one, and so do its permissions."""
    real, out = tmp_path / "real.jsonl", tmp_path / "out.jsonl"
    out.symlink_to(real)
    prompts = [Prompt(index=i, where=f"p:{i}", content=f"a{chr(0x2028)}b {i}") for i in range(4)]
    answer: Any = SimpleNamespace(text="x\r\x85y", token_ids=[1], finish_reason="stop")
    with AnswerFile(out, prompts, {}) as answers:
        for i in (2, 0):
            answers.append(prompts[i], answer)
    real.chmod(0o640)
    with AnswerFile(out, prompts, {}) as answers:
        assert answers.done == {0, 2}
        for i in (3, 1):
            answers.append(prompts[i], answer)
        assert [record["index"] for record in records(out)] == [2, 0, 3, 1]
        answers.sort()
    assert [record["index"] for record in records(out)] == [0, 1, 2, 3]
    assert out.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert {path.name for path in tmp_path.iterdir()} == {"real.jsonl", "out.jsonl"}
    with AnswerFile(out, prompts, {}) as answers:
        assert answers.done == {0, 1, 2, 3}
        before = real.stat().st_ino
        answers.sort()
        assert real.stat().st_ino == before  # there was nothing to do


def test_a_run_that_ended_before_it_could_sort(run: Run, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0
    content = out.read_bytes()
    out.write_bytes(b"".join(reversed(content.splitlines(keepends=True))))
    assert "6 of 6 prompts are already answered" in run(f"--prompts_file={prompts}", f"--out={out}").err
    assert out.read_bytes() == content


def test_a_rerun_with_nothing_to_do_loads_nothing(
    run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.jsonl"
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0
    monkeypatch.setattr(Packed, "load_layer", None)
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0
    stats = tmp_path / "stats.json"
    done = run(f"--prompts_file={prompts}", f"--out={out}", f"--stats_json={stats}")
    assert done.code == 0 and f"nothing was decoded, so {stats} is not written" in done.err
    assert not stats.exists()


def test_a_rerun_knows_the_model(run: Run, prompts: Path, packed: Path, tmp_path: Path) -> None:
    """By what it is, not by its path."""
    out, model = tmp_path / "out.jsonl", tmp_path / "model"
    command = (f"--prompts_file={prompts}", f"--out={out}")
    assert run(*command).code == 0
    content = out.read_bytes()
    shutil.copytree(packed, model)
    assert "6 of 6 prompts are already answered" in run(*command, f"--model={model}").err
    shutil.rmtree(model)
    convert(open_hf(write_chat_model(tmp_path / "hf", chat=False)), model, progress=False)
    message = run(*command, f"--model={model}").error()
    assert f"{out}:1 was answered with model" in message
    assert out.read_bytes() == content


def test_more_prompts_can_be_added(run: Run, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0
    before = out.read_bytes()
    prompts.write_text("\n".join([*TEXTS, "one more"]), encoding="utf-8")
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0
    assert out.read_bytes().startswith(before)
    assert records(out)[-1]["prompt"] == "one more"


def test_batch_is_for_many_prompts(run: Run, prompts: Path, tmp_path: Path) -> None:
    assert "--batch is for many prompts; expected it with --prompts_file" in run("--prompt=Hi", "--batch=2").error()
    for bad in ("0", "-1", "many"):
        assert f"--batch is {bad!r}; expected" in run(f"--prompts_file={prompts}", "--out=o", f"--batch={bad}").error()


def test_a_budget_that_holds_fewer(run: Run, prompts: Path, tmp_path: Path) -> None:
    """Asked for, it is refused with what fits; if not, fewer are worked on at a time. The answers are the same."""
    out, whole, stats = tmp_path / "out.jsonl", tmp_path / "whole.jsonl", tmp_path / "stats.json"
    command = (f"--prompts_file={prompts}", "--context=4000", f"--stats_json={stats}", "--ignore_stop")
    assert run(*command, f"--out={whole}", "--batch=6").code == 0
    whole_stats = json.loads(stats.read_text())
    per_slot = whole_stats["kv_bytes"] // 6
    budget = whole_stats["planned_peak_bytes"] - 7 * per_slot // 2  # for two slots, and layers
    message = run(*command, f"--out={out}", "--batch=6", f"--device_budget={budget}").error()
    assert "for 6 contexts of 4000" in message and "or lower the batch to " in message
    done = run(*command, f"--out={out}", f"--device_budget={budget}", "--progress")
    assert done.code == 0 and " of 6 prompts are decoded at a time: " in done.err
    fewer = json.loads(stats.read_text())
    assert 1 < fewer["batch"] < 6 and fewer["planned_peak_bytes"] <= budget
    assert out.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(
    ("flag", "part"),
    [
        ("--max_new_tokens=7", "max_new_tokens 6; expected 7"),
        ("--nochat", "chat None; expected False"),
        ("--temperature=0.5", "temperature 0.0; expected 0.5"),
        ("--top_k=3", "top_k 0; expected 3"),
        ("--top_p=0.5", "top_p 1.0; expected 0.5"),
        ("--seed=1", "seed 0; expected 1"),
        ("--context=300", "context None; expected 300"),
        ("--ignore_stop", "ignore_stop False; expected True"),
    ],
)
def test_other_settings_are_refused(run: Run, prompts: Path, tmp_path: Path, flag: str, part: str) -> None:
    out = tmp_path / "out.jsonl"
    assert run(f"--prompts_file={prompts}", f"--out={out}", "--max_new_tokens=6").code == 0
    before = out.read_bytes()
    message = run(f"--prompts_file={prompts}", f"--out={out}", flag).error()
    assert f"{out}:1 was answered with" in message and part in message
    assert "another --out" in message
    assert out.read_bytes() == before


def test_other_answers_are_refused(run: Run, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0
    lines = out.read_bytes().splitlines(keepends=True)
    record = json.loads(lines[1])
    for bad, part in (
        (json.dumps(record | {"prompt": "another"}), "does not answer a prompt"),
        (json.dumps(record | {"index": 99}), "does not answer a prompt"),
        (json.dumps(record | {"index": [1]}), "does not answer a prompt"),
        (json.dumps(record | {"settings": None}), "was answered with"),
        ("{}", "does not answer a prompt"),
        ("no answer at all", "is not a JSON object"),
        ("3", "holds int"),
    ):
        content = lines[0] + bad.encode() + b"\n" + b"".join(lines[2:3]) + b"torn"
        out.write_bytes(content)
        message = run(f"--prompts_file={prompts}", f"--out={out}").error()
        assert f"{out}:2" in message and part in message
        assert out.read_bytes() == content  # refused files are not touched, torn lines included


@pytest.mark.parametrize("content", [b"my notes", b'{"index": 3}', b'{"index": 0, "prompt": "mine"', b"\x00", b"{}"])
def test_a_file_that_is_not_ours_is_not_touched(run: Run, prompts: Path, tmp_path: Path, content: bytes) -> None:
    out = tmp_path / "notes.txt"
    out.write_bytes(content)
    assert f"{out} does not end like the answers" in run(f"--prompts_file={prompts}", f"--out={out}").error()
    assert out.read_bytes() == content


def test_a_lone_surrogate_costs_no_answer(run: Run, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "Hi", "name": "\\ud800"}]}\n{"prompt": "Bye"}')
    command = (f"--prompts_file={prompts}", f"--out={out}")
    assert run(*command).code == 0
    assert records(out)[0]["prompt"][0]["name"] == "\ud800"
    assert "2 of 2 prompts are already answered" in run(*command).err


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (
            OSError(errno.ENOSPC, "No space left"),
            ConfigError,
            r"^--out .*out\.jsonl cannot be written: No space left; .* 0:",
        ),
    ],
)
def test_a_write_that_is_broken_off_leaves_nothing(
    tmp_path: Path, error: BaseException, raised: type[BaseException], message: str | None
) -> None:
    out, prompt = tmp_path / "out.jsonl", Prompt(index=0, where="p:1", content="Hi")
    answer: Any = SimpleNamespace(text="x" * 100_000, token_ids=[], finish_reason="stop")

    class BrokenOff(io.FileIO):
        def write(self, data: Any) -> int:
            if self.tell() > 0:
                raise error
            return super().write(data[:1000])  # as a disk that fills up

    with AnswerFile(out, [prompt], {}) as answers:
        answers._file.close()
        answers._file = BrokenOff(out, "a+")
        with pytest.raises(raised, match=message):
            answers.append(prompt, answer)
        assert answers.done == set()
    assert out.read_bytes() == b""


@pytest.mark.parametrize(
    ("bad", "part"),
    [
        ('{"prompt_ids": []}', "the prompt has no tokens"),
        ('{"prompt_ids": [1, -1]}', "token id -1 at index 1"),
        ('{"prompt_ids": [100000]}', "token id 100000"),
        (json.dumps({"prompt_ids": [5] * 257}), "257 tokens; expected at most 256"),
        (json.dumps({"prompt": "word " * 400}), "expected at most 256"),
    ],
)
def test_a_bad_prompt_is_named_before_work_starts(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, part: str
) -> None:
    prompts, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    prompts.write_text(f'{{"prompt": "Hi"}}\n\n{bad}\n{{"prompt": "Bye"}}\n')
    monkeypatch.setattr(Packed, "load_layer", None)
    message = run(f"--prompts_file={prompts}", f"--out={out}", "--context=256").error()
    assert message.startswith(f"{prompts}:3: ") and part in message
    assert out.read_bytes() == b""


def test_a_file_system_without_locks(run: Run, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    out = tmp_path / "out.jsonl"
    message = run(f"--prompts_file={prompts}", f"--out={out}").error()
    assert (
        message
        == f"--out {out} cannot be read, or locked against other runs: Function not implemented; choose another --out"
    )


def test_two_runs_do_not_write_one_file(run: Run, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another run is writing" in run(f"--prompts_file={prompts}", f"--out={out}").error()
    assert run(f"--prompts_file={prompts}", f"--out={out}").code == 0


def test_200_prompts_within_a_tight_budget(run: Run, packed: Path, tmp_path: Path) -> None:
    """Killed at half and run again: the same file in the end, with what each prompt is answered alone."""
    prompts, out, alone, stats = (tmp_path / name for name in ("p.jsonl", "out.jsonl", "alone.jsonl", "stats.json"))
    lines = [{"prompt_ids": [1 + (i * j) % 90 for j in range(1, 2 + 13 * i % 190)]} for i in range(200)]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = (f"--prompts_file={prompts}", "--max_new_tokens=12", "--temperature=1", f"--stats_json={stats}")
    assert run(*command, f"--out={alone}", "--batch=1").code == 0
    assert run(*command, f"--out={out}", "--batch=9", "--keep=1").code == 0
    planned = json.loads(stats.read_text())
    budget = planned["planned_peak_bytes"] + planned["layer_bytes"]  # for nine sequences, and not for the layers
    content = out.read_bytes()
    assert content == alone.read_bytes()
    out.unlink()

    command = (*command, f"--out={out}", f"--device_budget={budget}", "--batch=9")
    process = start(f"--model={packed}", "--noprogress", *command)
    deadline = time.monotonic() + 120
    while not (out.exists() and out.read_bytes().count(b"\n") >= 100):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    num_done = out.read_bytes().count(b"\n")
    assert 100 <= num_done < 200
    done = run(*command)
    assert done.code == 0 and f"{num_done} of 200 prompts are already answered" in done.err
    assert out.read_bytes() == content
    again = json.loads(stats.read_text())
    assert again["planned_peak_bytes"] <= budget and again["bytes_streamed_per_token"] > 0
    assert (again["batch"], again["num_answers"]) == (9, 200 - num_done) and again["tokens_per_sweep"] > 5


def test_killed_and_run_again(run: Run, packed: Path, tmp_path: Path) -> None:
    prompts, out, whole = tmp_path / "p.txt", tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    prompts.write_text("\n".join(f"{text} {i}" for i in range(5) for text in TEXTS), encoding="utf-8")
    command = (f"--prompts_file={prompts}", "--max_new_tokens=30", "--ignore_stop", "--keep=2")
    process = start(f"--model={packed}", "--noprogress", f"--out={out}", *command)
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    num_done = out.read_bytes().count(b"\n")
    assert 3 <= num_done < 30

    done = run(f"--out={out}", *command)
    assert done.code == 0 and f"{num_done} of 30 prompts are already answered" in done.err
    assert run(f"--out={whole}", *command).code == 0
    assert out.read_bytes() == whole.read_bytes()
    assert len(records(out)) == 30
