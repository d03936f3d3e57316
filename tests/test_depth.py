"""How deep drafts go, against all that is possible; and what they cost where they are useless."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramjax.decode.depth import DepthPlanner, SweepCost, expected_rate

RESIDENT = SweepCost(tile_rows=4, tile_s=1.0)
STREAMED = SweepCost(tile_rows=4, tile_s=1.0, streaming_s=50.0)


def plan(chances: Sequence[Sequence[float]], cost: SweepCost, *, max_rows: int = 16, max_depth: int = 15) -> list[int]:
    planner = DepthPlanner(max_rows=max_rows, max_depth=max_depth, slack=float("inf"))
    return planner.plan(chances, cost)


def test_the_examples() -> None:
    two = [[0.9, 0.8, 0.7], [0.5, 0.2]]
    assert plan(two, RESIDENT) == [2, 0]
    assert plan(two, SweepCost(tile_rows=4, tile_s=0.6, streaming_s=1.0)) == [3, 2]  # 1.2 times as long
    assert plan(two, SweepCost(tile_rows=4, tile_s=0.7, streaming_s=1.0)) == [2, 0]  # 1.4 times
    cost = SweepCost(tile_rows=16, streaming_s=0.13, tile_s=0.005)
    assert cost.seconds(1, 0) == cost.seconds(400, 15) == 0.13
    measured = SweepCost(tile_rows=16, streaming_s=0.13, tile_s=0.005, measured_s={1: 0.13, 2: 0.133})
    assert [measured.seconds(rows, 15) for rows in (1, 17, 400)] == [0.13, 0.133, 0.133]
    resident = SweepCost(tile_rows=16, tile_s=0.005, waiting_s=0.001, draft_s=0.0001)
    assert [resident.seconds(*n) for n in ((1, 0), (16, 0), (17, 0), (16, 15))] == [0.005, 0.005, 0.01, 0.0075]


def test_rows_that_cost_nothing_are_used() -> None:
    assert plan([[0.01, 0.001]], STREAMED) == [2]
    assert plan([[0.9] * 20], STREAMED, max_rows=64) == [15]
    assert plan([[0.9] * 20], STREAMED, max_rows=8) == [7]
    assert plan([[0.9] * 3] * 20, STREAMED, max_rows=20) == [0] * 20, "no row is left"
    assert plan([[0.9] * 3] * 20, STREAMED, max_rows=8) == [0] * 20
    assert plan([[], [0.5], []], STREAMED) == [0, 1, 0]
    assert plan([[], []], STREAMED) == [0, 0]
    assert plan([[0.0, 0.0]], STREAMED) == [0], "what cannot be right takes no row"


def test_equal_chances_go_to_the_beginnings_of_drafts() -> None:
    assert plan([[1.0] * 15] * 2, RESIDENT, max_rows=4) == [1, 1]


def test_a_draft_model_goes_as_deep_as_pays() -> None:
    chances = [[0.8**i for i in range(1, 16)]]
    costs = [SweepCost(tile_rows=16, tile_s=1.0, draft_s=draft_s) for draft_s in (0.0, 0.02, 0.1, 0.3, 0.9)]
    depths = [plan(chances, cost)[0] for cost in costs]
    best = [max(range(16), key=lambda d, cost=cost: expected_rate(chances, [d], cost)) for cost in costs]
    assert depths == best
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == 15
    assert depths[-1] == 0


FALLING = st.lists(st.floats(0, 1), max_size=3).map(lambda chances: sorted(chances, reverse=True))


@given(
    chances=st.lists(FALLING, min_size=1, max_size=3),
    max_rows=st.integers(1, 12),
    tile_rows=st.integers(1, 5),
    costs=st.tuples(*[st.sampled_from([0.0, 0.1, 0.5, 3.0])] * 3),
)
def test_no_other_depths_promise_more(
    chances: list[list[float]], max_rows: int, tile_rows: int, costs: tuple[float, float, float]
) -> None:
    streaming_s, waiting_s, draft_s = costs
    cost = SweepCost(tile_rows=tile_rows, tile_s=1.0, streaming_s=streaming_s, waiting_s=waiting_s, draft_s=draft_s)
    depths = plan(chances, cost, max_rows=max_rows)
    possible = [
        d for d in itertools.product(*(range(len(c) + 1) for c in chances)) if not any(d) or len(d) + sum(d) <= max_rows
    ]
    assert tuple(depths) in possible
    best = max(expected_rate(chances, d, cost) for d in possible)
    assert expected_rate(chances, depths, cost) == pytest.approx(best)


WAITING = SweepCost(tile_rows=4, tile_s=1.0, waiting_s=0.2)


@pytest.mark.parametrize("num_right", [0, 1, 4])
def test_never_slower_than_without_drafts(num_right: int) -> None:
    """However wrong the chances are."""
    planner, spent_s, plain_s, tried = DepthPlanner(max_rows=16), 0.0, 0.0, 0
    for _ in range(1000):
        depths = planner.plan([[0.99**i for i in range(1, 16)], [0.9, 0.5]], WAITING)
        tokens = [1 + min(depth, num_right) for depth in depths]
        spent_s += WAITING.seconds(2 + sum(depths), max(depths))
        plain_s += WAITING.seconds(2, 0) * sum(tokens) / 2
        tried += max(depths) > 0
        planner.record(depths, tokens, WAITING)
        assert spent_s <= 1.03 * plain_s
    assert tried > 3, "and yet they are tried"


def test_faster_where_chances_are_right() -> None:
    rng, planner, spent_s, plain_s = random.Random(0), DepthPlanner(max_rows=16), 0.0, 0.0
    for _ in range(1000):
        chances = [[rate**i for i in range(1, 16)] for rate in (rng.random(), rng.random())]
        depths = planner.plan(chances, WAITING)
        tokens = [
            sum(1 for _ in itertools.takewhile(lambda rate: rng.random() < rate, [c[0]] * d)) + 1
            for c, d in zip(chances, depths, strict=True)
        ]
        spent_s += WAITING.seconds(2 + sum(depths), max(depths))
        plain_s += WAITING.seconds(2, 0) * sum(tokens) / 2
        planner.record(depths, tokens, WAITING)
    assert spent_s < 0.8 * plain_s


def test_drafts_that_cost_nothing_are_tried_at_once() -> None:
    planner = DepthPlanner(max_rows=4)
    assert planner.plan([[0.1]], STREAMED) == [1]
    slow = SweepCost(tile_rows=4, tile_s=1.0, waiting_s=0.5)
    assert planner.plan([[0.9]], slow) == [0], "nothing is known yet of what drafts are worth"
    for _ in range(30):
        planner.record([0], [1], slow)
    assert planner.plan([[0.9]], slow) == [1]


def test_planning_is_quick() -> None:
    """64 sequences of 15 drafts each: far less than what a sweep takes."""
    rng = random.Random(0)
    chances = [[rng.random() ** i for i in range(1, 16)] for _ in range(64)]
    for cost in (STREAMED, SweepCost(tile_rows=16, tile_s=1.0, draft_s=0.01)):
        start = time.perf_counter()
        for _ in range(20):
            plan(chances, cost, max_rows=1024)
        assert (time.perf_counter() - start) / 20 < 0.05
