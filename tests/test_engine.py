"""The whole decode path against golden logits: convert, load, prefill, decode, for every family."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from greedy import decode
from kernels import KERNELS
from tiny import LONG_VARIANTS, VARIANTS, load_golden

from vramjax import planning
from vramjax.checkpoint.packed import Packed
from vramjax.decode import layer_loop
from vramjax.errors import BudgetError, ConfigError, VramjaxError
from vramjax.language_model import LanguageModel

ON_CPU = jax.default_backend() == "cpu"
# Weights are exact in Q8, so what is left is float32 rounding, in the goldens too: up to 2e-4 of logits of order 10.
# The GPU's kernels take activations in steps of 3e-5 of the largest of a group, which costs some accuracy.
KERNEL_ATOL = 2e-2
ATOL = 6e-4 if ON_CPU else KERNEL_ATOL

pytestmark = pytest.mark.usefixtures("override")  # a float32 KV cache


def check_against_golden(packed: Packed, variant: str, num_new: int = 16, **kwargs) -> None:
    golden = load_golden(variant)
    tokens, num_prompt = golden["tokens"], int(golden["num_prompt"])
    ids, logits = decode(packed, tokens[:num_prompt], num_new, **kwargs)
    assert ids == tokens[num_prompt : num_prompt + num_new].tolist()
    expected = golden["logits"][num_prompt - 1 : num_prompt - 1 + num_new]
    np.testing.assert_allclose(logits, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_decoding_matches_the_golden_logits(pack, variant: str):
    check_against_golden(pack(variant), variant)


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize(
    ("variant", "dtype", "group"),
    [("qwen3", "bfloat16", 32), ("llama", "float16", 64), ("smollm2", "mixed", 32), ("qwen3_vl", "bfloat16", 128)],
)
def test_stored_dtype_group_and_window_change_nothing(pack, variant: str, dtype: str, group: int, keep: int | None):
    check_against_golden(pack(variant, dtype=dtype, group=group), variant, keep=keep)


@pytest.mark.parametrize("variant", ["qwen2", "qwen3"])
@pytest.mark.parametrize("chunk_rows", [7, 39, 40, 41], ids=["many", "chunk+1", "chunk", "chunk-1"])
def test_prompts_around_a_chunk(pack, override, variant: str, chunk_rows: int):
    assert int(load_golden(variant)["num_prompt"]) == 40
    override(chunk_rows=chunk_rows)
    check_against_golden(pack(variant), variant, num_new=4)


@pytest.mark.parametrize("num_tokens", [127, 128, 129])
def test_real_chunks_give_the_logits_of_one_chunk(pack, override, num_tokens: int):
    packed = pack("llama")
    prompt = load_golden("llama")["long_tokens"][:num_tokens]
    ids, logits = decode(packed, prompt, 3)
    override(chunk_rows=160)
    expected_ids, expected = decode(packed, prompt, 3)
    assert ids == expected_ids
    np.testing.assert_allclose(logits, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("variant", LONG_VARIANTS)
def test_long_prompts(pack, variant: str):
    golden = load_golden(variant)
    _, logits = decode(pack(variant), golden["long_tokens"], 1)
    np.testing.assert_allclose(logits[0], golden["long_logits"][-1], atol=ATOL, rtol=0)


@pytest.mark.skipif(not ON_CPU, reason="on a GPU all other tests here run the kernels themselves")
@pytest.mark.parametrize("variant", ["llama", "smollm2"])
def test_kernels_in_interpret_mode(pack, override, variant: str):
    """The GPU's kernels, run by JAX."""
    override(backend="interpret", tile_rows=16, chunk_rows=64)
    golden = load_golden(variant)
    num_prompt = int(golden["num_prompt"])
    ids, logits = decode(pack(variant), golden["tokens"][:num_prompt], 3)
    assert ids == golden["tokens"][num_prompt : num_prompt + 3].tolist()
    np.testing.assert_allclose(logits, golden["logits"][num_prompt - 1 : num_prompt + 2], atol=KERNEL_ATOL, rtol=0)


@pytest.mark.parametrize(("num_tokens", "chunks"), [(150, 2), (170, 2), (240, 4), (300, 4)])
def test_blocks_of_several_chunks_give_the_same_bits(pack, override, num_tokens: int, chunks: int):
    """The kernels': XLA's products on a CPU depend on the number of rows."""
    settings = {"backend": KERNELS, "tile_rows": 16, "chunk_rows": 80}
    packed, prompt = pack("llama"), load_golden("llama")["long_tokens"][:num_tokens]
    override(**settings)
    ids, logits = decode(packed, prompt, 2)
    override(**settings, chunks_per_block=chunks)
    again, same = decode(packed, prompt, 2)
    assert again == ids and np.array_equal(same, logits)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_a_kv_cache_in_bfloat16(pack, override, variant: str):
    """What a GPU uses. Only keys and values are rounded: the kernels agree with the float32 reference on them.

    They agree less closely than in float32, as a key that lies between two bfloat16 may be rounded either way.
    """
    packed, golden = pack(variant), load_golden(variant)
    prompt = golden["tokens"][: int(golden["num_prompt"])]
    bfloat16 = jnp.dtype(jnp.bfloat16)
    override(kv_dtype=bfloat16, backend="reference")
    _, expected = decode(packed, prompt, 2)
    # Where there is a GPU, its compiled kernels; interpreted there, XLA may drop the rounding that splits a query.
    override(kv_dtype=bfloat16, backend=KERNELS, tile_rows=16, chunk_rows=64)
    _, logits = decode(packed, prompt, 2)
    np.testing.assert_allclose(logits, expected, atol=2 * KERNEL_ATOL, rtol=0)
    # 8 bits of each key and value cost logits of order 10 about 0.1.
    first = golden["logits"][len(prompt) - 1]
    assert ATOL < np.abs(expected[0] - first).max() < 0.5


