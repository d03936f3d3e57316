"""What goes into one program: layers, a sweep, or several in a row change no bit, and are compiled once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from greedy import decode

from vramjax.decode import layer_loop, tile_programs
from vramjax.decode.decoding import DecodingStats
from vramjax.decode.sampler import Sampling
from vramjax.decode.scheduler import Request
from vramjax.errors import VramjaxError
from vramjax.language_model import LanguageModel

pytestmark = pytest.mark.usefixtures("override")  # a float32 KV cache


@pytest.mark.parametrize("size", [2, 3, 5])
def test_layers_in_one_call_change_no_bit(pack, override, size: int, monkeypatch: pytest.MonkeyPatch):
    packed, prompt = pack("smollm2"), np.arange(1, 140)
    expected = decode(packed, prompt, 6, keep=2)
    calls: list[int] = []
    layer_steps = layer_loop.layer_steps

    def counted(weights, *args, **kwargs):
        calls.append(len(weights))
        return layer_steps(weights, *args, **kwargs)

    monkeypatch.setattr(layer_loop, "layer_steps", counted)
    override(max_layers_per_call=size)
    ids, logits = decode(packed, prompt, 6)
    assert set(calls) == {size, 5 % size} - {0}  # 5 layers: as many as fit, and the rest; each is compiled before
    assert ids == expected[0]
    np.testing.assert_array_equal(logits, expected[1])


def test_a_sweep_in_one_program_changes_no_bit(pack, override, monkeypatch: pytest.MonkeyPatch):
    calls: list[int] = []
    tile_sweep = layer_loop.tile_sweep

    def counted(head, weights, *args, **kwargs):
        calls.append(len(weights))
        return tile_sweep(head, weights, *args, **kwargs)

    monkeypatch.setattr(layer_loop, "tile_sweep", counted)
    packed, prompts = pack("qwen3"), [list(range(1, 140)), [5, 6, 7] * 5, [9] * 20]
    sampling = [Sampling(), Sampling(temperature=0.8, top_k=20, seed=3), Sampling(temperature=1.2, top_p=0.9, seed=4)]

    def answers(**kwargs) -> tuple[list[list[int]], list[bytes]]:
        logits: dict[int, bytes] = dict.fromkeys(range(len(prompts)), b"")

        def on_logits(i: int, row: np.ndarray) -> None:
            logits[i] += row.tobytes()

        with LanguageModel(packed, None, context=256, progress=False, **kwargs) as model:
            many = model.generate_many(
                prompts, max_new_tokens=9, sampling=sampling, ignore_stop=True, on_logits=on_logits
            )
            return [answer.token_ids for answer in sorted(many, key=lambda answer: answer.index)], list(logits.values())

    override(fuses_tile=False)
    expected = answers(batch=1, keep=1)
    assert not calls
    override(fuses_tile=True)
    for kwargs in ({"batch": 1}, {"batch": 3}, {"batch": 3, "speculate": 4}):
        calls.clear()
        assert answers(**kwargs) == expected
        assert set(calls) == {packed.config.num_layers} and len(calls) > 3  # one of them before all prompts
    # By the time that a token is known to be a stop id, three more sweeps are queued.
    override(fuses_tile=True, max_turns=1)
    with LanguageModel(packed, None, context=256, progress=False) as model:
        calls.clear()
        request = Request(prompt_ids=prompts[0], limit=9, stop_ids=frozenset({expected[0][0][2]}), sampling=sampling[0])
        assert [token.id for token in model._engine.decode([request])] == expected[0][0][:3]
        assert len(calls) == 2 + 3


@pytest.mark.parametrize("max_turns", [2, 4])
def test_sweeps_in_a_row_in_one_program_change_no_token(
    pack, override, max_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, alone and together, to the limit, to the context's end, and to a stop id in any turn."""
    turns: list[int] = []
    tile_turns = layer_loop.tile_turns

    def counted(*args, num_turns: int, **kwargs):
        turns.append(num_turns)
        return tile_turns(*args, num_turns=num_turns, **kwargs)

    monkeypatch.setattr(layer_loop, "tile_turns", counted)
    packed, prompts = pack("qwen3"), [list(range(1, 40)), [5, 6, 7] * 5, [9] * 20]
    sampling = [Sampling(), Sampling(temperature=0.8, top_k=20, seed=3), Sampling(temperature=1.2, top_p=0.9, seed=4)]
    limits = [26, 14, 11]  # the first fills the context: its last token takes no position

    def decode_all(stops: list[frozenset[int]], batch: int) -> tuple[list[list[int]], DecodingStats]:
        requests = [
            Request(prompt_ids=prompt, limit=limit, stop_ids=stop, sampling=how)
            for prompt, limit, stop, how in zip(prompts, limits, stops, sampling, strict=True)
        ]
        tokens: list[list[int]] = [[] for _ in requests]
        with LanguageModel(packed, None, context=64, batch=batch, progress=False) as model:
            decoding = model._engine.decode(requests)
            for token in decoding:
                tokens[token.request_idx].append(token.id)
        assert decoding.stats.num_tokens == sum(map(len, tokens))
        assert batch > 1 or decoding.stats.num_sweeps == decoding.stats.num_tokens, "none is counted behind a stop id"
        return tokens, decoding.stats

    never = [frozenset[int]()] * 3
    override(fuses_tile=False)
    expected, one_by_one = decode_all(never, batch=3)
    assert [len(ids) for ids in expected] == limits and not turns
    override(fuses_tile=True, max_turns=max_turns)
    for batch in (1, 3):
        turns.clear()
        tokens, stats = decode_all(never, batch)
        assert tokens == expected and set(turns) == {max_turns} and len(turns) > 2
    assert (stats.num_sweeps, stats.num_rows) == (one_by_one.num_sweeps, one_by_one.num_rows)
    for i in range(2, 2 + max_turns):
        stops = [frozenset({ids[i]}) for ids in expected]
        tokens, _ = decode_all(stops, batch=3)
        assert decode_all(stops, batch=1)[0] == tokens
        ends = [min(map(ids.index, stop)) for ids, stop in zip(expected, stops, strict=True)]
        assert tokens == [ids[: end + 1] for ids, end in zip(expected, ends, strict=True)]


