"""The controller against a device that delays, reorders and fails copies: nothing is ever wrong or half-done."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from fake_transfer import FakeStore, FakeTransfer, InjectedError
from hypothesis import given, settings
from hypothesis import strategies as st

from vramjax.errors import ConfigError, VramjaxError
from vramjax.residency.controller import Controller, ReleaseMode
from vramjax.residency.policy import (
    Load,
    Op,
    Release,
    Schedule,
    Use,
    both_sides_window,
    past_window,
    pinned_ring,
    resident,
)
from vramjax.residency.pool import Pool
from vramjax.residency.present_layers import LayerState


class ConsumerError(Exception):
    """What the consumer of a sweep fails with."""


def load_ahead(num_layers: int, depth: int) -> Schedule:
    """`depth` uploads are in flight while a layer is used, also over the end of a sweep; nothing is kept."""
    depth = min(depth, num_layers - 1)
    sweep: list[Op] = []
    for cur in range(num_layers):
        sweep += [Load((cur + depth) % num_layers), Use(cur), Release(cur)]
    return Schedule(
        name="ahead",
        num_layers=num_layers,
        keep=depth,
        warm_up=tuple(Load(layer_idx) for layer_idx in range(depth)),
        first_sweep=tuple(sweep),
        steady_sweep=tuple(sweep),
    )


SCHEDULES: dict[str, Callable[[int, int, bool], Schedule]] = {
    "past": lambda num_layers, keep, warm: past_window(num_layers, keep, warm=warm),
    "both_sides": lambda num_layers, keep, warm: both_sides_window(num_layers, keep, warm=warm),
    "resident": lambda num_layers, keep, warm: resident(num_layers, warm=warm),
    "pinned_ring": lambda num_layers, keep, warm: pinned_ring(num_layers, keep, ring=1 + keep % 3, warm=warm),
    "ahead": lambda num_layers, keep, warm: load_ahead(num_layers, keep),
}


def make(
    schedule: Schedule, *, kinds: list[int] | None = None, seed: int = 0, cap: int = 128, release: ReleaseMode = "pool"
) -> tuple[Controller, FakeTransfer, Pool]:
    kinds = kinds if kinds is not None else [0] * schedule.num_layers
    transfer = FakeTransfer(seed, schedule.peak_slots(kinds))
    pool = Pool(cap)
    return Controller(FakeStore(kinds), schedule, transfer, pool, release=release), transfer, pool


def run_sweep(
    controller: Controller,
    transfer: FakeTransfer,
    *,
    raise_at: int | None = None,
    break_at: int | None = None,
) -> list[int]:
    """Consumes a sweep the way a layer loop does, checking the weights before and after each use of them."""
    seen = []
    for layer_idx, weights in controller.sweep():
        transfer.in_use = weights
        assert weights.alive
        assert weights.memory.content == layer_idx, "wrong weights"
        assert controller.state(layer_idx) is LayerState.RESIDENT
        transfer.some_arrive()
        assert weights.alive
        assert weights.memory.content == layer_idx, "weights changed while they were in use"
        transfer.in_use = None
        seen.append(layer_idx)
        if layer_idx == raise_at:
            raise ConsumerError
        if layer_idx == break_at:
            break
    return seen


def present(controller: Controller) -> set[int]:
    return {i for i in range(controller.num_layers) if controller.state(i) is not LayerState.ABSENT}


def check_slots(controller: Controller, transfer: FakeTransfer, pool: Pool) -> None:
    """Every slot that was ever made is accounted for, and the device agrees."""
    stats, num_present = controller.stats, len(present(controller))
    assert len(transfer.live) == num_present + pool.num_slots
    assert stats.pool_misses == num_present + pool.num_slots + stats.slots_freed + stats.slots_lost


@st.composite
def arms(draw: st.DrawFn) -> dict:
    num_layers = draw(st.integers(1, 7))
    make_schedule = draw(st.sampled_from(sorted(SCHEDULES)))
    return {
        "schedule": SCHEDULES[make_schedule](num_layers, draw(st.integers(1, num_layers)), draw(st.booleans())),
        "kinds": draw(st.lists(st.integers(0, 2), min_size=num_layers, max_size=num_layers)),
        "seed": draw(st.integers(0, 2**32)),
        "release": draw(st.sampled_from(["pool", "free"])),
        "cap": draw(st.sampled_from([128, 128, 0, 1, 2, 3])),
    }


@settings(deadline=None, max_examples=200)
@given(arms())
def test_weights_are_right_and_costs_are_those_of_the_schedule(arm: dict) -> None:
    controller, transfer, pool = make(**arm)
    schedule: Schedule = arm["schedule"]
    closed_pool = arm["release"] == "pool" and arm["cap"] == 128
    everything = list(range(schedule.num_layers))
    for sweep in range(1, 5):
        before = controller.stats
        assert run_sweep(controller, transfer) == everything
        stats = controller.stats
        uploads = schedule.first_sweep_uploads if sweep == 1 else schedule.uploads_per_sweep
        assert stats.sweeps == sweep
        assert stats.last_sweep_uploads == uploads
        assert stats.last_sweep_is_steady == (sweep > 1)
        assert stats.uploads == len(transfer.uploaded)
        assert stats.uploads - before.uploads == uploads + (sweep == 1) * schedule.warm_up_uploads
        if schedule.name not in ("ahead", "pinned_ring"):  # where uploads are for the next sweep too
            assert stats.hits - before.hits == schedule.num_layers - uploads
        assert stats.resident_layers_end == len(present(controller)) == schedule.end_resident_layers
        assert stats.uploads - stats.evictions == schedule.end_resident_layers
        check_slots(controller, transfer, pool)
        if closed_pool and sweep > 1:
            assert stats.pool_misses == before.pool_misses
    stats = controller.stats
    peak_slots = schedule.peak_slots(arm["kinds"])
    assert stats.peak_resident_layers == schedule.peak_resident_layers
    assert stats.peak_device_bytes <= sum(num * (10 + kind) for kind, num in peak_slots.items())  # type: ignore
    if closed_pool:
        assert stats.pool_misses == sum(peak_slots.values())
        assert stats.slots_freed == stats.pool_fallback_frees == 0
        assert stats.peak_device_bytes == sum(num * (10 + kind) for kind, num in peak_slots.items())  # type: ignore
    elif arm["release"] == "free" or arm["cap"] == 0:
        assert stats.pool_hits == 0
        assert stats.pool_misses == stats.uploads
        assert stats.slots_freed == stats.evictions
    controller.close()
    assert not transfer.live
    check_slots(controller, transfer, pool)


FAULTS = st.one_of(
    st.just(("none", 0)),
    st.tuples(st.sampled_from(["before", "after", "in_flight", "free", "raise", "break"]), st.integers(0, 8)),
)


@settings(deadline=None, max_examples=200)
@given(arms(), st.lists(FAULTS, min_size=1, max_size=6))
def test_after_any_failure_the_next_sweep_starts_cold_and_is_right(arm: dict, faults: list[tuple[str, int]]) -> None:
    controller, transfer, pool = make(**arm)
    schedule: Schedule = arm["schedule"]
    everything = list(range(schedule.num_layers))
    cold = True
    for fault, at in [*faults, ("none", 0), ("none", 0)]:
        transfer.upload_faults = {at: fault} if fault in ("before", "after", "in_flight") else {}
        transfer.free_faults = {at} if fault == "free" else set()
        may_fail = fault not in ("none", "break") or transfer.has_failing_copy()
        uploaded_before, kept = len(transfer.uploaded), present(controller)
        whole = False
        try:
            seen = run_sweep(
                controller,
                transfer,
                raise_at=at if fault == "raise" else None,
                break_at=at if fault == "break" else None,
            )
            whole = not (fault == "break" and at in everything)
            assert seen == (everything if whole else everything[: at + 1])
        except (InjectedError, ConsumerError):
            assert may_fail
        transfer.in_use = None
        check_slots(controller, transfer, pool)
        num_uploaded = len(transfer.uploaded) - uploaded_before
        if whole:
            if not schedule.releases:
                assert num_uploaded == schedule.num_layers - len(kept)
            elif cold:
                assert num_uploaded == schedule.warm_up_uploads + schedule.first_sweep_uploads
            else:
                assert num_uploaded == schedule.uploads_per_sweep
            assert len(present(controller)) == schedule.end_resident_layers
        elif schedule.releases:
            assert not present(controller)
        else:
            assert kept <= present(controller)
        assert all(controller.state(i) is not LayerState.LOADING for i in present(controller)) or whole
        cold = not whole
    assert not cold
    assert controller.stats.peak_resident_layers <= schedule.peak_resident_layers
    controller.close()
    assert not transfer.live
    check_slots(controller, transfer, pool)


@settings(deadline=None, max_examples=200)
@given(arms(), st.integers(0, 6), st.sets(st.integers(0, 8)))
def test_closing_at_any_layer_gives_everything_back(arm: dict, at: int, free_faults: set[int]) -> None:
    """Also when some of the frees fail: the first error is raised, after everything is off the device."""
    controller, transfer, pool = make(**arm)
    run_sweep(controller, transfer)
    transfer.free_faults = free_faults if arm["release"] == "pool" and arm["cap"] == 128 else set()
    sweep = controller.sweep()
    for layer_idx, _ in sweep:
        if layer_idx == at:
            break
    try:
        controller.close()
    except InjectedError:
        assert free_faults
    assert not transfer.live
    assert not present(controller)
    assert pool.num_slots == 0
    check_slots(controller, transfer, pool)
    transfer.free_faults = {0}
    controller.close()
    if at < controller.num_layers:
        with pytest.raises(VramjaxError, match="closed in the middle of a sweep"):
            next(sweep)
    check_slots(controller, transfer, pool)


def test_the_numbers_of_the_docstring() -> None:
    controller, transfer, _ = make(past_window(3, 1))
    for _ in range(3):
        run_sweep(controller, transfer)
    assert transfer.uploaded == [0, 1, 2, 0, 1, 0, 1]
    stats = controller.stats
    assert (stats.uploads, stats.hits, stats.evictions) == (7, 2, 6)
    assert (stats.pool_misses, stats.pool_hits) == (2, 7)
    assert (stats.bytes_uploaded, stats.last_sweep_bytes_uploaded) == (70, 20)
    assert (stats.peak_resident_layers, stats.peak_device_bytes) == (2, 20)
    assert (stats.resident_layers_end, stats.resident_arrays_end) == (1, 1)


def test_stats_are_a_copy() -> None:
    controller, transfer, _ = make(past_window(3, 1))
    before = controller.stats
    run_sweep(controller, transfer)
    assert (before.uploads, before.pool_misses) == (0, 0)
    controller.stats.uploads = 1000
    assert controller.stats.uploads == 3


class Late(FakeTransfer):
    def some_arrive(self) -> None:
        """Nothing arrives before it is waited for."""


def test_a_copy_in_transit_is_waited_for_before_its_memory_goes_to_another() -> None:
    # The tail that this warm-up loads is released at layer 0, before anything has used it.
    controller = Controller(FakeStore([0] * 4), both_sides_window(4, 2, warm=True), transfer := Late(seed=0))
    assert run_sweep(controller, transfer) == [0, 1, 2, 3]
    assert transfer.uploaded == [2, 3, 0, 1, 2, 3]


def test_states() -> None:
    controller = Controller(FakeStore([0] * 3), load_ahead(3, 1), Late(seed=0))
    assert [controller.state(i) for i in range(3)] == [LayerState.ABSENT] * 3
    controller.warm_up()
    assert [controller.state(i) for i in range(3)] == [LayerState.LOADING, LayerState.ABSENT, LayerState.ABSENT]
    sweep = controller.sweep()
    next(sweep)
    assert [controller.state(i) for i in range(3)] == [
        LayerState.RESIDENT,
        LayerState.LOADING,
        LayerState.ABSENT,
    ]
    next(sweep)
    assert [controller.state(i) for i in range(3)] == [
        LayerState.ABSENT,
        LayerState.RESIDENT,
        LayerState.LOADING,
    ]


def test_warm_up_runs_once_and_leaves_the_first_sweep_like_the_others() -> None:
    controller, transfer, _ = make(past_window(5, 2, warm=True))
    controller.warm_up()
    controller.warm_up()
    assert transfer.uploaded == [3, 4]
    run_sweep(controller, transfer)
    controller.warm_up()
    assert transfer.uploaded == [3, 4, 0, 1, 2]
    assert controller.stats.last_sweep_uploads == 3
    assert controller.stats.hits == 2


@pytest.mark.parametrize("how", ["before", "after"])
def test_a_warm_up_that_fails_is_done_again(how: str) -> None:
    controller, transfer, pool = make(past_window(5, 2, warm=True))
    transfer.upload_faults = {1: how}
    with pytest.raises(InjectedError):
        controller.warm_up()
    assert not present(controller)
    check_slots(controller, transfer, pool)
    run_sweep(controller, transfer)
    assert transfer.uploaded == [3, 3, 4, 0, 1, 2]


def test_what_is_resident_stays_through_an_aborted_sweep() -> None:
    controller, transfer, _ = make(resident(5, warm=False))
    with pytest.raises(ConsumerError):
        run_sweep(controller, transfer, raise_at=2)
    assert present(controller) == {0, 1, 2}
    run_sweep(controller, transfer)
    run_sweep(controller, transfer, break_at=1)
    run_sweep(controller, transfer)
    assert transfer.uploaded == [0, 1, 2, 3, 4]
    assert controller.stats.sweeps_aborted == 2


def test_a_resident_layer_whose_copy_failed_is_uploaded_again() -> None:
    controller, transfer, _ = make(resident(4))
    transfer.upload_faults = {1: "in_flight"}
    with pytest.raises(InjectedError):
        run_sweep(controller, transfer)
    assert present(controller) == {0, 2, 3}
    run_sweep(controller, transfer)
    assert transfer.uploaded == [0, 1, 2, 3, 1]


def test_memory_that_a_copy_failed_into_is_not_used_again() -> None:
    controller, transfer, pool = make(past_window(4, 1))
    run_sweep(controller, transfer)
    transfer.upload_faults = {1: "in_flight"}
    with pytest.raises(InjectedError):
        run_sweep(controller, transfer)
    assert (controller.stats.slots_freed, controller.stats.slots_lost, pool.num_slots) == (1, 0, 1)


@pytest.mark.parametrize("warm", [False, True])
def test_a_sweep_at_once_counts_as_any_other(warm: bool) -> None:
    (one_by_one, transfer, _), (at_once, other, _) = (make(resident(3, warm=warm)) for _ in range(2))
    for num_sweeps in range(4):
        run_sweep(one_by_one, transfer)
        weights = at_once.sweep_at_once()
        other.some_arrive()
        assert [each.memory.content for each in weights] == [0, 1, 2]
        assert at_once.stats == one_by_one.stats and at_once.stats.sweeps == num_sweeps + 1
    assert at_once.sweep_at_once() is at_once.sweep_at_once()
    assert run_sweep(at_once, other) == [0, 1, 2]
    at_once.forget()
    assert [each.memory.content for each in at_once.sweep_at_once()] == [0, 1, 2]
    sweep = at_once.sweep()
    next(sweep)
    with pytest.raises(VramjaxError, match="another sweep of this controller is not finished"):
        at_once.sweep_at_once()
    sweep.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not at_once.stats.last_sweep_uploads and len(at_once.sweep_at_once()) == 3
    at_once.close()
    with pytest.raises(VramjaxError, match="the controller is closed"):
        at_once.sweep_at_once()


def test_ctrl_c_is_a_failure_like_any_other() -> None:
    class Interrupted(FakeTransfer):
        def wait(self, slot) -> None:
            super().wait(slot)
            if self.uploaded == [0, 1, 2]:
                self.uploaded.append(-1)
                raise KeyboardInterrupt

    schedule = past_window(4, 1)
    transfer, pool = Interrupted(0, schedule.peak_slots([0] * 4)), Pool()
    controller = Controller(FakeStore([0] * 4), schedule, transfer, pool)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(controller, transfer)
    assert not present(controller)
    assert pool.num_slots == 2  # both slots of the peak are back
    check_slots(controller, transfer, pool)
    run_sweep(controller, transfer)
    assert controller.stats.last_sweep_uploads == 4


def test_a_store_that_fails_costs_no_slot() -> None:
    class Torn(FakeStore):
        reads = 0

        def layer(self, layer_idx: int) -> tuple[int, int]:
            self.reads += 1
            if self.reads == 6:
                raise OSError("disk on fire")
            return super().layer(layer_idx)

    transfer, pool = FakeTransfer(0), Pool()
    controller = Controller(Torn([0] * 4), past_window(4, 1), transfer, pool)
    run_sweep(controller, transfer)
    with pytest.raises(OSError, match="disk on fire"):
        run_sweep(controller, transfer)
    assert pool.num_slots == len(transfer.live) == 2
    assert controller.stats.slots_lost == 0
    run_sweep(controller, transfer)


def test_one_sweep_at_a_time() -> None:
    controller, transfer, _ = make(past_window(3, 1))
    sweep = controller.sweep()
    second = controller.sweep()  # nothing has begun, so nothing is wrong yet
    next(sweep)
    for call in (controller.sweep, controller.warm_up, lambda: next(second)):
        with pytest.raises(VramjaxError, match="another sweep of this controller is not finished; run it to its end"):
            call()
    assert [layer_idx for layer_idx, _ in sweep] == [1, 2]  # it has not suffered
    run_sweep(controller, transfer)
    assert controller.stats.sweeps == 2


def test_a_sweep_that_is_dropped_or_never_begun_blocks_nothing() -> None:
    controller, transfer, _ = make(past_window(3, 1))
    controller.sweep()
    sweep: Iterator | None = controller.sweep()
    next(sweep)
    del sweep
    assert not present(controller)
    run_sweep(controller, transfer)
    assert (controller.stats.sweeps, controller.stats.sweeps_aborted) == (1, 1)


def test_closed() -> None:
    schedule = past_window(3, 1)
    transfer = FakeTransfer(0, schedule.peak_slots([0] * 3))
    with Controller(FakeStore([0] * 3), schedule, transfer) as controller:
        run_sweep(controller, transfer)
        begun_later = controller.sweep()
    assert not transfer.live
    for call in (controller.sweep, controller.warm_up, lambda: next(begun_later)):
        with pytest.raises(VramjaxError, match="the controller is closed"):
            call()
    controller.close()
    assert controller.stats.uploads == 3


def test_closing_inside_the_loop_ends_the_sweep_with_an_error() -> None:
    controller, transfer, _ = make(past_window(3, 1))
    with pytest.raises(VramjaxError, match="closed in the middle of a sweep"):
        for _ in controller.sweep():
            controller.close()
    assert not transfer.live
    assert controller.stats.sweeps_aborted == 1


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="the schedule is for 3 layers and the store has 2; expected the same"):
        Controller(FakeStore([0] * 2), past_window(3, 1), FakeTransfer(0))
    with pytest.raises(ConfigError, match="release is 'drop'; expected 'pool' or 'free'"):
        Controller(FakeStore([0] * 3), past_window(3, 1), FakeTransfer(0), release="drop")  # type: ignore
