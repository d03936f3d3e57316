"""The controller in cases that are set up by hand: states, warm-ups, what stays after a failure, being closed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from controllers import ConsumerError, check_slots, load_ahead, make, present, run_sweep
from fake_transfer import FakeStore, FakeTransfer, InjectedError

from vramjax.errors import ConfigError, VramjaxError
from vramjax.residency.controller import Controller
from vramjax.residency.policy import (
    both_sides_window,
    past_window,
    resident,
)
from vramjax.residency.pool import Pool
from vramjax.residency.present_layers import LayerState


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
    assert at_once.sweep_at_once() is at_once.sweep_at_once(2)
    for _ in range(3):
        run_sweep(one_by_one, transfer)
    assert at_once.stats == one_by_one.stats
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
