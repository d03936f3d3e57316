"""Drafts of a small model: nothing that is decoded depends on them, nor a draft on those that were wrong before it."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import batches
import jax
import pytest
from batches import CONTEXT, Answer, answers, assert_same, interrupted_after, make_requests
from packed_dirs import pack_tiny

from vramjax.checkpoint.packed import Packed
from vramjax.checkpoint.random_weights import RandomWeights
from vramjax.decode import model_drafting
from vramjax.decode.depth import DepthPlanner, SweepCost
from vramjax.decode.engine import Engine
from vramjax.decode.model_drafting import HIT_RATE, DraftModel
from vramjax.decode.sampler import Sampling
from vramjax.decode.scheduler import Request
from vramjax.decode.speculation import Speculation, SweepClock
from vramjax.decode.tile_programs import begin_tile, draw_tile, embed_step, take_row, tile_sweep, tile_turns
from vramjax.draft_model import loaded_draft_model

LARGE = "qwen3"
OTHER = "of random weights"  # and the same shapes, so that nothing more is compiled
IN_TURNS = "of the same weights, several tokens in one program"  # as on a GPU
SLOTS = 10  # which are more than a tile has rows


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Packed | RandomWeights]:
    packed = pack_tiny(tmp_path_factory.mktemp("tiny"), LARGE)
    return {LARGE: packed, OTHER: RandomWeights(packed.config, seed=3), IN_TURNS: packed}


@pytest.fixture(scope="module")
def engine(models: dict[str, Packed | RandomWeights]) -> Iterator[Engine]:
    """The large model, every layer of which is streamed."""
    large = models[LARGE]
    assert isinstance(large, Packed)
    engine = batches.make_engine(large, keep=1, num_slots=SLOTS, depth=15)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def drafts(models: dict[str, Packed | RandomWeights], engine: Engine) -> Iterator[Callable[[str], DraftModel]]:
    """Models that draft, each loaded once."""
    with contextlib.ExitStack() as opened:
        loaded: dict[str, DraftModel] = {}

        def make(name: str) -> DraftModel:
            if name not in loaded:
                spec = dataclasses.replace(engine.spec, fuses_tile=name == IN_TURNS, max_turns=3)
                model = loaded_draft_model(models[name], spec, jax.devices()[0], progress=False)
                loaded[name] = opened.enter_context(model)
            return loaded[name]

        yield make


@pytest.fixture(scope="module")
def requests(models: dict[str, Packed | RandomWeights]) -> list[Request]:
    """Greedy and drawn ones, of prompts that a tile holds and of others, for which there are too few slots."""
    return make_requests(SLOTS + 4, models[LARGE].config.vocab_size, longest=60, limit=30)


@pytest.fixture(scope="module")
def expected(engine: Engine, requests: list[Request]) -> list[Answer]:
    engine.speculation = None
    return answers(engine, requests)[0]


def fixed(depth: int, model: DraftModel) -> Speculation:
    return Speculation(tile_rows=8, max_rows=10_000, is_streamed=True, depth=depth, model=model)


@pytest.mark.parametrize(("name", "depth"), [(LARGE, 1), (LARGE, 3), (LARGE, 15), (IN_TURNS, 3), (IN_TURNS, 15)])
def test_a_model_that_drafts_for_itself_is_always_right(
    engine: Engine,
    drafts: Callable[[str], DraftModel],
    requests: list[Request],
    expected: list[Answer],
    name: str,
    depth: int,
) -> None:
    """Also where tokens are drawn: with the same noise."""
    engine.speculation = fixed(depth, drafts(name))
    actual, decoding = answers(engine, requests)
    assert_same(actual, expected)
    stats = decoding.stats
    assert stats.drafts_by_depth == stats.accepted_by_depth and sum(stats.drafts_by_depth) > 0
    assert engine._loop.layers.stats.last_sweep_uploads == engine.spec.config.num_layers
    _, decoding = answers(engine, [Request(prompt_ids=[1, 5, 9], limit=1 + 2 * (depth + 1))])
    assert (decoding.stats.num_sweeps, decoding.stats.num_tokens) == (3, 3 + 2 * depth), "there can be no fewer"


@pytest.mark.parametrize("depth", [1, 4])
def test_whatever_another_model_guesses(
    engine: Engine,
    drafts: Callable[[str], DraftModel],
    requests: list[Request],
    expected: list[Answer],
    depth: int,
) -> None:
    engine.speculation = fixed(depth, drafts(OTHER))
    greedy = [i for i, request in enumerate(requests) if request.sampling is None]
    actual, decoding = answers(engine, [requests[i] for i in greedy])
    assert_same(actual, [expected[i] for i in greedy])
    drafted, accepted = decoding.stats.drafts_by_depth, decoding.stats.accepted_by_depth
    assert drafted[depth - 1] > 0 and sum(accepted) < 0.5 * sum(drafted)


@pytest.mark.parametrize("depth", [2, 5, 15])
def test_guesses_that_are_right_now_and_then(
    engine: Engine,
    drafts: Callable[[str], DraftModel],
    requests: list[Request],
    expected: list[Answer],
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same model, with noise of its own."""
    model, other = drafts(LARGE), Sampling(temperature=0.7, seed=11)
    begin = model.begin
    monkeypatch.setattr(model, "begin", lambda prompt_ids, slot, sampling: begin(prompt_ids, slot, other))
    engine.speculation = fixed(depth, model)
    actual, decoding = answers(engine, requests)
    assert_same(actual, expected)
    assert 0.1 < sum(decoding.stats.accepted_by_depth) / sum(decoding.stats.drafts_by_depth) < 0.9


