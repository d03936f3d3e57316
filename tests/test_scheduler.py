"""Who gets slots and rows: plans of whole runs, and what holds of every one."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramjax.decode.scheduler import Request, Scheduler
from vramjax.decode.sweep_plan import SweepPlan, TileRows


def request(num_prompt: int, limit: int) -> Request:
    return Request(prompt_ids=[7] * num_prompt, limit=limit)


def scheduler(num_slots: int, *requests: Request, tile_rows: int = 4, max_chunks: int = 8) -> Scheduler:
    made = Scheduler(num_slots=num_slots, tile_rows=tile_rows, chunk_rows=10, max_chunks=max_chunks)
    assert [made.add(r) for r in requests] == list(range(len(requests)))
    return made


def rows_of(plan: SweepPlan | None) -> dict[int, tuple[int, ...]]:
    """Request -> slot, position, where what is drawn will stand."""
    assert plan is not None
    found = {}
    for draw in plan.draws:
        tile = plan.tiles[draw.tile_idx]
        assert tile.slots[draw.row] == draw.slot
        found[draw.request_idx] = (draw.slot, int(tile.positions[draw.row]), int(tile.draws[draw.row]))
    return found


def test_the_example() -> None:
    plans = scheduler(2, request(5, 3), request(9, 1), request(4, 2))
    assert rows_of(first := plans.next_sweep()) == {0: (0, -1, 5), 1: (1, -1, 9)}
    assert first and [(j.slot, len(j.prompt_ids), j.tile_idx, j.row) for j in first.joins] == [
        (0, 5, 0, 0),
        (1, 9, 0, 1),
    ]
    assert rows_of(second := plans.next_sweep()) == {0: (0, 5, 6), 2: (1, -1, 4)}
    assert second and [(j.slot, j.row) for j in second.joins] == [(1, 1)] and second.num_decoded == 1
    assert rows_of(plans.next_sweep()) == {0: (0, 6, 7), 2: (1, 4, 5)}
    assert plans.next_sweep() is None
    plans.add(request(3, 1))  # more can come at any time
    assert rows_of(plans.next_sweep()) == {3: (0, -1, 3)}
    assert plans.next_sweep() is None


def test_one_sequence_alone() -> None:
    plans = scheduler(1, request(5, 4))
    drawn = [rows_of(plans.next_sweep()) for _ in range(4)]
    assert drawn == [{0: (0, -1, 5)}, {0: (0, 5, 6)}, {0: (0, 6, 7)}, {0: (0, 7, 8)}]
    assert plans.next_sweep() is None


def test_sweeps_in_a_row() -> None:
    """Only of the same rows, and where nobody waits for one of their slots."""
    plans = scheduler(2, request(5, 8), request(9, 6), request(4, 3))

    def turns_and_rows() -> tuple[int, dict[int, tuple[int, ...]]]:
        plan = plans.next_sweep(max_turns=2)
        assert plan is not None
        return plan.num_turns, rows_of(plan)

    assert turns_and_rows() == (1, {0: (0, -1, 5), 1: (1, -1, 9)})
    assert turns_and_rows() == (1, {0: (0, 5, 6), 1: (1, 9, 10)}), "request 2 waits"
    plans.finish(1)
    assert turns_and_rows() == (1, {0: (0, 6, 7), 2: (1, -1, 4)})
    assert turns_and_rows() == (2, {0: (0, 7, 8), 2: (1, 4, 5)})
    assert turns_and_rows() == (2, {0: (0, 9, 10)}), "request 2 has its three tokens"
    assert turns_and_rows() == (1, {0: (0, 11, 12)}), "one token is left"
    assert plans.next_sweep(max_turns=2) is None


def test_a_stop_id_costs_one_row_at_most() -> None:
    plans = scheduler(1, request(5, 9), request(3, 1))
    plans.next_sweep()
    plans.next_sweep()  # planned before the first one's token was known, which was a stop id
    plans.finish(0)
    assert rows_of(plans.next_sweep()) == {1: (0, -1, 3)}
    assert plans.next_sweep() is None
    plans.finish(1)  # its only token was a stop id too: nothing more is to be done
    assert plans.next_sweep() is None


def test_more_rows_than_a_tile() -> None:
    plans = scheduler(6, *[request(2, 3) for _ in range(6)], tile_rows=4)
    plans.next_sweep()
    plan = plans.next_sweep()
    assert plan is not None and [tile.num_decoded for tile in plan.tiles] == [4, 2] and plan.num_decoded == 6
    assert [(d.tile_idx, d.row) for d in plan.draws] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1)]
    np.testing.assert_array_equal(plan.tiles[1].positions, [2, 2, -1, -1])


def test_prompts_of_one_sweep_are_limited_and_none_is_overtaken() -> None:
    plans = scheduler(4, request(10, 9), request(31, 9), request(1, 9), max_chunks=4)
    assert set(rows_of(plans.next_sweep())) == {0}  # 1 chunk; the next has 4
    assert set(rows_of(plans.next_sweep())) == {0, 1}
    assert set(rows_of(plans.next_sweep())) == {0, 1, 2}


def test_the_rows_of_a_tile() -> None:
    tile = TileRows.of([(1, 2, -1, 3), (0, -1, 9, 4)], 4)
    assert tile.table.dtype == np.int32
    assert tile.table.tolist() == [[1, 0, 0, 0], [2, -1, -1, -1], [-1, 9, -1, -1], [3, 4, -1, -1]]
    assert tile.positions.tolist() == [2, -1, -1, -1] and tile.num_decoded == 1
    assert TileRows.of([], 2).table.tolist() == [[0, 0], [-1, -1], [-1, -1], [-1, -1]]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_everything_is_drawn_once_and_a_slot_has_one_owner(data: st.DataObject) -> None:
    """Whatever the lengths are, whichever tokens are stop ids, and however late that is learnt."""
    num_slots, tile_rows = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=20))
    stops = [data.draw(st.integers(1, 9)) for _ in sizes]  # which token is a stop id
    rng = random.Random(data.draw(st.integers(0, 99)))
    plans = scheduler(num_slots, *[request(*size) for size in sizes], tile_rows=tile_rows, max_chunks=4)
    num_drawn: Counter[int] = Counter()
    stopped: dict[int, int] = {}  # request -> sweeps until this is learnt
    joined: list[int] = []
    owner: dict[int, int] = {}  # of a slot
    max_turns = data.draw(st.integers(1, 3))
    while (plan := plans.next_sweep(max_turns=max_turns)) is not None:
        if plan.num_turns > 1:  # which keeps nobody waiting
            assert plan.num_turns == max_turns and not plan.joins and len(plan.tiles) == 1
            assert len(joined) == len(sizes)
        assert plan.draws and len({d.slot for d in plan.draws}) == len(plan.draws) <= num_slots
        assert len(plan.tiles) == -(-len(plan.draws) // tile_rows)
        assert sum(-(-len(j.prompt_ids) // 10) for j in plan.joins) <= 4
        for draw in plan.draws:
            size, stop = sizes[draw.request_idx], stops[draw.request_idx]
            assert 0 <= draw.slot < num_slots
            is_first = num_drawn[draw.request_idx] == 0
            if is_first:
                joined.append(draw.request_idx)
                owner[draw.slot] = draw.request_idx
            assert owner[draw.slot] == draw.request_idx
            position = size[0] + num_drawn[draw.request_idx]
            assert rows_of(plan)[draw.request_idx] == (draw.slot, -1 if is_first else position - 1, position)
            before = num_drawn[draw.request_idx]
            num_drawn[draw.request_idx] += plan.num_turns
            if before < stop <= num_drawn[draw.request_idx]:
                stopped[draw.request_idx] = rng.randint(0, 1)
        for request_idx, num_sweeps in list(stopped.items()):
            if num_sweeps == 0:
                plans.finish(request_idx)
                del stopped[request_idx]
            else:
                stopped[request_idx] -= 1
    assert joined == list(range(len(sizes)))
    for i, (_, limit) in enumerate(sizes):
        assert min(limit, stops[i]) <= num_drawn[i] <= min(limit, stops[i] + 2 * max_turns - 1)


@pytest.mark.parametrize("num_slots", [1, 3, 16, 40])
def test_slots_are_not_idle_while_requests_wait(num_slots: int) -> None:
    plans = scheduler(num_slots, *[request(3, 1 + i % 5) for i in range(60)], max_chunks=40)
    num_rows = []
    while (plan := plans.next_sweep()) is not None:
        num_rows.append(len(plan.draws))
    full = [n == num_slots for n in num_rows]
    assert full == sorted(full, reverse=True)  # every slot has a row until the line is empty
    assert sum(num_rows) == sum(1 + i % 5 for i in range(60))
