"""Plans by bytes: never over the budget, and the fewest bytes streamed that there can be."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from typing import Any

import pytest
from fake_transfer import FakeStore, FakeTransfer, geometry_of_kind
from hypothesis import given, settings
from hypothesis import strategies as st

from vramjax.errors import BudgetError, ConfigError
from vramjax.residency import byte_policy
from vramjax.residency.byte_policy import pinned_ring_within, window_within
from vramjax.residency.controller import Controller
from vramjax.residency.policy import POLICIES, both_sides_window, past_window, pinned_ring, resident
from vramjax.residency.schedule import Load, Release, Schedule, Use

SIZES = {"a": 3, "b": 5, "c": 8, "d": 13}


@st.composite
def stacks(draw: st.DrawFn, max_layers: int) -> tuple[list[int], str, int, int]:
    """(bytes of the layers, their kinds, a budget, the length of rings)"""
    kinds = "".join(draw(st.lists(st.sampled_from("abcd"), min_size=1, max_size=max_layers)))
    layer_bytes = [SIZES[kind] for kind in kinds]
    smallest = sum(SIZES[kind] for kind in set(kinds))
    return layer_bytes, kinds, draw(st.integers(smallest, max(smallest, sum(layer_bytes)))), draw(st.integers(1, 4))


def best(layer_bytes: list[int], kinds: str, budget: int, ring: int) -> int | None:
    """Fewest bytes of a sweep with rings of `ring` slots, by trying every set of pinned layers; None: none fits."""
    fewest = None
    for pinned in itertools.product([False, True], repeat=len(kinds)):
        streamed = Counter(kind for kind, is_pinned in zip(kinds, pinned, strict=True) if not is_pinned)
        taken = sum(n for n, is_pinned in zip(layer_bytes, pinned, strict=True) if is_pinned)
        taken += sum(min(ring, count) * SIZES[kind] for kind, count in streamed.items())
        num_bytes = sum(count * SIZES[kind] for kind, count in streamed.items() if count > ring)  # others just stay
        if taken <= budget and (fewest is None or num_bytes < fewest):
            fewest = num_bytes
    return fewest


@settings(deadline=None, max_examples=200)
@given(stacks(max_layers=9), st.booleans())
def test_no_plan_streams_less(stack: tuple[list[int], str, int, int], warm: bool) -> None:
    layer_bytes, kinds, budget, ring = stack
    schedule = pinned_ring_within(layer_bytes, budget, kinds=kinds, ring=ring, warm=warm)
    lengths = (best(layer_bytes, kinds, budget, length) for length in range(ring, 0, -1))
    assert schedule.bytes_per_sweep(layer_bytes) == next(fewest for fewest in lengths if fewest is not None)


@settings(deadline=None, max_examples=200)
@given(stacks(max_layers=40), st.booleans())
def test_what_is_on_the_device_fits_at_every_moment(stack: tuple[list[int], str, int, int], warm: bool) -> None:
    """Replays sweeps with slots of each kind, independently of the module's own simulation."""
    layer_bytes, kinds, budget, ring = stack
    schedule = pinned_ring_within(layer_bytes, budget, kinds=kinds, ring=ring, warm=warm)
    assert schedule.peak_bytes(layer_bytes, kinds) <= budget
    slots: Counter[str] = Counter()  # that have ever been needed at once
    present: set[int] = set()
    streamed = 0
    for sweep in (schedule.warm_up, schedule.first_sweep, *[schedule.steady_sweep] * 3):
        streamed = 0
        for op in sweep:
            if isinstance(op, Load):
                assert op.layer_idx not in present
                present.add(op.layer_idx)
                streamed += layer_bytes[op.layer_idx]
                slots |= Counter(kinds[layer_idx] for layer_idx in present)
            elif isinstance(op, Release):
                present.remove(op.layer_idx)
            else:
                assert op.layer_idx in present
    assert sum(count * SIZES[kind] for kind, count in slots.items()) == schedule.peak_bytes(layer_bytes, kinds)
    assert streamed == schedule.bytes_per_sweep(layer_bytes)
    assert schedule.keep == schedule.end_resident_layers == schedule.peak_resident_layers


