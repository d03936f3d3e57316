"""The whole decode path against golden logits: convert, load, prefill, decode, for every family."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import LONG_VARIANTS, VARIANTS, load_golden, write_tiny

from vramjax import language_model
from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.packed import Packed, open_packed
from vramjax.errors import ConfigError
from vramjax.language_model import LanguageModel

ON_CPU = jax.default_backend() == "cpu"
# Weights are exact in Q8, so what is left is float32 rounding, in the goldens too: up to 2e-4 of logits of order 10.
# The GPU's kernels split activations in two bfloat16, which costs some accuracy.
SPLIT_ATOL = 1e-2
ATOL = 6e-4 if ON_CPU else SPLIT_ATOL


@pytest.fixture
def pack(tmp_path: Path):
    def pack(variant: str, *, group: int = 128, **kwargs) -> Packed:
        source = open_hf(write_tiny(tmp_path / variant, variant, **kwargs))
        return open_packed(convert(source, tmp_path / f"{variant}-packed", group=group, progress=False))

    return pack


@pytest.fixture(autouse=True)
def override(monkeypatch: pytest.MonkeyPatch):
    """Changes what every engine is compiled for; a float32 KV cache, unless a test says otherwise."""
    original = language_model.engine_spec

    def override(**changes) -> None:
        changes = {"kv_dtype": np.dtype(np.float32)} | changes
        monkeypatch.setattr(
            language_model, "engine_spec", lambda *a, **k: dataclasses.replace(original(*a, **k), **changes)
        )

    override()
    return override


def decode(packed: Packed, prompt: np.ndarray, num_new: int, **kwargs) -> tuple[list[int], np.ndarray]:
    """Greedy ids and the logits [num_new, V] that they came from."""
    rows: list[np.ndarray] = []
    with LanguageModel(packed, None, progress=False, **kwargs) as model:
        generation = model.generate(
            prompt.tolist(), max_new_tokens=num_new, ignore_stop=True, on_logits=lambda row: rows.append(row.copy())
        ).finish()
    return generation.token_ids, np.stack(rows)


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


@pytest.mark.parametrize("variant", ["llama", "smollm2"])
def test_kernels_in_interpret_mode(pack, override, variant: str):
    """The GPU's kernels, run by JAX."""
    override(backend="interpret", tile_rows=16, chunk_rows=64)
    golden = load_golden(variant)
    num_prompt = int(golden["num_prompt"])
    ids, logits = decode(pack(variant), golden["tokens"][:num_prompt], 3)
    assert ids == golden["tokens"][num_prompt : num_prompt + 3].tolist()
    np.testing.assert_allclose(logits, golden["logits"][num_prompt - 1 : num_prompt + 2], atol=SPLIT_ATOL, rtol=0)


@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_a_kv_cache_in_bfloat16(pack, override, variant: str):
    """What a GPU uses: 8 bits of each key and value, so logits of order 10 are off by about 0.1."""
    override(kv_dtype=jnp.dtype(jnp.bfloat16))
    golden = load_golden(variant)
    num_prompt = int(golden["num_prompt"])
    _, logits = decode(pack(variant), golden["tokens"][:num_prompt], 1)
    np.testing.assert_allclose(logits[0], golden["logits"][num_prompt - 1], atol=0.5, rtol=0)
    assert not np.allclose(logits[0], golden["logits"][num_prompt - 1], atol=ATOL, rtol=0)  # it was in effect


def test_a_sequence_leaves_nothing_behind_for_the_next(pack):
    golden = load_golden("qwen3")
    prompt = golden["tokens"][:40].tolist()
    with LanguageModel(pack("qwen3"), None, context=256, progress=False) as model:
        first = model.generate(prompt, max_new_tokens=8, ignore_stop=True).finish().token_ids
        model.generate([3] * 200, max_new_tokens=40, ignore_stop=True).finish()
        broken_off = model.generate(prompt, max_new_tokens=8, ignore_stop=True)
        next(broken_off)
        del broken_off
        assert model.generate(prompt, max_new_tokens=8, ignore_stop=True).finish().token_ids == first
    assert first == golden["tokens"][40:48].tolist()


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
        with pytest.raises(ConfigError, match="max_new_tokens is -1"):
            model.generate([1], max_new_tokens=-1)


def test_compiles_do_not_grow_with_layers_tokens_or_windows(pack):
    from vramjax.decode.engine import embed_step, first_row, token_step
    from vramjax.model.layer import layer_step

    compiled: tuple[Any, ...] = (layer_step, token_step, embed_step, first_row)
    packed = pack("llama_bias")
    decode(packed, np.arange(10), 4, context=256)
    before = [f._cache_size() for f in compiled]
    decode(packed, np.arange(150), 12, context=256, keep=1)
    decode(packed, np.arange(3), 12, context=200, keep=1, policy="both_sides")
    assert [f._cache_size() for f in compiled] == before