def test_left_to_itself(
    engine: Engine,
    drafts: Callable[[str], DraftModel],
    requests: list[Request],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a link that is slow, rows that are free have drafts, of the model or looked up."""
    slow, model, depths = SweepCost(tile_rows=8, tile_s=1.0, streaming_s=100.0), drafts(LARGE), []
    monkeypatch.setattr(SweepClock, "cost", property(lambda _: slow))
    draft = model.draft
    monkeypatch.setattr(model, "draft", lambda own, asked: (depths.extend(asked), draft(own, asked))[1])
    engine.speculation = Speculation(tile_rows=8, max_rows=64, is_streamed=True, model=model)
    actual, decoding = answers(engine, requests)
    assert_same(actual, expected)
    assert sum(decoding.stats.accepted_by_depth) > 0.5 * sum(decoding.stats.drafts_by_depth) > 20
    assert sum(depths) > 20 and max(depths) > 3


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=1.2, seed=7)])
def test_nothing_is_left_of_wrong_drafts(
    drafts: Callable[[str], DraftModel], models: dict[str, Packed | RandomWeights], sampling: Sampling | None
) -> None:
    """However many of its tokens were right, a sequence's next draft is that of one that begins with all of them."""
    model, rng = drafts(LARGE), random.Random(3)
    vocab_size = models[LARGE].config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(rng.choice([1, 5, 9, 40]))] for _ in range(SLOTS)]
    running = [model.begin(prompt, slot, sampling) for slot, prompt in enumerate(prompts)]
    for _ in range(8):
        depths = [rng.randrange(6) for _ in running]
        found = model.draft(running, depths)
        assert [len(ids) for ids in found] == depths
        for each, ids in zip(running, found, strict=True):
            num_right = rng.randint(0, len(ids))
            wrong = [(ids[num_right] + 1) % vocab_size] if num_right < len(ids) else [rng.randrange(vocab_size)]
            more = [rng.randrange(vocab_size) for _ in range(rng.choice([0, 3, 20]))] if not ids else []
            each.append([*ids[:num_right], *wrong, *more])
    final = model.draft(running, [4] * SLOTS)
    for each, ids in zip(running, final, strict=True):
        anew = model.begin(each.ids, each.slot, sampling)
        assert model.draft([anew], [4]) == [ids]