@settings(deadline=None, max_examples=200)
@given(stacks(max_layers=30))
def test_a_slot_goes_to_the_next_of_its_kind(stack: tuple[list[int], str, int, int]) -> None:
    """Use, release, load, in this order; the layer loaded is as far ahead of its use as the ring is long."""
    layer_bytes, kinds, budget, ring = stack
    schedule = pinned_ring_within(layer_bytes, budget, kinds=kinds, ring=ring)
    ops, streamed = schedule.steady_sweep, schedule.streamed_layers
    num_slots = schedule.peak_slots(kinds)
    for i, op in enumerate(ops):
        if isinstance(op, Use):
            assert (op.layer_idx in streamed) == (i + 1 < len(ops) and ops[i + 1] == Release(op.layer_idx))
        elif isinstance(op, Release):
            own = [layer_idx for layer_idx in streamed if kinds[layer_idx] == kinds[op.layer_idx]]
            length = num_slots[kinds[op.layer_idx]] - (kinds.count(kinds[op.layer_idx]) - len(own))
            assert 1 <= length <= ring
            assert len(own) > length  # or they would just stay
            assert ops[i + 1] == Load(own[(own.index(op.layer_idx) + length) % len(own)])
    for kind in set(kinds):
        rank = [i for i, layer_idx in enumerate(j for j, k in enumerate(kinds) if k == kind) if layer_idx in streamed]
        gaps = [b - a for a, b in itertools.pairwise([*rank, *(r + kinds.count(kind) for r in rank[:1])])]
        assert not gaps or max(gaps) - min(gaps) <= 1  # evenly spread, around the end of the sweep too


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 45), st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_one_kind_is_a_pinned_ring(num_layers: int, keep: int, ring: int, rest: int, warm: bool) -> None:
    schedule = pinned_ring_within([100] * num_layers, keep * 100 + rest, kinds=[0] * num_layers, ring=ring, warm=warm)
    assert schedule == pinned_ring(num_layers, keep, ring=ring, warm=warm)
    if keep < num_layers:
        # A schedule that repeats and uploads nothing ahead has one slot that changes: L - P + 1 uploads. Uploading
        # ahead costs the other slots of the ring.
        assert schedule.uploads_per_sweep - (num_layers - keep + 1) == min(ring, keep) - 1


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.floats(0, 1), st.integers(1, 3), st.integers(0, 2**32))
def test_copies_that_come_late_find_no_layer_in_use(kinds: list[int], share: float, ring: int, seed: int) -> None:
    """Run by a controller, on a device that delays and reorders copies and asserts every rule."""
    layer_bytes = [geometry_of_kind(kind).num_bytes for kind in kinds]
    smallest = sum(set(layer_bytes))
    budget = int(smallest + share * (sum(layer_bytes) - smallest))
    schedule = pinned_ring_within(layer_bytes, budget, kinds=kinds, ring=ring)
    transfer = FakeTransfer(seed, schedule.peak_slots(kinds))
    with Controller(FakeStore(kinds), schedule, transfer) as controller:
        for _ in range(3):
            for layer_idx, weights in controller.sweep():
                transfer.in_use = weights
                transfer.some_arrive()
                assert weights.alive
                assert weights.memory.content == layer_idx
                transfer.in_use = None
        assert controller.stats.peak_device_bytes <= budget
        assert controller.stats.last_sweep_bytes_uploaded == schedule.bytes_per_sweep(layer_bytes)


def test_an_example_of_two_kinds() -> None:
    schedule = pinned_ring_within([10, 10, 4, 4, 4, 4], 30, kinds="aabbbb", ring=2)
    assert schedule.streamed_layers == (2, 3, 4, 5)
    assert [str(op) for op in schedule.steady_sweep] == [
        *("use 0", "use 1", "use 2", "release 2", "load 4", "use 3", "release 3", "load 5"),
        *("use 4", "release 4", "load 2", "use 5", "release 5", "load 3"),
    ]
    assert (schedule.bytes_per_sweep([10, 10, 4, 4, 4, 4]), schedule.keep) == (16, 4)
    short = pinned_ring_within([10, 10, 4, 4, 4, 4], 14, kinds="aabbbb", ring=2)
    assert short.streamed_layers == (0, 1, 2, 3, 4, 5)
    assert short.peak_slots("aabbbb") == {"a": 1, "b": 1}
    assert pinned_ring_within([10, 10, 4, 4, 4, 4], 36, kinds="aabbbb") == resident(6, warm=False)


@settings(deadline=None)
@given(stacks(max_layers=12), st.sampled_from(["pinned_ring", "past", "both_sides"]))
def test_the_smallest_budget_is_named_and_works(stack: tuple[list[int], str, int, int], policy: str) -> None:
    layer_bytes, kinds, _, _ = stack
    with pytest.raises(BudgetError) as caught:
        window_within(layer_bytes, 1, policy, kinds=kinds)
    smallest = int(str(caught.value).split("expected at least ")[1].split()[0])
    assert window_within(layer_bytes, smallest, policy, kinds=kinds).peak_bytes(layer_bytes, kinds) <= smallest
    with pytest.raises(
        BudgetError, match=rf"budget_bytes is {smallest - 1} bytes; expected at least {smallest} bytes,"
    ):
        window_within(layer_bytes, smallest - 1, policy, kinds=kinds)