def test_an_answer_waits_for_a_compiler_before_its_second_token_or_never(pack, override) -> None:
    """There are two programs of a sweep, one of which is of several in a row, for each way to draw."""
    override(fuses_tile=True, max_turns=3)
    # No other test has two slots, whose programs might be there already.
    with LanguageModel(pack("qwen3"), None, context=64, batch=2, progress=False) as model:
        programs: tuple[Any, ...] = (tile_programs.tile_sweep, tile_programs.tile_turns)
        for sampling in (Sampling(), Sampling(temperature=0.7, seed=1)):
            request = Request(prompt_ids=[1, 2, 3], limit=9, sampling=sampling)
            sizes = [tuple(program._cache_size() for program in programs) for _ in model._engine.decode([request])]
            grown = 0 if sampling.is_greedy else 1
            assert set(sizes[1:]) == {sizes[-1]} and len(sizes) == 9
            assert all(after - before == grown for before, after in zip(sizes[0], sizes[-1], strict=True))


def test_stats_count_tokens_as_they_are_handed_out(pack, override) -> None:
    override(fuses_tile=True, max_turns=4)
    with LanguageModel(pack("qwen3"), None, context=64, progress=False) as model:
        decoding = model._engine.decode([Request(prompt_ids=[1, 2, 3], limit=9)])
        for taken, token in enumerate(decoding, 1):
            assert decoding.stats.num_tokens == decoding.stats.num_sweeps == taken
            assert decoding.stats.num_ended == token.is_last


def test_compiles_do_not_grow_with_layers_tokens_or_windows(pack, override):
    from vramjax.decode.tile_programs import begin_tile, embed_step, end_tile, take_row
    from vramjax.model.layer import layer_steps
    from vramjax.residency import programs
    from vramjax.residency.jit_options import JitOptions

    override(max_layers_per_call=1)
    options = JitOptions(static_argnames=("spec",), donate_argnums=(1, 2))
    compiled: tuple[Any, ...] = (programs.jitted(layer_steps, options), programs.carrying(layer_steps, options))
    compiled += (embed_step, begin_tile, take_row, end_tile)
    packed = pack("llama_bias")
    decode(packed, np.arange(10), 4, context=256)
    before = [f._cache_size() for f in compiled]
    decode(packed, np.arange(150), 12, context=256, keep=1)
    decode(packed, np.arange(3), 12, context=200, keep=1, policy="both_sides")
    assert [f._cache_size() for f in compiled] == before
    with LanguageModel(pack("llama"), None, context=256, keep=2, policy="pinned_ring", progress=False) as model:
        # Uploads in the calls of the layer step need programs of their own, all of them compiled before any prompt.
        before = [f._cache_size() for f in compiled]
        for prompt in ([1] * 150, [2], [3] * 140):
            assert model.generate(prompt, max_new_tokens=5, ignore_stop=True).finish().token_ids
        assert model.stats()["bytes_streamed_per_token"] > 0
    assert [f._cache_size() for f in compiled] == before


def test_a_program_that_gives_other_bits_is_noticed(pack, monkeypatch: pytest.MonkeyPatch):
    from vramjax.residency import programs

    carrying = programs.carrying

    def one_off(function, options):
        def call(slots, hosts, weights, kv, h, *args, **kwargs):
            copied, (h, kv) = carrying(function, options)(slots, hosts, weights, kv, h, *args, **kwargs)
            return copied, (h.at[0, 0].add(2.0**-10), kv)

        return call

    monkeypatch.setattr(programs, "carrying", one_off)
    with pytest.raises(VramjaxError, match="a layer gives other bits when an upload travels in its program"):
        LanguageModel(pack("smollm2"), None, keep=3, progress=False)
