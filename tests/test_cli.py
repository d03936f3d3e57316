"""The command line: what it prints, what it writes, and what it plans."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import pytest
from commands import IDS, NUM_LAYERS, STOP_ID, Run, write_chat_model

from vramjax._version import __version__
from vramjax.checkpoint.packed import HEAD_FILE, Packed, layer_file, open_packed
from vramjax.residency.budget import AUTO_RESERVE_BYTES
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
    assert f"{uploads} layers a token" in done.err


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
    assert needed["context"] == 256  # a whole number of pieces
    _, asked = decode(f"--prompt_ids={IDS}", "--ignore_stop", "--context=300")
    assert asked["context"] == 512
    assert asked["kv_bytes"] == 2 * needed["kv_bytes"]
    assert asked["token_ids"] == needed["token_ids"]  # so that a rerun over fewer prompts gives the same answers


# A budget in bytes


def test_a_budget_is_kept(decode: Any, run: Run, packed: Path) -> None:
    """As many layers stay as fit, to the byte, and the smallest budget of which an error speaks is enough."""
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop")
    _, resident = decode(*prompt)
    layer_bytes = resident["layer_bytes"]
    largest, smallest = resident["planned_peak_bytes"], resident["planned_peak_bytes"] - 4 * layer_bytes
    for budget, keep in (
        (2 * largest, 5),
        (largest, 5),
        (largest - 1, 4),
        (largest - layer_bytes, 4),
        (largest - layer_bytes - 1, 3),
        (smallest, 1),
    ):
        _, stats = decode(*prompt, f"--device_budget={budget}")
        assert stats["peak_resident_layers"] == keep
        assert stats["planned_peak_bytes"] == largest - (NUM_LAYERS - keep) * layer_bytes <= budget
        assert stats["device_budget"] == budget
        assert stats["token_ids"] == resident["token_ids"]
        streamed = 0 if keep == NUM_LAYERS else NUM_LAYERS - keep + 1
        assert stats["uploads_per_token"] == streamed == NUM_LAYERS - stats["pinned_layers"]
        assert stats["bytes_streamed_per_token"] == streamed * layer_bytes
    too_small = run(f"--model={packed}", *prompt, "--max_new_tokens=12", f"--device_budget={smallest - 1}").error()
    named = re.search(r"expected at least ([\d.]+ MiB) for a context of 17", too_small)
    assert named, too_small
    assert decode(*prompt, f"--device_budget={named[1]}")[1]["peak_resident_layers"] >= 1


def test_a_budget_that_a_shorter_context_fits(decode: Any, run: Run, packed: Path) -> None:
    prompt = (f"--model={packed}", f"--prompt_ids={IDS}")
    _, stats = decode(*prompt, "--keep=1", "--context=1000")
    message = run(*prompt, "--context=4000", f"--device_budget={stats['planned_peak_bytes']}").error()
    named = re.search(r"or lower the context to (\d+), which fits$", message)
    assert named and 1000 <= int(named[1]) < 4000, message
    budget = f"--device_budget={stats['planned_peak_bytes']}"
    assert decode(*prompt, budget, f"--context={named[1]}")[1]["peak_resident_layers"] == 1
    assert "expected at least" in run(*prompt, budget, f"--context={int(named[1]) + 1}").error()
    assert run(*prompt, "--device_budget=1B").error().endswith(": raise it to that")  # no context is short enough


def test_nothing_asked_is_what_is_free(decode: Any, run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop", "--progress")
    done, resident = decode(*prompt)
    assert resident["policy"] == "resident" and "note:" not in done.err
    free = AUTO_RESERVE_BYTES + resident["planned_peak_bytes"]
    for left, keep in ((0, 5), (1, 4), (2 * resident["layer_bytes"], 3)):
        monkeypatch.setattr("vramjax.planning.free_device_bytes", lambda device, left=left: free - left)
        for asked in ((), ("--device_budget=auto",)):
            done, stats = decode(*prompt, *asked)
            assert stats["peak_resident_layers"] == keep
            assert stats["device_budget"] == resident["planned_peak_bytes"] - left
            assert stats["token_ids"] == resident["token_ids"]
            notes = [line for line in done.err.splitlines() if line.startswith("note: ")]
            if keep == NUM_LAYERS:
                assert not notes
            else:
                (note,) = notes
                assert f"{stats['uploads_per_token']} of them are streamed for each token" in note
    assert "note:" not in decode(*prompt, "--noprogress")[0].err
    assert "note:" not in decode(*prompt, "--keep=2")[0].err


@pytest.mark.parametrize("keep", ["--keep=1", "--keep=3", "--keep=2 --policy=past"])
def test_every_host_tier_gives_the_same_answer(decode: Any, keep: str) -> None:
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop", *keep.split())
    _, pinned = decode(*prompt, "--host=pinned")
    _, mapped = decode(*prompt, "--host=mapped")
    assert (pinned["host"], mapped["host"]) == ("pinned", "mapped")
    assert mapped["host_buffers"] == 8
    assert pinned["token_ids"] == mapped["token_ids"] == decode(f"--prompt_ids={IDS}", "--ignore_stop")[1]["token_ids"]
    assert pinned["uploads"] == mapped["uploads"] > 12


def test_what_does_not_fit_into_host_memory_is_read_from_disk(
    decode: Any, run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = (f"--prompt_ids={IDS}", "--ignore_stop", "--keep=1", "--progress")
    done, pinned = decode(*prompt)
    assert "note:" not in done.err
    asked = (f"--model={packed}", *prompt, "--max_new_tokens=12")
    monkeypatch.setattr("vramjax.planning.process_host_bytes", lambda: 1 << 30)
    monkeypatch.setattr("vramjax.host_tier.host_bytes", lambda geometry: 1 << 30)  # as if layers were that large
    message = run(*asked, "--host_budget=1MiB").error()
    smallest = re.search(r"host_budget is .*; expected at least ([\d.]+) GiB: raise it to that", message)
    assert smallest and 3.25 <= float(smallest[1]) < 4
    done, mapped = decode(*prompt, f"--host_budget={smallest[1]}GiB")
    assert (mapped["host"], mapped["host_buffers"], mapped["token_ids"]) == ("mapped", 2, pinned["token_ids"])
    assert "note: the layers that are streamed do not fit into host memory" in done.err
    assert "host_budget is" in run(*asked, f"--host_budget={smallest[1]}GiB", "--host=pinned").error()
    assert decode(*prompt, "--host_budget=7GiB")[1]["host"] == "pinned"
    for command in ((*asked, "--keep=9"), ("plan", f"--model={packed}")):  # also where nothing is streamed
        assert "host_budget is" in run(*command, "--host_budget=1100MiB").error()


# The plan


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