def test_a_sequence_leaves_nothing_behind_for_the_next(pack):
    golden = load_golden("qwen3")
    prompt = golden["tokens"][:40].tolist()
    with LanguageModel(pack("qwen3"), None, context=256, progress=False) as model:
        first = model.generate(prompt, max_new_tokens=8, ignore_stop=True).finish().token_ids
        model.generate([3] * 200, max_new_tokens=40, ignore_stop=True).finish()
        broken_off = model.generate(prompt, max_new_tokens=8, ignore_stop=True)
        next(broken_off)
        assert model.generate(prompt, max_new_tokens=8, ignore_stop=True).finish().token_ids == first
        with pytest.raises(VramjaxError, match="another generation has begun"):
            next(broken_off)
        assert model.generate(prompt, max_new_tokens=8, ignore_stop=True).finish().token_ids == first
    assert first == golden["tokens"][40:48].tolist()
    with pytest.raises(VramjaxError, match="the model is closed"):
        model.generate(prompt)


@pytest.mark.parametrize(("fuses_tile", "failing_call"), [(None, 2), (None, 5), (True, 2), (True, 4)])
def test_a_failure_in_a_layer_does_not_spoil_the_next_answer(
    pack, override, fuses_tile: bool | None, failing_call: int, monkeypatch: pytest.MonkeyPatch
):
    """In a prompt and after it; of all layers in one program there is one queued behind the one that fails."""
    if fuses_tile is not None:
        override(fuses_tile=fuses_tile, max_turns=2)
    golden = load_golden("qwen3")
    prompt, expected = golden["tokens"][:40].tolist(), golden["tokens"][40:44].tolist()
    packed, calls = pack("qwen3"), []

    def failing(step, kv_place):
        def call(*args, **kwargs):
            calls.append(1)
            if len(calls) == failing_call:
                args[kv_place][0].delete()  # as a donated cache would be
                raise RuntimeError("a layer failed")
            return step(*args, **kwargs)

        return call

    for keep in (None, 1):
        with LanguageModel(packed, None, keep=keep, progress=False) as model:
            calls.clear()
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a layer failed"):
                loop = model._engine._loop
                for name in ("prefill_steps", "decode_steps"):
                    patch.setattr(loop, name, [failing(step, 1) for step in getattr(loop, name)])
                for name in ("tile_sweep", "tile_turns"):
                    patch.setattr(layer_loop, name, failing(getattr(layer_loop, name), 2))
                model.generate(prompt, max_new_tokens=12, ignore_stop=True).finish()
            assert model.generate(prompt, max_new_tokens=1, ignore_stop=True).finish().token_ids == expected[:1]
            assert model.stats()["uploads_per_token"] == model.schedule.uploads_per_sweep  # the sweep itself was cold
            assert model.generate(prompt, max_new_tokens=4, ignore_stop=True).finish().token_ids == expected


def test_the_context_is_filled_to_its_end_and_no_further(pack):
    """The last token is decoded from the last position; nothing is written past it."""
    packed = pack("llama")
    golden = load_golden("llama")
    prompt = golden["tokens"][:40].tolist()
    with LanguageModel(packed, None, context=45, progress=False) as model:
        generation = model.generate(prompt, max_new_tokens=100, ignore_stop=True).finish()
    assert generation.token_ids == golden["tokens"][40:46].tolist()
    assert generation.finish_reason == "context"
    with LanguageModel(packed, None, context=40, progress=False) as model:
        assert model.generate(prompt, max_new_tokens=100).finish().token_ids == golden["tokens"][40:41].tolist()
        with pytest.raises(ConfigError, match=r"41 tokens; expected at most 40"):
            model.generate([*prompt, 1], max_new_tokens=1).finish()


@pytest.mark.parametrize("bad", [-1, 192, 193])
def test_token_ids_out_of_range_are_refused(pack, bad: int):
    with (
        LanguageModel(pack("llama"), None, progress=False) as model,
        pytest.raises(ConfigError, match=rf"token id {bad} at index 1 .* 0 \.\. 191"),
    ):
        model.generate([5, bad], max_new_tokens=1)


