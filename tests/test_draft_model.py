"""A model that drafts beside another one: checked, planned for, loaded, and gone with it."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from commands import Run, write_chat_model
from faults import OUT_OF_MEMORY, JaxError, Trap, arrays_left, failure_of
from test_interrupts import Interrupts, moments
from tiny_gguf import write_tiny_gguf
from tiny_tokenizers import byte_fallback_json, byte_level_json

import vramjax
from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.packed import Packed, open_packed
from vramjax.decode.sampler import Sampling
from vramjax.decode.spec import EngineSpec
from vramjax.draft_model import DraftModelShape, check_same_tokens
from vramjax.errors import BudgetError, ConfigError
from vramjax.language_model import LanguageModel
from vramjax.memory import FreeMemory
from vramjax.memory_request import MemoryRequest
from vramjax.planning import engine_spec, plan_memory, plan_run
from vramjax.text.tokenizer import Tokenizer

PROMPTS = ["Once upon a time", "def main(argv):", "in it lived 12 cats and 340 dogs, and in it lived"]
SHAPE: dict[str, Any] = {"context": 128, "batch": 2, "progress": False}  # the same everywhere: it is compiled once


@pytest.fixture(scope="module")
def weights(packed: Path) -> Packed:
    return open_packed(packed)


@pytest.fixture(scope="module")
def plain(packed: Path) -> list[list[int]]:
    with vramjax.load(packed, speculate="off", **SHAPE) as model:
        found = {each.index: each.token_ids for each in model.generate_many(PROMPTS, max_new_tokens=20)}
    return [found[i] for i in range(len(PROMPTS))]


def test_the_same_answers_with_a_model_that_drafts(
    packed: Path, plain: list[list[int]], no_array_is_left: None
) -> None:
    """Streamed, drawn and greedy; in fewer sweeps, as the model drafts for itself."""
    with vramjax.load(packed, draft_model=packed, keep=1, speculate=4, **SHAPE) as model:
        found = {each.index: each.token_ids for each in model.generate_many(PROMPTS, max_new_tokens=20)}
        stats = model.stats()
        assert [found[i] for i in range(len(PROMPTS))] == plain
        assert stats["num_accepted_drafts"] == stats["num_drafts"] > 30
        assert stats["uploads_per_token"] == stats["num_layers"] and stats["draft_bytes"] > stats["head_bytes"]
        drawn = model.generate(PROMPTS[0], sampling=Sampling(temperature=1.0, seed=5), max_new_tokens=20).finish()
        assert model.stats()["num_accepted_drafts"] == model.stats()["num_drafts"] > 0
    with vramjax.load(packed, speculate="off", **SHAPE) as model:
        sampling = Sampling(temperature=1.0, seed=5)
        assert model.generate(PROMPTS[0], sampling=sampling, max_new_tokens=20).finish().token_ids == drawn.token_ids


def test_left_to_itself_it_changes_no_answer(packed: Path, plain: list[list[int]]) -> None:
    """Be layers streamed or not, and be it used or not, which is a matter of times."""
    for keep in (1, None):
        with vramjax.load(packed, draft_model=packed, keep=keep, **SHAPE) as model:
            assert model.generate(PROMPTS[0], max_new_tokens=20).finish().token_ids == plain[0]
            assert model._engine.speculation is not None


def test_within_a_budget(weights: Packed) -> None:
    """All of it counts: the smallest budget that does with it is larger by what it takes."""
    settings: dict[str, Any] = SHAPE | {"speculate": 3}
    shape = {"config": weights.config, "groups": weights.groups}
    with LanguageModel(weights, None, keep=1, **settings) as model:
        smallest, spec = model.plan.device.total_bytes, model.spec
    draft_bytes = DraftModelShape(**shape).num_bytes(spec)
    assert draft_bytes > weights.config.num_layers * weights.layer_nbytes + weights.head_nbytes + spec.kv_bytes
    settings |= {"device_budget": smallest + draft_bytes}
    with LanguageModel(weights, None, draft=weights, **settings) as model:
        assert model.plan.device.draft_bytes == draft_bytes
        assert model.plan.device.total_bytes == smallest + draft_bytes
        assert len(model.generate([1, 40, 50], max_new_tokens=9, ignore_stop=True).finish().token_ids) == 9
        stats = model.stats()
        assert stats["uploads_per_token"] == stats["num_layers"] and stats["draft_bytes"] == draft_bytes
        assert stats["num_accepted_drafts"] == stats["num_drafts"] > 0
    settings["device_budget"] -= 1
    with pytest.raises(BudgetError, match=r"draft model [\d.]+ MiB\): .*, or do without the draft model, which takes"):
        LanguageModel(weights, None, draft=weights, **settings)


def test_its_slots_are_counted(weights: Packed) -> None:
    spec = engine_spec(weights.config, weights.groups, context=512, device=jax.devices()[0])
    shape = DraftModelShape(config=weights.config, groups=weights.groups)
    free = FreeMemory(device_bytes=1 << 33, host_bytes=1 << 34, is_shared=False)

    def draft_bytes(num_slots: int, context: int) -> int:
        sized = replace(spec, num_slots=num_slots, context=context, depth=5)
        return plan_memory(sized, weights.head_nbytes, MemoryRequest(keep=1), free, shape).device.draft_bytes

    assert draft_bytes(8, 512) - draft_bytes(1, 512) >= 7 * spec.kv_bytes
    # Blocks of a prompt are those of the large model, unless they are longer than its own context.
    long = replace(spec, context=1 << 20, chunk_rows=128, chunks_per_block=8)
    assert shape.spec(replace(long, context=1024)).block_sizes == [128, 256, 1024]
    short = replace(shape, config=replace(weights.config, max_positions=512))
    assert short.spec(long).block_sizes == [128]
    assert short.spec(replace(long, chunks_per_block=4)).block_sizes == [128, 256, 512]
    assert draft_bytes(1, 4096) - draft_bytes(1, 512) >= 7 * spec.kv_bytes
    with pytest.raises(BudgetError, match=r"the embedding, the draft model \([\d.]+ MiB\) and the KV cache need"):
        small = FreeMemory(device_bytes=1 << 20, host_bytes=1 << 34, is_shared=False)
        plan_memory(spec, weights.head_nbytes, MemoryRequest(keep=1), small, shape)
    devices = jax.devices()[:1] * 2
    groups = weights.config, weights.groups
    _, plans = plan_run(*groups, MemoryRequest(keep=1), context=64, devices=devices, draft=shape)
    assert plans[0].device.draft_bytes > 0 == plans[1].device.draft_bytes


def test_interrupts(packed: Path, plain: list[list[int]], nothing_is_left: None) -> None:
    """At any moment of a load, nothing is left of it; of an answer, the next one is right, and drafted as before."""

    def load() -> vramjax.LanguageModel:
        return vramjax.load(packed, draft_model=packed, keep=1, speculate=3, **SHAPE)

    def answer() -> None:
        found = {each.index: each.token_ids for each in model.generate_many(PROMPTS, max_new_tokens=12)}
        assert [found[i] for i in range(len(PROMPTS))] == [ids[:12] for ids in plain]
        stats = model.stats()
        assert stats["num_accepted_drafts"] == stats["num_drafts"] > 12
        assert stats["uploads_per_token"] == stats["num_layers"]

    before, num_interrupted = jax.live_arrays(), 0
    for at in moments(lambda: load().close(), 3):
        with Interrupts(at), contextlib.suppress(KeyboardInterrupt):
            load().close()
        gc.collect()
        assert arrays_left(before) == [], at
    with load() as model:
        for at in moments(answer, 6):
            with Interrupts(at):
                try:
                    answer()
                except KeyboardInterrupt:
                    num_interrupted += 1
            answer()
    assert num_interrupted >= 4


@pytest.mark.parametrize("fuses_tile", [False, True])  # as on a CPU, and as on a GPU
def test_a_step_that_fails(
    packed: Path,
    plain: list[list[int]],
    traps: dict[str, Trap],
    nothing_is_left: None,
    fuses_tile: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of either model, before or after its work: the error comes out, and the next answer is right."""
    monkeypatch.setattr(EngineSpec, "is_one_program", fuses_tile)
    settings, trap, before = (
        SHAPE | {"draft_model": packed, "keep": 1, "speculate": 3},
        traps["step"],
        jax.live_arrays(),
    )
    num_calls = trap.count(lambda: vramjax.load(packed, **settings).close())
    for num_passing in (0, num_calls - 1):
        trap.set(num_passing, lambda: JaxError(OUT_OF_MEMORY))
        error = failure_of(vramjax.load, packed, **settings)
        assert isinstance(error, BudgetError) and "has no memory left for " in str(error)
        assert trap.take_off() and arrays_left(before) == []
    with vramjax.load(packed, **settings) as model:
        num_calls = trap.count(lambda: list(model.generate_many(PROMPTS, max_new_tokens=12)))
        places = (0, num_calls // 16, num_calls // 8, num_calls // 4, num_calls - 1)
        for num_passing, is_after in itertools.product(places, (False, True)):
            trap.set(num_passing, lambda: JaxError("INTERNAL: the link is down"), is_after=is_after)
            error = failure_of(lambda: list(model.generate_many(PROMPTS, max_new_tokens=12)))
            assert trap.take_off() and isinstance(error, JaxError)
            assert model.generate(PROMPTS[0], max_new_tokens=12).finish().token_ids == plain[0][:12]
            assert model.stats()["num_accepted_drafts"] == model.stats()["num_drafts"] > 0


def test_a_tokenizer_that_differs(weights: Packed, packed: Path, tmp_path: Path) -> None:
    config = weights.config
    tokenizer, other = (
        Tokenizer({"tokenizer.json": byte_level_json()}),
        Tokenizer({"tokenizer.json": byte_fallback_json()}),
    )
    data = json.loads(byte_level_json())
    data["model"]["vocab"] = {
        {"Ġt": "Ġth", "Ġth": "Ġt"}.get(token, token): i for token, i in data["model"]["vocab"].items()
    }
    swapped = Tokenizer({"tokenizer.json": json.dumps(data)})
    check_same_tokens((config, tokenizer), (config, tokenizer))
    check_same_tokens((config, None), (config, None))
    expected = "expected the same tokenizer: choose a smaller model of the same family"
    sizes = len(other.vocabulary), len(tokenizer.vocabulary)
    assert sizes[0] != sizes[1]
    with pytest.raises(ConfigError) as caught:
        check_same_tokens((config, other), (config, tokenizer))
    assert f"draft_model has a vocabulary of {sizes[0]} tokens and the model one of {sizes[1]}" in str(caught.value)
    assert str(caught.value).endswith(expected)
    first = min(tokenizer._backend.get_vocab()[token] for token in ("Ġt", "Ġth"))
    with pytest.raises(ConfigError, match=rf"2 differ, as token {first}: 'Ġth?' in draft_model, 'Ġth?' in the model"):
        check_same_tokens((config, swapped), (config, tokenizer))
    with pytest.raises(ConfigError, match="the model has a tokenizer and draft_model has none; expected"):
        check_same_tokens((config, None), (config, tokenizer))
    with pytest.raises(ConfigError, match=r"draft_model has a vocabulary of 9 and the model one of \d+; expected"):
        check_same_tokens((replace(config, vocab_size=9), None), (config, None))
    bare = write_chat_model(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ConfigError, match="the model has a tokenizer and draft_model has none"):
        vramjax.load(packed, draft_model=bare, cache_dir=tmp_path / "cache", progress=False)


def test_a_plan_compares_what_tokenizers_there_are(
    run: Run, packed: Path, checkpoint: Path, smollm2_gguf: Path, tmp_path: Path
) -> None:
    other = write_chat_model(tmp_path / "other")
    (other / "tokenizer.json").write_text(byte_fallback_json(), encoding="utf-8")
    (other / "tokenizer_config.json").unlink()
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(other / "config.json", alone)
    bare = write_tiny_gguf(tmp_path / "bare.gguf", "llama")
    for draft in (packed, checkpoint, alone, alone / "config.json", bare):
        assert run("plan", f"--model={packed}", f"--draft_model={draft}").code == 0
    for model, draft in ((packed, other), (checkpoint, other), (other, checkpoint), (packed, smollm2_gguf)):
        message = run("plan", f"--model={model}", f"--draft_model={draft}").error()
        assert "expected the same tokenizer" in message, message
    (other / "model.safetensors").unlink()  # its config.json is enough for a plan
    assert "expected the same tokenizer" in run("plan", f"--model={packed}", f"--draft_model={other}").error()
    (other / "tokenizer.json").write_text("{}")
    assert f"draft_model: {other}: tok" in run("plan", f"--model={packed}", f"--draft_model={other}").error()


def test_the_command(
    run: Run, packed: Path, checkpoint: Path, plain: list[list[int]], tmp_path: Path, no_array_is_left: None
) -> None:
    draft = convert(open_hf(checkpoint), tmp_path / "draft", group=64, progress=False)  # of another geometry
    prompts, fixed = tmp_path / "prompts.txt", (f"--model={packed}", "--keep=1", "--context=128", "--batch=2")
    prompts.write_text("\n".join(PROMPTS))
    fixed = (*fixed, f"--prompts_file={prompts}", "--max_new_tokens=20", "--noprogress")
    stats, out = tmp_path / "stats.json", tmp_path / "out.jsonl"
    done = run(*fixed, f"--out={out}", f"--draft_model={draft}", "--speculate=3", f"--stats_json={stats}")
    assert done.code == 0, done.err
    assert [json.loads(line)["token_ids"] for line in out.read_text().splitlines()] == plain
    assert re.search(r"drafts +\d+ of \d+ were right", done.err) and ", draft model " in done.err
    num_bytes, ms = (json.loads(stats.read_text())[name] for name in ("draft_bytes", "ms_per_draft"))
    assert ms > 0 and f"; {ms:.1f} ms to draft one more" in done.err
    done = run("plan", fixed[0], *fixed[2:4], f"--draft_model={draft}", "--speculate=3")
    found = re.search(r"^  draft model +stays for good, with all of its own +([\d.]+) MiB$", done.out, re.MULTILINE)
    assert found and float(found[1]) == pytest.approx(num_bytes / 2**20, abs=0.051), done.out
    for speculate in ("off", "0"):
        done = run(f"--model={packed}", "--prompt_ids=1", f"--draft_model={packed}", f"--speculate={speculate}")
        assert done.error().startswith("draft_model is given and speculate is ")
    for asked in (("--prompt_ids=1",), ("--plan",)):
        done = run(f"--model={packed}", *asked, "--draft_model=nowhere")
        assert re.match(r"draft_model: .*nowhere' does not exist", done.error())
