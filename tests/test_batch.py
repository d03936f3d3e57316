"""Many sequences at once: each gets the bits that it gets alone, whatever else is decoded and in whatever order."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import batches
import jax
import numpy as np
import pytest
from batches import Answer, MakeEngine, answers, assert_same, make_requests
from packed_dirs import pack_tiny
from tiny import prompt_ids

from vramjax.checkpoint.packed import Packed
from vramjax.decode import decoding as decoding_module
from vramjax.decode.decoding import Decoding
from vramjax.decode.engine import Engine
from vramjax.decode.sampler import RowSampling, Sampling
from vramjax.decode.scheduler import Request
from vramjax.decode.speculation import Speculation
from vramjax.decode.sweep_plan import Join, SweepPlan, TileRows
from vramjax.decode.tile_programs import begin_tile, embed_step, end_tile, take_row
from vramjax.errors import VramjaxError
from vramjax.loading import open_tokenizer

VARIANT = "qwen3"
PROMPTS = Path(__file__).resolve().parent.parent / "scripts" / "data" / "prompts-40.jsonl"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack_tiny(tmp_path_factory.mktemp("tiny"), VARIANT)


@pytest.fixture(scope="module")
def make_engine() -> Iterator[MakeEngine]:
    """Engines of a model, one for each window and change of what is compiled; closed at the end."""
    engines: list[Engine] = []

    @functools.cache
    def make(packed: Packed, **settings: Any) -> Engine:
        engines.append(batches.make_engine(packed, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="module")
def alone(packed: Packed, make_engine: MakeEngine) -> Callable[[Request], Answer]:
    """What a request gets from an engine of one slot."""
    engine, known = make_engine(packed, num_slots=1), {}

    def alone(request: Request) -> Answer:
        if id(request) not in known:
            known[id(request)] = request, answers(engine, [request])[0][0]
        return known[id(request)][1]

    return alone


@pytest.fixture(scope="module")
def requests(packed: Packed) -> list[Request]:
    return make_requests(40, packed.config.vocab_size)


# Engines of another number of slots are other programs, which compile for seconds: those around whole tiles of 8 rows.
NUM_SLOTS = [1, 2, 3, 7, 8, 9, 16, 40]


@pytest.mark.parametrize(("num_slots", "keep"), [*((n, None) for n in NUM_SLOTS), *((n, 1) for n in (1, 8, 9, 40))])
def test_a_batch_of_any_size_and_order(
    packed: Packed, make_engine: MakeEngine, alone: Any, requests: list[Request], num_slots: int, keep: int | None
) -> None:
    engine = make_engine(packed, num_slots=num_slots, keep=keep)
    for seed in range(2):
        order = requests[:]
        random.Random(seed).shuffle(order)
        actual, decoding = answers(engine, order)
        assert_same(actual, [alone(request) for request in order])
        stats = decoding.stats
        num_tokens = sum(len(ids) for ids, _ in actual)
        num_stopped = sum(len(ids) < request.limit for (ids, _), request in zip(actual, order, strict=True))
        assert stats.num_tokens == num_tokens
        assert num_tokens <= stats.num_rows <= num_tokens + num_stopped  # a stop id costs one row at most
        assert stats.num_sweeps < 2 * num_tokens / num_slots + 40
    uploads = engine._loop.layers.stats.last_sweep_uploads
    assert uploads == (0 if keep is None else packed.config.num_layers)


@pytest.mark.parametrize("count", [*NUM_SLOTS, 21])  # 21: the last of several tiles is half full
def test_as_many_requests_as_slots(
    packed: Packed, make_engine: MakeEngine, alone: Any, requests: list[Request], count: int
) -> None:
    engine = make_engine(packed, num_slots=count)
    actual, _ = answers(engine, requests[-count:])
    assert_same(actual, [alone(request) for request in requests[-count:]])


@pytest.mark.parametrize("end", [1, 2, 5])
def test_a_sweep_queued_behind_the_last_stop_id_is_not_counted(
    packed: Packed, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, end: int
) -> None:
    """It gives no token."""
    engine, sampling = make_engine(packed, num_slots=1), Sampling(temperature=5.0, seed=1)  # so that tokens differ
    ((ids, _),), _ = answers(engine, [Request(prompt_ids=[1, 5], limit=8, sampling=sampling)])
    stop_id = ids[end - 1]
    assert stop_id not in ids[: end - 1]
    queued, run = [], engine.run
    monkeypatch.setattr(engine, "run", lambda *args, **more: (queued.append(1), run(*args, **more))[1])
    request = Request(prompt_ids=[1, 5], limit=8, stop_ids=frozenset([stop_id]), sampling=sampling)
    ((stopped, _),), decoding = answers(engine, [request])
    assert stopped == ids[:end]
    assert len(queued) == end + (end > 1), "the first token is read at once"
    stats = decoding.stats
    assert (stats.num_sweeps, stats.num_rows, stats.num_tokens) == (end, end, end)


def test_smollm2(smollm2: Packed, make_engine: MakeEngine) -> None:
    """A real model, streamed; more rows than two tiles have, and then drafts for a real prompt."""
    requests = make_requests(20, smollm2.config.vocab_size, longest=48, limit=8)
    engine = make_engine(smollm2, num_slots=1, chunk_rows=16)
    expected = [answers(engine, [request])[0][0] for request in requests]
    engine = make_engine(smollm2, num_slots=20, chunk_rows=16, keep=4)
    order = list(range(20))
    random.Random(1).shuffle(order)
    actual, decoding = answers(engine, [requests[i] for i in order])
    assert_same(actual, [expected[i] for i in order])
    assert engine._loop.layers.stats.last_sweep_bytes_uploaded > 26 * smollm2.layer_nbytes
    assert decoding.stats.num_tokens > 6 * decoding.stats.num_sweeps
    lines = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    prompt = min((line["prompt"] for line in lines if line["kind"] == "extract"), key=len)
    tokenizer = open_tokenizer(smollm2.path)
    assert tokenizer is not None
    copying = Request(prompt_ids=tokenizer.encode(prompt), limit=20)
    plain, _ = answers(engine, [copying])
    engine.speculation = Speculation(tile_rows=8, max_rows=48, is_streamed=True, depth=15)
    drafted, decoding = answers(engine, [copying])
    engine.speculation = None
    assert_same(drafted, plain)
    assert decoding.stats.num_tokens > 1.2 * decoding.stats.num_sweeps


def test_a_sequence_in_several_rows_of_a_tile(packed: Packed, make_engine: MakeEngine, alone: Any) -> None:
    """Its tokens given, side by side in any rows, beside another's: logits as of one token a sweep.

    What a wrong token has left in the cache is never seen.
    """
    prompt = prompt_ids(VARIANT, 20).tolist()
    ids, logits = alone(Request(prompt_ids=prompt, limit=7))
    engine = make_engine(packed, num_slots=3)
    greedy = [RowSampling.of([Sampling()] * 8)]

    def run(joins: list[Join], *rows: tuple[int, int, int, int]) -> np.ndarray:
        plan = SweepPlan(joins=tuple(joins), tiles=(TileRows.of(rows, 8),), draws=())
        drawn = engine.run(plan, engine.no_ids(), greedy, keep_logits=True)
        return np.asarray(drawn.logits[0])

    joins = [Join(slot=2, prompt_ids=prompt, tile_idx=0, row=0), Join(slot=1, prompt_ids=[5] * 9, tile_idx=0, row=1)]
    first = run(joins, (2, -1, -1, 20), (1, -1, -1, 9))
    assert first[0].tobytes() == logits[0]
    wrong = [(2, 20 + i, (ids[i] + i) % 100, 21 + i) for i in range(6)]  # the first of these is right
    assert run([], *wrong)[0].tobytes() == logits[1]
    right = [(2, 20 + i, ids[i], 21 + i) for i in range(6)]
    mixed = [right[3], right[0], (1, 9, 7, 10), right[5], right[1], right[2], right[4]]
    scores = run([], *mixed)
    for row, (slot, position, _, _) in enumerate(mixed):
        if slot == 2:
            assert scores[row].tobytes() == logits[position - 19], row


def test_the_next_sweep_is_queued_before_tokens_are_read(
    packed: Packed, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(packed, num_slots=2, fuses_tile=False)
    done: list[str] = []
    run, read = engine.run, Decoding._read
    monkeypatch.setattr(engine, "run", lambda *args, **kwargs: (done.append("queue"), run(*args, **kwargs))[1])
    monkeypatch.setattr(decoding_module.Decoding, "_read", lambda *args: (done.append("read"), read(*args))[1])
    for _ in engine.decode([Request(prompt_ids=[1], limit=5), Request(prompt_ids=[2], limit=3)]):
        pass
    # First tokens are not kept back; then there is always a sweep ahead.
    assert done == ["queue", "read", "queue", "queue", "read", "queue", "read", "queue", "read", "read"]


def test_tokens_come_with_their_sweep(packed: Packed, make_engine: MakeEngine) -> None:
    engine = make_engine(packed, num_slots=2)
    requests = [Request(prompt_ids=[1, 2], limit=n) for n in (3, 1, 0, 2)]
    tokens = [(token.request_idx, token.is_last) for token in engine.decode(requests)]
    assert tokens == [(0, False), (1, True), (0, False), (3, False), (0, True), (3, True)]
    assert list(engine.decode([])) == []
    assert list(engine.decode([Request(prompt_ids=[1], limit=0)])) == []


def test_the_cache_belongs_to_the_last_one_that_began(packed: Packed, make_engine: MakeEngine) -> None:
    engine = make_engine(packed, num_slots=2)
    first = engine.decode([Request(prompt_ids=[1, 2], limit=4)])
    next(first)
    second = engine.decode([Request(prompt_ids=[1, 2], limit=4)])
    next(first)  # nothing has begun yet
    next(second)
    with pytest.raises(VramjaxError, match="another generation has begun"):
        next(first)
    assert len(list(second)) == 3


def test_compiles_do_not_grow_with_what_is_in_a_batch(packed: Packed, make_engine: MakeEngine) -> None:
    engine = make_engine(packed, num_slots=20)
    engine.compile()
    programs: tuple[Any, ...] = (embed_step, begin_tile, take_row, end_tile)
    requests = make_requests(30, packed.config.vocab_size)
    answers(engine, [r for r in requests if r.sampling][:2])  # the one program more that drawing takes
    before = [program._cache_size() for program in programs]
    for count in (1, 2, 7, 30):
        answers(engine, requests[-count:])
    assert [program._cache_size() for program in programs] == before


def test_memory_does_not_grow_with_the_line(packed: Packed, make_engine: MakeEngine) -> None:
    """What waits takes nothing on the device, and what has ended leaves nothing there."""
    engine = make_engine(packed, num_slots=3)
    list(engine.decode([Request(prompt_ids=[1] * 9, limit=2)]))
    before, most = len(jax.live_arrays()), 0
    for _ in engine.decode([Request(prompt_ids=[1] * 9, limit=2) for _ in range(60)]):
        most = max(most, len(jax.live_arrays()))
    assert len(jax.live_arrays()) <= before + 1 and most <= before + 12