def test_empty_prompts_and_no_new_tokens(pack):
    with LanguageModel(pack("llama"), None, progress=False) as model:
        with pytest.raises(ConfigError, match="no tokens"):
            model.generate([], max_new_tokens=1)
        nothing = model.generate([1, 2], max_new_tokens=0).finish()
        assert (nothing.token_ids, nothing.text, nothing.ms_per_token) == ([], "", None)
        for bad in (-1, 2.5, None, True):
            with pytest.raises(ConfigError, match=f"max_new_tokens is {bad}; expected a whole number"):
                model.generate([1], max_new_tokens=bad)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ConfigError, match="sampling is 'greedy'; expected"):
            model.generate([1], sampling="greedy")  # pyright: ignore[reportArgumentType]


def test_nothing_is_left_on_the_device_when_loading_fails(pack, monkeypatch: pytest.MonkeyPatch):
    packed = pack("llama")

    def num_arrays() -> int:
        return sum(array.size > 1 for array in jax.live_arrays())  # each device keeps a scalar, to wait with

    before = num_arrays()

    def failing(load: Callable[..., Any], layer_idx: int, *arrays: Any, **options: Any):
        if layer_idx == packed.config.num_layers - 1:
            raise KeyboardInterrupt
        return load(layer_idx, *arrays, **options)

    for name in ("load_layer", "read_layer_into"):
        monkeypatch.setattr(packed, name, functools.partial(failing, getattr(packed, name)))
    for keep in (None, 1):
        with pytest.raises(KeyboardInterrupt):
            LanguageModel(packed, None, keep=keep, progress=False)
        assert num_arrays() == before


def test_what_does_not_fit_is_refused_before_it_is_read(pack, monkeypatch: pytest.MonkeyPatch):
    packed = pack("llama")
    monkeypatch.setattr(packed, "load_layer", None)
    monkeypatch.setattr(planning, "free_device_bytes", lambda device: packed.layer_nbytes)
    with pytest.raises(BudgetError, match=r"device memory are free, .*; expected at least .* for a context of 512"):
        LanguageModel(packed, None, progress=False)
    monkeypatch.setattr(planning, "free_device_bytes", lambda device: 1 << 40)
    monkeypatch.setattr(planning, "free_host_bytes", lambda: packed.layer_nbytes)
    with pytest.raises(BudgetError, match=r"of host memory are free, no room for .*; expected at least"):
        LanguageModel(packed, None, keep=1, progress=False)


def test_finish_reasons_and_one_token_for_each_id(pack):
    packed = pack("llama")
    golden = load_golden("llama")
    prompt, ids = golden["tokens"][:40].tolist(), golden["tokens"][40:46].tolist()
    with LanguageModel(packed, None, progress=False) as model:
        model._stop_ids = frozenset({ids[3]})
        stopped = model.generate(prompt, max_new_tokens=6)
        assert [token.id for token in stopped] == ids[: ids.index(ids[3]) + 1] == stopped.token_ids
        assert stopped.finish_reason == "stop"
        ignored = model.generate(prompt, max_new_tokens=ids.index(ids[3]) + 1, ignore_stop=True).finish()
        assert (ignored.token_ids[-1], ignored.finish_reason) == (ids[3], "length")


def test_a_policy_that_does_not_exist(pack):
    with pytest.raises(ConfigError, match="policy is 'ahead'; expected one of past, both_sides, pinned_ring"):
        LanguageModel(pack("llama"), None, keep=1, policy="ahead", progress=False)  # pyright: ignore[reportArgumentType]


def test_arguments_of_the_wrong_kind(pack):
    packed = pack("llama")
    for arguments, message in (
        ({"context": "5"}, "context is '5'; expected 1 .. 512"),
        ({"context": True}, "context is True"),
        ({"devices": "cpu"}, "devices is 'cpu'; expected a list of places in jax.devices"),
        ({"keep": 2.5}, "keep is 2.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            LanguageModel(packed, None, progress=False, **arguments)  # pyright: ignore[reportArgumentType]


def test_what_is_resident_is_said_before_the_first_sweep(pack):
    packed = pack("llama")
    for keep, warm, resident in ((None, None, 3), (2, True, 2), (2, False, 0)):
        with LanguageModel(packed, None, keep=keep, warm_up=warm, progress=False) as model:
            model.generate([1], max_new_tokens=0).finish()
            assert model.stats()["end_resident_layers"] == resident


def test_threads_do_not_mix_their_answers(pack):
    """Each gets its own answer, or is told that another has begun."""
    golden = load_golden("llama")
    prompts = [golden["tokens"][:40].tolist(), golden["tokens"][5:40].tolist()]
    with LanguageModel(pack("llama"), None, keep=1, progress=False) as model:
        expected = [model.generate(p, max_new_tokens=12, ignore_stop=True).finish().token_ids for p in prompts]

        def answer(which: int) -> list[int] | None:
            try:
                return model.generate(prompts[which], max_new_tokens=12, ignore_stop=True).finish().token_ids
            except VramjaxError as error:
                assert "another generation has begun" in str(error)
                return None

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(answer, [0, 1] * 6))
    assert any(answers)
    assert all(ids is None or ids == expected[i % 2] for i, ids in enumerate(answers))