def test_tokens_in_turns(drafts: Callable[[str], DraftModel], monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as all sequences have left go into one program; and they are those that are drafted one by one."""
    one_by_one, in_turns, depths = drafts(LARGE), drafts(IN_TURNS), [8, 5, 0, 12]
    turns: list[int] = []
    run = in_turns._engine.run
    monkeypatch.setattr(
        in_turns._engine, "run", lambda plan, *args: (turns.append(plan.num_turns), run(plan, *args))[1]
    )
    sampling = [None, Sampling(temperature=0.9, seed=2), None, Sampling(temperature=1.5, seed=3)]

    def drafted(model: DraftModel) -> list[list[int]]:
        running = [model.begin([4, 5, 6 + slot], slot, how) for slot, how in enumerate(sampling)]
        turns.clear()
        first = model.draft(running, depths)
        for each, ids in zip(running, first, strict=True):
            each.append(ids[:2])
        return first + model.draft(running, [3] * 4)

    assert drafted(in_turns) == drafted(one_by_one) and [len(ids) for ids in drafted(in_turns)] == [*depths, 3, 3, 3, 3]
    # One of each; three more; one, with which the second is done; three of two; and of the last one three and one.
    assert turns[:8] == [1, 3, 1, 3, 3, 1, 1, 1]


def test_no_draft_waits_for_a_compiler(drafts: Callable[[str], DraftModel]) -> None:
    """Greedy or drawn: what it takes is compiled before its time is taken."""
    model = drafts(IN_TURNS)
    programs: tuple[Any, ...] = (tile_sweep, tile_turns, draw_tile)
    for sampling in (None, Sampling(temperature=1.1, top_k=30, seed=5)):
        running = model.begin([1, 2, 3], 0, sampling)
        before = [program._cache_size() for program in programs]
        assert len(*model.draft([running], [9])) == 9
        assert [program._cache_size() for program in programs] == before


def test_tokens_that_the_large_model_has_not(drafts: Callable[[str], DraftModel]) -> None:
    """They end a draft."""
    few, sampling = DraftModel(drafts(LARGE)._engine, vocab_size=100), Sampling(temperature=50.0)
    found = [
        few.draft([few.begin([159, seed], 0, Sampling(temperature=50.0, seed=seed))], [15])[0] for seed in range(9)
    ]
    assert all(token_id < 100 for ids in found for token_id in ids)
    assert min(map(len, found)) < 5 < sum(map(len, found)), "of 160 tokens"
    begun = few.begin([1, 2], 0, sampling)
    begun.append([*few.draft([begun], [15])[0], 120])
    assert len(begun.ids) > begun.num_cached >= 2
    assert len(few.draft([few.begin([1, 10**6], 0, None)], [3])[0]) <= 3, "nor need it have what the large one has"


def test_no_more_than_the_context_has_room_for(drafts: Callable[[str], DraftModel]) -> None:
    model = drafts(LARGE)
    for num_ids, room in [(CONTEXT - 1, 2), (CONTEXT, 1), (CONTEXT + 1, 0), (CONTEXT + 9, 0)]:
        begun = model.begin([5] * num_ids, 0, None)
        assert len(begun.chances(15)) == room
        assert model.draft([begun, model.begin([1], 1, None)], [15, 2])[0] == model.draft([begun], [3])[0][:15]
        assert len(model.draft([begun], [15])[0]) == room


def test_chances_follow_what_became_of_drafts(drafts: Callable[[str], DraftModel]) -> None:
    model = drafts(LARGE)
    model.hit_rate = HIT_RATE
    begun = model.begin([1], 0, None)
    assert begun.chances(2) == pytest.approx([HIT_RATE, HIT_RATE**2])
    for _ in range(40):
        ((first, _),) = model.draft([begun], [2])
        begun.append([(first + 1) % 100])
    assert begun.chances(1)[0] < 0.1
    assert begun.chances(1)[0] < model.begin([1], 1, None).chances(1)[0] < HIT_RATE, "of all sequences, more slowly"
    for _ in range(100):
        begun.append([7])
    assert begun.chances(1)[0] > 0.5, "long ago"
    for _ in range(10):
        (drafted,) = model.draft([begun], [3])
        begun.append([*drafted, 7])
    assert begun.chances(1)[0] > HIT_RATE


def test_a_draft_that_is_interrupted(
    engine: Engine,
    drafts: Callable[[str], DraftModel],
    requests: list[Request],
    expected: list[Answer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any layer: what was told before is right, and so is what comes next, with drafts as good as before."""
    model = drafts(LARGE)
    engine.speculation = fixed(4, model)
    (step,), num_layers = model._engine._loop.decode_steps, model._engine.spec.config.num_layers
    for num_passing in range(0, 8 * num_layers, 3):
        found: list[list[int]] = [[] for _ in range(3)]
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(model._engine._loop, "decode_steps", [interrupted_after(num_passing, step)])
            for token in engine.decode(requests[4:7]):
                found[token.request_idx].append(token.id)
        for ids, (right, _) in zip(found, expected[4:7], strict=True):
            assert ids == right[: len(ids)]
    actual, decoding = answers(engine, requests[4:7])
    assert_same(actual, expected[4:7])
    assert decoding.stats.drafts_by_depth == decoding.stats.accepted_by_depth and any(decoding.stats.drafts_by_depth)


def test_nothing_more_is_compiled_nor_waited_for(
    drafts: Callable[[str], DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft is queued as a whole before a token of it is read."""
    model = drafts(LARGE)
    model.begin([1], 0, Sampling(temperature=1.0))
    programs: tuple[Any, ...] = (embed_step, begin_tile, take_row, draw_tile)
    before, done = [program._cache_size() for program in programs], []
    run = model._engine.run
    monkeypatch.setattr(model._engine, "run", lambda *args: (done.append("queue"), run(*args))[1])
    read = model_drafting._Sweeps.read
    monkeypatch.setattr(model_drafting._Sweeps, "read", lambda sweeps: (done.append("read"), read(sweeps))[1])
    running = [model.begin([1] * length, slot, None) for slot, length in enumerate((1, 7, 8, 9, 30, 200))]
    assert [len(ids) for ids in model.draft(running, [5, 1, 0, 3, 2, 5])] == [5, 1, 0, 3, 2, 5]
    assert done == [*["queue"] * (1 + 1 + 4), "read"], "a prompt or two, the others, and what goes on"
    model.draft([model.begin([1] * 3, 0, Sampling(temperature=2.0, top_k=9, seed=1))], [3])
    assert [program._cache_size() for program in programs] == before


class Simulated:
    """A model each of whose tokens takes a time, on a clock that is made up, and is right by chance."""

    def __init__(self, *, draft_s: float, prompt_s: float, chance: float) -> None:
        self.draft_s, self.now, self.num_drafted = draft_s, 0.0, 0
        self._prompt_s, self._chance, self._rng = prompt_s, chance, random.Random(1)
        self._rate, self.num_right = HIT_RATE, 0

    def begin(self, prompt_ids: Sequence[int], slot: int, sampling: Sampling | None) -> Any:
        return self

    def append(self, ids: Sequence[int]) -> None:
        pass

    def chances(self, max_tokens: int) -> list[float]:
        return [self._rate**i for i in range(1, 1 + max_tokens)]

    def draft(self, drafters: Any, depths: Any) -> Any:
        (depth,) = depths
        self.now += depth * self.draft_s + (0 if self.num_drafted else self._prompt_s)
        self.num_drafted += depth
        self.num_right = sum(1 for _ in itertools.takewhile(lambda _: self._rng.random() < self._chance, range(depth)))
        for is_hit in [*[True] * self.num_right, *[False] * (self.num_right < depth)]:
            self._rate += (is_hit - self._rate) / 16
        return [[7] * depth]


@pytest.mark.parametrize(
    ("chance", "draft_s", "expected"),
    [(0.0, 0.02, 0.97), (0.0, 0.3, 0.97), (0.8, 0.02, 2.8), (0.8, 0.3, 1.3), (0.9, 1, 0.97)],
)
def test_never_slower_and_faster_where_it_pays(
    chance: float, draft_s: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a sweep of 1 s, with drafts that cost so much each, and a prompt that is read before the first one."""
    model: Any = Simulated(draft_s=draft_s, prompt_s=3.0, chance=chance)
    monkeypatch.setattr("vramjax.decode.speculation.time.perf_counter", lambda: model.now)
    speculation = Speculation(tile_rows=16, max_rows=32, is_streamed=True, model=model)
    drafter, waits, read_at, num_tokens = speculation.begin(Request(prompt_ids=[1], limit=9), 0), True, 0.0, 0
    for _ in range(400):
        drafts = speculation.drafts([drafter], [15], 0) if waits else None
        (ids,) = drafts.ids if drafts else [[]]
        model.now += 1.0
        new = 1 + (model.num_right if ids else 0)
        speculation.record([len(ids)], [new], drafts, num_tiles=1, seconds=model.now - read_at)
        read_at, num_tokens = model.now, num_tokens + new
        waits = bool(ids) or speculation.waits([drafter])
    assert num_tokens / model.now > expected
    assert model.num_drafted > 0 or draft_s == 1


class Lookup:
    """Finds the same always, or nothing."""

    def __init__(self, chance: float) -> None:
        self.chance = chance

    def append(self, ids: Sequence[int]) -> None:
        pass

    def chances(self, max_tokens: int) -> list[float]:
        return [self.chance**i for i in range(1, 1 + max_tokens)] if self.chance else []

    def draft(self, max_tokens: int) -> list[int]:
        return [8] * max_tokens


@pytest.mark.parametrize(
    ("chance", "depth", "token_id"), [(0.99, None, 8), (0.3, None, 7), (0.0, None, 7), (0.99, 4, 7)]
)
def test_what_promises_more_is_taken(chance: float, depth: int | None, token_id: int) -> None:
    """Of what is looked up, which costs nothing, and what a model drafts; of the model, if a depth was asked for."""
    model: Any = Simulated(draft_s=0.001, prompt_s=0.0, chance=1.0)
    speculation = Speculation(
        tile_rows=16, max_rows=32, is_streamed=True, model=model, depth=depth, drafter=lambda _: Lookup(chance)
    )
    drafter = speculation.begin(Request(prompt_ids=[1], limit=9), 0)
    for _ in range(9):
        speculation.record([0], [1], None, num_tiles=1, seconds=1.0)
    assert speculation.waits([drafter])
    (ids,) = speculation.drafts([drafter], [15], 0).ids
    assert len(ids) >= 4 and set(ids) == {token_id}
    assert (model.num_drafted > 0) == (token_id == 7)


def test_a_sweep_is_charged_for_the_drafts_that_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever others would have been better, or were made, before its tokens were read."""
    model: Any = Simulated(draft_s=0.001, prompt_s=0.1, chance=1.0)
    lookup, charged = Lookup(0.0), []
    monkeypatch.setattr("vramjax.decode.speculation.time.perf_counter", lambda: model.now)
    monkeypatch.setattr(DepthPlanner, "record", lambda *args, **more: charged.append((args[3].draft_s, more["more_s"])))
    monkeypatch.setattr(DepthPlanner, "plan", lambda _, chances, cost: [min(4, len(chances[0]))])
    speculation = Speculation(tile_rows=16, max_rows=32, is_streamed=True, model=model, drafter=lambda _: lookup)
    drafter = speculation.begin(Request(prompt_ids=[1], limit=9), 0)
    for _ in range(9):
        speculation.record([0], [1], None, num_tiles=1, seconds=1.0)
    by_model = speculation.drafts([drafter], [15], 0)
    assert (len(by_model.ids[0]), by_model.seconds) == (4, pytest.approx(0.104))
    lookup.chance = 1.0
    assert speculation.waits([drafter])
    looked_up = speculation.drafts([drafter], [15], 0)
    assert looked_up.ids == [[8] * 4]
    for drafts in (by_model, looked_up, None):
        speculation.record([4], [5], drafts, num_tiles=1, seconds=1.0)
    assert charged[-3:] == [pytest.approx((0.001, 0.1)), (0.0, 0.0), (0.0, 0.0)]
