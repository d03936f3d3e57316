"""The command line: what it prints, and what it writes."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
from commands import IDS, NUM_LAYERS, STOP_ID, Run, write_chat_model

from pallas_kernels.attention import SPLIT
from vramjax._version import __version__
from vramjax.checkpoint.packed import Packed, open_packed
from vramjax.model.kv_cache import capacity
from vramjax.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("no_array_is_left")
STATS_KEYS = {  # what scripts rely on; more may come
    *("token_ids", "text", "num_layers", "policy", "keep", "uploads_per_token", "bytes_streamed_per_token"),
    *("peak_resident_layers", "end_resident_layers", "resident_entries_end", "pool_hits", "pool_misses"),
    *("pool_fallback_frees", "prefill_s", "ms_per_token", "device", "jax_version"),
}


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
@pytest.mark.parametrize("policy", ["pinned_ring", "past", "both_sides"])
def test_stats_of_a_window(decode: Any, packed: Path, policy: str, release: str, keep: int) -> None:
    _, resident = decode(f"--prompt_ids={IDS}", "--ignore_stop")
    done, stats = decode(
        f"--prompt_ids={IDS}", "--ignore_stop", f"--keep={keep}", f"--policy={policy}", f"--release={release}"
    )
    uploads, peak = {
        "pinned_ring": (NUM_LAYERS - keep + 1, keep),
        "past": (NUM_LAYERS - keep, min(NUM_LAYERS, 2 * keep)),
        "both_sides": (NUM_LAYERS, keep),
    }[policy]
    assert stats["token_ids"] == resident["token_ids"]
    assert (stats["policy"], stats["keep"], stats["num_layers"]) == (policy, keep, NUM_LAYERS)
    assert stats["uploads_per_token"] == uploads
    assert stats["bytes_streamed_per_token"] == uploads * open_packed(packed).layer_nbytes > 0
    # The prompt's sweep, which with a ring also uploads what the next one begins with; then one for each token but the
    # last.
    ahead = 1 if policy == "pinned_ring" else 0
    assert stats["uploads"] == NUM_LAYERS + ahead + 11 * uploads
    assert (stats["device_budget"], stats["host"]) == (None, "pinned")
    page = mmap.PAGESIZE
    kept, passing = uploads, 0 if uploads == NUM_LAYERS else 2  # what stays on the device does not stay on the host too
    assert stats["host_bytes"] == (kept + passing) * -(-stats["layer_bytes"] // page) * page
    assert stats["host_buffers"] == passing
    assert stats["peak_resident_layers"] == peak
    assert stats["end_resident_layers"] == keep
    assert stats["resident_entries_end"] == 7 * keep + 1
    if release == "pool":
        assert (stats["pool_misses"], stats["pool_fallback_frees"]) == (peak, 0)
        assert stats["pool_hits"] == stats["uploads"]  # the slots are made in advance
    else:
        assert stats["pool_hits"] == 0
        assert stats["pool_misses"] == stats["uploads"]
    assert f"{uploads} layers a {'sweep' if stats['num_drafts'] else 'token'}, " in done.err


@pytest.mark.parametrize("keep", [1, NUM_LAYERS])
def test_drafts_change_nothing_but_the_number_of_sweeps(decode: Any, packed: Path, keep: int) -> None:
    every_id = ",".join(map(str, range(open_packed(packed).config.vocab_size)))  # so that something is always drafted
    prompt = (f"--prompt_ids={every_id}", "--ignore_stop")
    done, plain = decode(*prompt)
    assert "drafts" not in done.err and plain["num_drafts"] == 0 and plain["num_sweeps"] == 12
    done, stats = decode(*prompt, f"--keep={keep}", "--speculate=3")
    assert stats["token_ids"] == plain["token_ids"]
    assert stats["num_drafts"] == sum(stats["drafts_by_depth"]) >= 3 and not any(stats["drafts_by_depth"][3:])
    assert stats["num_sweeps"] == 12 - stats["num_accepted_drafts"]
    assert len(stats["acceptance_by_depth"]) == 15 and stats["acceptance_by_depth"][3] is None
    assert f"{stats['num_accepted_drafts']} of {stats['num_drafts']} were right" in done.err
    assert (stats["uploads_per_token"] > 0) == (keep == 1)


@pytest.mark.parametrize("warm", [True, False])
def test_warm_and_lazy_start_are_alike(decode: Any, warm: bool) -> None:
    _, resident = decode(f"--prompt_ids={IDS}", "--ignore_stop")
    _, stats = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--keep=2", "--policy=past", f"--warmup={warm}")
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


def test_paths_of_a_users_directory(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of which a shell leaves the ~ as it is, after a flag's name and where it is quoted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.txt").write_text("Hi")
    assert run("convert", checkpoint, "~/model").out == f"{tmp_path / 'model'}\n"
    files = ("--prompts_file=~/prompts.txt", "--out=~/out.jsonl", "--stats_json=~/stats.json")
    assert run("--model=~/model", *files, "--max_new_tokens=2", "--noprogress").code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.txt", "model", "out.jsonl", "stats.json"}
    message = run("--model=~/prompts.txt", "--prompt=Hi", f"--stats_json={tmp_path / 'prompts.txt'}").error()
    assert "--model and --stats_json are the same file" in message


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
    for flag in ("--prompts_file", "--keep", "--policy", "--device_budget", "vramjax plan", "vramjax convert SRC DST"):
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
    assert stats["uploads_per_token"] == 4  # known from the schedule, though no token was decoded from another
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
    assert needed["context"] == capacity(17) == SPLIT  # a whole number of pieces
    _, asked = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--context=300")
    assert asked["context"] == capacity(300) > SPLIT
    assert asked["kv_bytes"] * needed["context"] == needed["kv_bytes"] * asked["context"]
    assert asked["token_ids"] == needed["token_ids"]  # so that a rerun over fewer prompts gives the same answers


# vramjax convert


def test_convert(run: Run, checkpoint: Path, tmp_path: Path, decode: Any) -> None:
    done = run("convert", checkpoint, tmp_path / "a", "--noprogress")
    assert (done.code, done.out, done.err) == (0, f"{tmp_path / 'a'}\n", "")
    assert set(open_packed(tmp_path / "a").groups.values()) == {128}
    assert run("convert", checkpoint, tmp_path / "b", "--noprogress", "--group=32").code == 0
    assert set(open_packed(tmp_path / "b").groups.values()) == {32}
    # The weights are exact at every group, and so are the answers.
    assert decode(f"--prompt_ids={IDS}", f"--model={tmp_path / 'b'}")[1]["token_ids"]


# A real model


def test_demo_model_answers(run: Run, smollm2: Packed, tmp_path: Path) -> None:
    path = tmp_path / "stats.json"
    question = "--prompt=What is the capital of France?"
    policy = ("--keep=4", "--policy=past")
    done = run(f"--model={smollm2.path}", question, *policy, f"--stats_json={path}", "--noprogress")
    assert (done.code, done.out) == (0, "The capital of France is Paris.\n"), done.err
    stats = json.loads(path.read_text())
    assert stats["finish_reason"] == "stop" and stats["token_ids"][-1] == 2
    assert (stats["uploads_per_token"], stats["peak_resident_layers"], stats["end_resident_layers"]) == (26, 8, 4)
    assert stats["resident_entries_end"] == 29
