"""What sweeps are believed to take, and how many drafts that means: of sweeps that are made up, without an engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from vramjax.decode.depth import MAX_DEPTH, SweepCost
from vramjax.decode.drafting import Drafters
from vramjax.decode.speculation import Speculation, SweepClock


def noted(clock: SweepClock, num_tiles: int, seconds: Sequence[float], *, has_waited: bool) -> SweepClock:
    for each in seconds:
        clock.note(num_tiles, each, has_waited=has_waited)
    return clock


def cost_of(clock: SweepClock) -> SweepCost:
    assert clock.cost is not None
    return clock.cost


def test_the_clock_of_the_example() -> None:
    clock = noted(SweepClock(tile_rows=16, is_streamed=True), 1, [0.11] * 2, has_waited=True)
    assert clock.cost is None
    cost = cost_of(noted(clock, 1, [0.1] * 5, has_waited=False))
    assert (cost.streaming_s, cost.waiting_s, cost.tile_s) == pytest.approx((0.1, 0.01, 0.05))
    cost = cost_of(noted(clock, 2, [0.114] * 2, has_waited=True))
    assert cost.tile_s == pytest.approx(0.025)
    assert [cost.seconds(rows, 3) for rows in (16, 32, 64, 96)] == pytest.approx([0.11, 0.114, 0.114, 0.16])
    cost = cost_of(noted(clock, 4, [0.25] * 2, has_waited=True))
    assert [cost.seconds(rows, 3) for rows in (32, 48, 64, 80)] == pytest.approx([0.114, 0.19, 0.25, 0.31])


def test_the_clock_where_nothing_is_streamed() -> None:
    clock = SweepClock(tile_rows=16, is_streamed=False)
    cost = cost_of(noted(clock, 1, [0.5, 0.01, 0.01, 0.01, 0.01], has_waited=False))  # the first was disturbed
    assert cost.seconds(16, 3) == pytest.approx(0.01)
    assert cost.seconds(17, 0) == pytest.approx(0.02)
    cost = cost_of(noted(clock, 2, [0.013] * 2, has_waited=True))
    assert [cost.seconds(rows, 3) for rows in (16, 17, 33)] == pytest.approx([0.01, 0.013, 0.03])


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_consumer_that_was_slow_for_a_while(is_streamed: bool) -> None:
    """What waiting took with two tiles is not taken off sweeps of one that were faster than that."""
    clock = SweepClock(tile_rows=4, is_streamed=is_streamed)
    for _ in range(5):
        clock.note(2, 0.10, has_waited=False)
    for _ in range(5):
        clock.note(2, 1.10, has_waited=True)
        clock.note(1, 0.11, has_waited=True)
    assert clock.cost is not None
    assert 0 < clock.cost.tile_s <= 0.11 and 0 <= clock.cost.streaming_s <= 0.11 and clock.cost.waiting_s < 0.11


def test_fewer_tiles_take_no_longer() -> None:
    clock = noted(SweepClock(tile_rows=16, is_streamed=True), 1, [0.2] * 5, has_waited=False)
    cost = cost_of(noted(clock, 2, [0.1] * 2, has_waited=True))
    assert cost.seconds(1, 0) == cost.seconds(32, 1) == 0.1


def test_a_sweep_runs_ahead_now_and_then() -> None:
    """Whatever drafts promise: soon after the first ones, then less often."""
    speculation = Speculation(tile_rows=8, max_rows=8, is_streamed=True)
    drafters = [Drafters(lookup=Coin(random.Random(0), 1.0, how_often=1.0))]
    waits, ahead = True, []
    for i in range(200):
        drafts = speculation.drafts(drafters, [MAX_DEPTH], 0) if waits else None
        (ids,) = drafts.ids if drafts else [[]]
        speculation.record([len(ids)], [1 + len(ids)], drafts, num_tiles=1, seconds=1.0)
        if not waits:
            ahead.append(i)
        waits = bool(ids) or speculation.waits(drafters)
    assert ahead == [*range(1, 6), 13, 29, 61, 125, 191]


def test_a_clock_whose_plain_sweeps_are_long_ago() -> None:
    clock = noted(SweepClock(tile_rows=16, is_streamed=True), 1, [0.2] * 5, has_waited=False)
    cost = cost_of(noted(clock, 1, [0.1] * 2, has_waited=True))
    assert (cost.streaming_s, cost.waiting_s) == (0.1, 0.0)
    assert clock.sweeps_since_ahead == 2
    noted(clock, 1, [0.1] * 256, has_waited=True)
    assert clock.cost is None, "what is that old is measured again"


@pytest.mark.parametrize("num_tiles", [1, 2])
@pytest.mark.parametrize("has_waited", [True, False])
def test_one_time_decides_nothing(num_tiles: int, has_waited: bool) -> None:
    clock = noted(SweepClock(tile_rows=16, is_streamed=True), 1, [0.1] * 5, has_waited=False)
    cost = cost_of(noted(clock, 1, [0.11] * 2, has_waited=True))
    assert cost_of(noted(clock, num_tiles, [5.0], has_waited=has_waited)) == cost
    if (num_tiles, has_waited) == (2, True):
        assert cost_of(noted(clock, 2, [0.11], has_waited=True)).seconds(32, 0) == pytest.approx(0.1)


class Coin:
    """Has a draft now and then, of tokens that it takes to be as likely right as wrong; each is, by `chance`."""

    def __init__(self, rng: random.Random, chance: float, how_often: float = 0.5) -> None:
        self._rng, self._chance, self._how_often = rng, chance, how_often
        self.append([])

    def append(self, ids: Sequence[int]) -> None:
        self._has_draft, self.num_right = self._rng.random() < self._how_often, 0
        while self.num_right < MAX_DEPTH and self._rng.random() < self._chance:
            self.num_right += 1

    def chances(self, max_tokens: int) -> list[float]:
        return [0.5**i for i in range(1, 1 + len(self.draft(max_tokens)))]

    def draft(self, max_tokens: int) -> list[int]:
        return [7] * max_tokens if self._has_draft else []


def speculate(drafter: Coin, num_sweeps: int, seconds: Callable[[int, bool], float], noise: Iterator[float]) -> float:
    """Seconds a token of one sequence, without the noise with which the clock sees them."""
    speculation, drafters = Speculation(tile_rows=8, max_rows=16, is_streamed=True), [Drafters(lookup=drafter)]
    waits, spent_s, num_tokens = True, 0.0, 0
    for disturbance in itertools.islice(noise, num_sweeps):
        drafts = speculation.drafts(drafters, [MAX_DEPTH], 0) if waits else None
        (ids,) = drafts.ids if drafts else [[]]
        num_tiles, new = -(-(1 + len(ids)) // 8), 1 + min(len(ids), drafter.num_right)
        took_s = seconds(num_tiles, waits)
        spent_s, num_tokens = spent_s + took_s, num_tokens + new
        seen_s = took_s * disturbance
        speculation.record([len(ids)], [new], drafts, num_tiles=num_tiles, seconds=seen_s)
        drafter.append([7] * new)
        waits = bool(ids) or speculation.waits(drafters)
    return spent_s / num_tokens


def none(_: random.Random) -> Iterator[float]:
    return itertools.repeat(1.0)


def spikes(rng: random.Random) -> Iterator[float]:
    """Some more or less, and now and then another program."""
    return (rng.lognormvariate(0, 0.05) * rng.choice([1] * 19 + [4]) for _ in itertools.count())


def slow_start(rng: random.Random) -> Iterator[float]:
    return itertools.chain([1.4] * 5, spikes(rng))


@pytest.mark.parametrize("noise", [none, spikes, slow_start])
@pytest.mark.parametrize(("waiting_s", "tile_s"), [(0.0, 0.01), (0.1, 0.9), (0.3, 1.0)])
def test_never_slower_and_faster_where_drafts_are_right(
    waiting_s: float, tile_s: float, noise: Callable[[random.Random], Iterator[float]]
) -> None:
    def mean_s(chance: float) -> float:
        rngs = [random.Random(seed) for seed in range(3)]
        each = [
            speculate(Coin(rng, chance), 300, lambda n, waited: max(1.0, n * tile_s) + waiting_s * waited, noise(rng))
            for rng in rngs
        ]
        return sum(each) / len(each)

    assert mean_s(0.01) <= 1.03
    assert mean_s(0.9) < 0.5 + waiting_s


@pytest.mark.parametrize("noise", [none, spikes, slow_start])
@pytest.mark.parametrize("waiting_s", [0.0, 0.01])
@pytest.mark.parametrize("more_s", [0.02, 0.03, 0.04, 0.045, 0.049, 0.06])
def test_a_second_tile_that_costs_little(
    more_s: float, waiting_s: float, noise: Callable[[random.Random], Iterator[float]]
) -> None:
    """It is not taken for one that costs nothing, however often there is something to try."""
    each = []
    for seed in range(3):
        rng = random.Random(seed)
        coin = Coin(rng, 0.0, how_often=1.0)
        each.append(speculate(coin, 300, lambda n, waited: 1 + (n - 1) * more_s + waiting_s * waited, noise(rng)))
    assert sum(each) / len(each) <= 1.03
