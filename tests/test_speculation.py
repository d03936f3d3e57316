"""Drafts in the engine: not one bit of what is decoded depends on them, and they save the sweeps that they promise."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import batches
import pytest
from batches import CONTEXT, Answer, answers, assert_same, interrupted_after, make_requests
from packed_dirs import pack_tiny

from vramjax.checkpoint.packed import Packed
from vramjax.decode.decoding import Decoding
from vramjax.decode.drafting import Drafter, NgramDrafter
from vramjax.decode.engine import Engine
from vramjax.decode.sampler import Sampling
from vramjax.decode.scheduler import Request
from vramjax.decode.speculation import Speculation, SweepDrafts
from vramjax.decode.tile_programs import begin_tile, embed_step, end_tile, take_row
from vramjax.errors import BudgetError
from vramjax.language_model import LanguageModel

VARIANT = "qwen3"
MakeDrafter = Callable[[Sequence[int]], Drafter]


class Prophet:
    """Drafts what it was told will come; `change` then makes of it what it likes."""

    def __init__(self, ids: list[int], change: Callable[[list[int]], list[int]] = list) -> None:
        self._ids, self._change, self._num_known = ids, change, 0

    def append(self, ids: Sequence[int]) -> None:
        assert list(ids) == self._ids[self._num_known :][: len(ids)]
        self._num_known += len(ids)

    def chances(self, max_tokens: int) -> list[float]:
        return [0.9**i for i in range(1, 1 + len(self.draft(max_tokens)))]

    def draft(self, max_tokens: int) -> list[int]:
        return self._change(self._ids[self._num_known :][:max_tokens])


def wrong(ids: list[int]) -> list[int]:
    return [(token_id + 1) % 100 for token_id in ids]


def mixed(ids: list[int]) -> list[int]:
    """Now and then a wrong one, now and then fewer."""
    rng = random.Random(len(ids))
    return [i if rng.random() < 0.8 else (i + 1) % 100 for i in ids[: rng.randint(0, 15)]]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    return pack_tiny(tmp_path_factory.mktemp("tiny"), VARIANT)


@pytest.fixture(scope="module")
def engines(packed: Packed) -> Iterator[Callable[..., Engine]]:
    """Engines by what they are; the same one, with other drafts, if there is one already."""
    made: dict[Any, Engine] = {}

    def make(speculation: Speculation | None, **settings: Any) -> Engine:
        key = tuple(settings.items())
        if key not in made:
            made[key] = batches.make_engine(packed, **settings)
        made[key].speculation = speculation
        return made[key]

    yield make
    for engine in made.values():
        engine.close()


@pytest.fixture(scope="module")
def requests(packed: Packed) -> list[Request]:
    found = make_requests(40, packed.config.vocab_size, longest=60, limit=40)
    return [r for i, r in enumerate(found) if len(r.prompt_ids) > 1][:12]


@pytest.fixture(scope="module")
def expected(engines: Callable[..., Engine], requests: list[Request]) -> list[Answer]:
    """One sequence at a time, one token a sweep."""
    return [answers(engines(None, num_slots=1), [request])[0][0] for request in requests]


def fixed(depth: int, drafter: MakeDrafter = NgramDrafter) -> Speculation | None:
    if not depth:
        return None
    return Speculation(tile_rows=8, max_rows=10_000, is_streamed=False, depth=depth, drafter=drafter)


def told(
    requests: Sequence[Request], expected: Sequence[Answer], change: Callable[[list[int]], list[int]] = list
) -> MakeDrafter:
    futures = {tuple(r.prompt_ids): ids for r, (ids, _) in zip(requests, expected, strict=True)}
    return lambda ids: Prophet(futures[tuple(ids)], change)


@pytest.mark.parametrize(
    ("change", "num_slots", "keep", "depths"),
    [
        (mixed, 3, 1, range(16)),  # rows of a sequence begin anywhere in a tile, and go on in the next one
        (list, 12, 1, (1, 7, 15)),
        (list, 3, None, (4, 15)),
        (wrong, 12, 1, (2, 15)),
        (wrong, 3, None, (8,)),
        (None, 12, 1, (3, 15)),
        (None, 1, None, (1, 15)),
    ],
)
def test_any_depth_and_drafter(
    packed: Packed,
    engines: Callable[..., Engine],
    requests: list[Request],
    expected: list[Answer],
    change: Any,
    num_slots: int,
    keep: int | None,
    depths: Sequence[int],
) -> None:
    drafter = told(requests, expected, change) if change else NgramDrafter
    some = requests[: 2 * num_slots]
    for depth in depths:
        engine = engines(fixed(depth, drafter), num_slots=num_slots, keep=keep)
        actual, decoding = answers(engine, some)
        assert_same(actual, expected[: len(some)])
        stats = decoding.stats
        assert stats.num_tokens == sum(len(ids) for ids, _ in actual)
        assert (sum(stats.drafts_by_depth) > 0) == (depth > 0)
        assert not any(stats.drafts_by_depth[depth:])
        if change is list:
            assert stats.num_sweeps < 0.9 * sum(len(ids) for ids, _ in actual) / num_slots + 12
            assert stats.accepted_by_depth == stats.drafts_by_depth
        elif change is wrong:
            assert not any(stats.accepted_by_depth)
        assert engine._loop.layers.stats.last_sweep_uploads == (0 if keep is None else packed.config.num_layers)


def test_as_few_sweeps_as_there_can_be(
    engines: Callable[..., Engine], requests: list[Request], expected: list[Answer]
) -> None:
    prompt = requests[0].prompt_ids
    request = Request(prompt_ids=prompt, limit=13)
    ((ids, _),), plain = answers(engines(None, num_slots=1), [request])
    assert plain.stats.num_sweeps == 13
    tell = told([request], [(ids, [])])
    ((again, _),), decoding = answers(engines(fixed(3, tell), num_slots=1), [request])
    stats = decoding.stats
    assert again == ids
    assert (stats.num_sweeps, stats.num_tokens, stats.num_rows) == (4, 13, 13)
    assert stats.drafts_by_depth == stats.accepted_by_depth == (3, 3, 3, *[0] * 12)
    _, decoding = answers(engines(fixed(15, tell), num_slots=1), [request])
    assert (decoding.stats.num_sweeps, decoding.stats.num_rows) == (2, 13), "no more drafts than are to be drawn"
    _, decoding = answers(engines(fixed(3, told([request], [(ids, [])], wrong)), num_slots=1), [request])
    assert (decoding.stats.num_sweeps, decoding.stats.num_rows) == (13, 1 + 9 * 4 + 3 + 2 + 1)


def test_limits_and_stop_ids_among_drafts(engines: Callable[..., Engine], requests: list[Request]) -> None:
    prompt = requests[1].prompt_ids
    sampling = Sampling(temperature=1.5, seed=2)  # so that tokens differ
    whole = Request(prompt_ids=prompt, limit=30, sampling=sampling)
    (answer,), _ = answers(engines(None, num_slots=2), [whole])
    tell = told([whole], [answer])
    for cut in range(1, 18):
        some = [
            Request(prompt_ids=prompt, limit=cut, sampling=sampling),
            Request(prompt_ids=prompt, limit=30, stop_ids=frozenset(answer[0][cut:]), sampling=sampling),
        ]
        actual, decoding = answers(engines(fixed(15, tell), num_slots=2), some)
        end = next(i for i, token_id in enumerate(answer[0]) if token_id in some[1].stop_ids) + 1
        assert actual[0] == (answer[0][:cut], answer[1][:cut])
        assert actual[1] == (answer[0][:end], answer[1][:end])
        assert decoding.stats.num_tokens == cut + end


@pytest.mark.parametrize("left", range(1, 6))
def test_to_the_end_of_the_context(engines: Callable[..., Engine], left: int) -> None:
    engine = engines(None, num_slots=1)
    prompt = [5, 6, 7] * CONTEXT
    prompt = prompt[: CONTEXT - left]
    limit = engine.spec.max_new_tokens(len(prompt), 100)
    assert limit == left + 1
    request = Request(prompt_ids=prompt, limit=limit)
    (expected,), _ = answers(engine, [request])
    for drafter in (told([request], [expected]), told([request], [expected], wrong), NgramDrafter):
        (actual,), _ = answers(engines(fixed(15, drafter), num_slots=1), [request])
        assert actual == expected


def test_nothing_more_is_compiled(engines: Callable[..., Engine], requests: list[Request]) -> None:
    engine = engines(None, num_slots=12)
    engine.compile()
    programs: tuple[Any, ...] = (embed_step, begin_tile, take_row, end_tile)
    answers(engine, requests)
    before = [program._cache_size() for program in programs]
    for depth in (1, 4, 15):
        answers(engines(fixed(depth), num_slots=12), requests)
    assert [program._cache_size() for program in programs] == before


def test_the_first_token_waits_for_no_drafter(
    engines: Callable[..., Engine], requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def drafter(ids: Sequence[int]) -> Drafter:
        done.append("drafter")
        return NgramDrafter(ids)

    engine = engines(fixed(2, drafter), num_slots=1)
    run, read = engine.run, Decoding._read
    monkeypatch.setattr(engine, "run", lambda *args, **kwargs: (done.append("queue"), run(*args, **kwargs))[1])
    monkeypatch.setattr(Decoding, "_read", lambda *args: (done.append("read"), read(*args))[1])
    next(engine.decode([Request(prompt_ids=requests[0].prompt_ids, limit=9)]))
    assert done == ["queue", "drafter", "read"]


def test_a_sweep_with_drafts_that_fails(
    engines: Callable[..., Engine], requests: list[Request], expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any layer: what was told before is right, and so is what the engine decodes next."""
    engine = engines(fixed(6, told(requests, expected, mixed)), num_slots=3, keep=1)
    (step,), num_layers = engine._loop.decode_steps, engine.spec.config.num_layers
    for num_passing in range(2 * num_layers, 5 * num_layers, 2):
        found: list[list[int]] = [[] for _ in range(3)]
        decoding = engine.decode(requests[:3])
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(engine._loop, "decode_steps", [interrupted_after(num_passing, step)])
            for token in decoding:
                found[token.request_idx].append(token.id)
        assert sum(decoding.stats.drafts_by_depth) > 0
        for ids, (right, _) in zip(found, expected, strict=False):
            assert ids == right[: len(ids)]
        assert_same(answers(engine, requests[:3])[0], expected[:3])
    assert engine._loop.layers.stats.sweeps_aborted >= 4