def test_what_is_said_when_the_budget_is_too_small() -> None:
    with pytest.raises(BudgetError) as caught:
        pinned_ring_within([3 << 20, 1 << 20, 1 << 20], 3 << 20, kinds="abb")
    assert str(caught.value) == (
        "budget_bytes is 3145728 bytes (3.0 MiB); expected at least 4194304 bytes (4.0 MiB), "
        "room for one layer of each of the 2 kinds"
    )
    with pytest.raises(BudgetError, match=r"at least 2 bytes, room for one layer$"):
        window_within([2, 2, 2], 1, kinds="aaa")
    with pytest.raises(BudgetError, match=r"at least 4 bytes, room for a past window of 1 layer$"):
        window_within([2, 2, 2], 3, "past", kinds="aaa")


def test_windows_within_a_budget_by_name() -> None:
    sizes, kinds = [10] * 8, [0] * 8
    assert window_within(sizes, 65, kinds=kinds) == pinned_ring(8, 6, warm=True)
    assert window_within(sizes, 65, kinds=kinds, warm=False) == pinned_ring(8, 6)
    assert window_within(sizes, 15, kinds=kinds) == pinned_ring(8, 1)
    assert window_within(sizes, 65, kinds=kinds, warm=True) == pinned_ring(8, 6, warm=True)
    assert window_within(sizes, 65, "past", kinds=kinds) == past_window(8, 3)
    assert window_within(sizes, 65, "both_sides", kinds=kinds, warm=True) == both_sides_window(8, 6, warm=True)
    for name in POLICIES:
        assert window_within(sizes, 80, name, kinds=kinds) == resident(8)
        assert window_within(sizes, 999, name, kinds=kinds, warm=False) == resident(8, warm=False)
    with pytest.raises(ConfigError, match="policy is 'ahead'; expected one of"):
        window_within(sizes, 999, "ahead", kinds=kinds)


def test_many_kinds_are_planned_in_good_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are too many plans to compare them all, the result still fits, and is nearly the best."""
    kinds = [i % 12 for i in range(120)]
    layer_bytes = [1_000_003 + 77_777 * kind + kind**5 for kind in kinds]
    budget = sum(layer_bytes) // 2
    start = time.perf_counter()
    schedule = pinned_ring_within(layer_bytes, budget, kinds=kinds)
    assert time.perf_counter() - start < 20
    assert schedule.peak_bytes(layer_bytes, kinds) <= budget
    # Every slot but those of the rings holds a pinned layer, and hardly a byte of the budget is left.
    assert schedule.peak_bytes(layer_bytes, kinds) >= 0.999 * budget
    monkeypatch.setattr(byte_policy, "_MAX_PLANS", 64)
    coarse = pinned_ring_within(layer_bytes, budget, kinds=kinds)
    assert coarse.peak_bytes(layer_bytes, kinds) <= budget
    assert coarse.bytes_per_sweep(layer_bytes) <= 1.1 * schedule.bytes_per_sweep(layer_bytes)


@pytest.mark.parametrize(
    ("layer_bytes", "kinds", "ring", "message"),
    [
        ([], [], 2, "0 sizes and 0 kinds of layers were given; expected one of each for every layer"),
        ([1, 1], "a", 2, "2 sizes and 1 kinds"),
        ([1, 2, 3], "aba", 2, "layer 2 has 3 bytes and another layer of its kind 1; expected the same"),
        ([1, 1], "aa", 0, "ring is 0; expected at least 1"),
    ],
)
def test_layers_that_cannot_be_planned(layer_bytes: list[int], kinds: Any, ring: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pinned_ring_within(layer_bytes, 10, kinds=kinds, ring=ring)


def test_bytes_of_a_window_count_slots_of_every_kind() -> None:
    """2 of a come and go before the first b: their slots wait while b computes, and are counted."""
    schedule: Schedule = past_window(6, 2)
    assert schedule.peak_bytes([5, 5, 5, 7, 7, 7], "aaabbb") == 2 * 5 + 3 * 7
    assert schedule.bytes_per_sweep([5, 5, 5, 7, 7, 7]) == 5 + 5 + 5 + 7


def test_the_ring_is_short_when_few_layers_are_streamed() -> None:
    for budget, ring in ((35, 1), (29, 1), (28, 2), (3, 2)):
        planned = pinned_ring_within([1] * 36, budget, kinds="a" * 36)
        assert planned == pinned_ring(36, budget) == pinned_ring(36, budget, ring=ring)
    # Of two kinds as of one: what counts is the uploads of a sweep.
    sizes, kinds = [5] * 4 + [1] * 20, "a" * 4 + "b" * 20
    assert pinned_ring_within(sizes, 33, kinds=kinds) == pinned_ring_within(sizes, 33, kinds=kinds, ring=1)
    assert pinned_ring_within(sizes, 26, kinds=kinds) == pinned_ring_within(sizes, 26, kinds=kinds, ring=2)
