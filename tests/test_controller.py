"""The controller against a device that delays, reorders and fails copies: nothing is ever wrong or half-done."""

from __future__ import annotations

import pytest
from controllers import SCHEDULES, ConsumerError, check_slots, make, present, run_sweep
from fake_transfer import InjectedError
from hypothesis import given, settings
from hypothesis import strategies as st

from vramjax.errors import VramjaxError
from vramjax.residency.policy import Schedule
from vramjax.residency.present_layers import LayerState


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