@pytest.mark.parametrize("host", ["pinned", "mapped"])
def test_within_a_budget(packed: Packed, host: Any) -> None:
    """The smallest that does for drafts of all sequences, in either place where layers wait."""
    prompts = [[*range(first, 100), *range(first)] for first in (1, 40, 70)]  # whatever comes was there before
    settings: dict[str, Any] = {"batch": 2, "context": 150, "progress": False}
    with LanguageModel(packed, None, speculate="off", **settings) as model:
        plain = {each.index: each.token_ids for each in model.generate_many(prompts, max_new_tokens=12)}
    with LanguageModel(packed, None, keep=1, speculate=9, **settings) as model:
        smallest = model.plan.device.total_bytes
    with pytest.raises(BudgetError):
        LanguageModel(packed, None, device_budget=smallest - 1, host=host, speculate=9, **settings)
    with LanguageModel(packed, None, device_budget=smallest, host=host, speculate=9, **settings) as model:
        found = {each.index: each.token_ids for each in model.generate_many(prompts, max_new_tokens=12)}
        stats = model.stats()
        assert (stats["host"], stats["uploads_per_token"]) == (host, packed.config.num_layers)
        assert stats["num_drafts"] > 9 and stats["device_budget"] == smallest
    assert found == plain


def test_depths_that_pay(packed: Packed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed, and left to itself: a tiny model soon repeats itself."""
    run = Engine.run  # of which each takes so long that waiting takes little beside it
    monkeypatch.setattr(Engine, "run", lambda *args, **more: (time.sleep(0.01), run(*args, **more))[1])
    speculation = Speculation(tile_rows=8, max_rows=16, is_streamed=True)
    plain, engine = batches.make_engine(packed, keep=1), batches.make_engine(packed, keep=1, speculation=speculation)
    request = Request(prompt_ids=[5, 6, 7, 8] * 8, limit=150)
    expected, _ = answers(plain, [request])
    _, first = answers(engine, [request])  # by now it is known what sweeps take
    assert sum(first.stats.drafts_by_depth) > 0
    actual, decoding = answers(engine, [request])
    assert_same(actual, expected)
    stats = decoding.stats
    assert engine._loop.layers.stats.last_sweep_uploads == packed.config.num_layers
    assert stats.num_rows - stats.num_tokens == sum(stats.drafts_by_depth) - sum(stats.accepted_by_depth)
    plain.close()
    engine.close()


def test_a_sweep_is_recorded_with_its_own_drafts(
    engines: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[tuple[Sequence[int], SweepDrafts | None]] = []
    record = Speculation.record

    def note(speculation: Speculation, depths: Sequence[int], *args: Any, **kwargs: Any) -> None:
        recorded.append((depths, args[1]))
        record(speculation, depths, *args, **kwargs)

    monkeypatch.setattr(Speculation, "record", note)
    engine = engines(Speculation(tile_rows=8, max_rows=16, is_streamed=True), num_slots=1)
    answers(engine, [Request(prompt_ids=[5, 6, 7, 8] * 8, limit=60)])
    assert [drafts is None for _, drafts in recorded[:7]] == [False, False, *[True] * 5], "the prompt, and what follows"
    assert all(depths == [0] for depths, drafts in recorded if drafts is None)
    assert all([len(ids) for ids in drafts.ids] == depths for depths, drafts in recorded[1:] if drafts)


def test_room_for_drafts(engines: Callable[..., Engine]) -> None:
    spec = engines(None, num_slots=1).spec

    def rows(num_slots: int, depth: int = 0, tile_rows: int = 16) -> int:
        return dataclasses.replace(spec, num_slots=num_slots, depth=depth, tile_rows=tile_rows).max_rows

    assert [rows(1), rows(16), rows(17), rows(1, 15), rows(16, 3)] == [32, 32, 64, 32, 64]
    assert rows(1, 15, tile_rows=8) == 16
    deeper = dataclasses.replace(spec, num_slots=16, depth=15)
    assert deeper.workspace_bytes > dataclasses.replace(deeper, depth=0).workspace_bytes
