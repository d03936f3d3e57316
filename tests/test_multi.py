"""Sweeps over several devices, each of which delays, reorders and fails copies: right on all of them, or on none."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_transfer import FakeStore, FakeTransfer, InjectedError
from hypothesis import given, settings
from hypothesis import strategies as st

from vramjax.errors import ConfigError, VramjaxError
from vramjax.residency.controller import Controller
from vramjax.residency.multi import MultiController, layers_of_device
from vramjax.residency.policy import Schedule, window
from vramjax.residency.pool import Pool
from vramjax.residency.present_layers import LayerState

POLICIES = ("pinned_ring", "past", "both_sides")


class ConsumerError(Exception):
    """What the consumer of a sweep fails with."""


class Devices:
    """A `MultiController` over tortured devices, with all that was put into it."""

    def __init__(self, schedules: list[Schedule], seed: int = 0) -> None:
        self.schedules = schedules
        self.transfers: list[FakeTransfer] = []
        self.pools: list[Pool] = []
        controllers = []
        for i, schedule in enumerate(schedules):
            kinds = [0] * schedule.num_layers
            self.transfers.append(FakeTransfer(seed + i, schedule.peak_slots(kinds)))
            self.pools.append(Pool())
            controllers.append(Controller(FakeStore(kinds), schedule, self.transfers[-1], self.pools[-1]))
        self.layers = MultiController(controllers)

    def run_sweep(self, *, raise_at: int | None = None, break_at: int | None = None) -> list[int]:
        seen = []
        for layer_idx, weights in self.layers.sweep():
            device_idx, own_idx = layer_idx % len(self.transfers), layer_idx // len(self.transfers)
            assert weights.memory in self.transfers[device_idx].live, "weights of another device"
            for transfer in self.transfers:
                transfer.some_arrive()
            assert weights.alive
            assert weights.memory.content == own_idx, "wrong weights"
            seen.append(layer_idx)
            if layer_idx == raise_at:
                raise ConsumerError
            if layer_idx == break_at:
                break
        return seen

    def num_uploaded(self) -> list[int]:
        return [len(transfer.uploaded) for transfer in self.transfers]

    def check_slots(self) -> None:
        for controller, transfer, pool in zip(self.layers.controllers, self.transfers, self.pools, strict=True):
            states = [controller.state(i) for i in range(controller.num_layers)]
            num_present = sum(state is not LayerState.ABSENT for state in states)
            assert len(transfer.live) == num_present + pool.num_slots


@st.composite
def devices(draw: st.DrawFn) -> Devices:
    num_devices = draw(st.integers(1, 4))
    num_layers = draw(st.integers(num_devices, 9))
    schedules = []
    for i in range(num_devices):
        count = len(layers_of_device(i, num_layers, num_devices))
        keep, policy = draw(st.integers(1, count)), draw(st.sampled_from(POLICIES))
        schedules.append(window(count, keep, policy, warm=draw(st.booleans())))
    return Devices(schedules, seed=draw(st.integers(0, 2**32)))


def test_layers_are_dealt_out_in_turns() -> None:
    assert [list(layers_of_device(i, 7, 3)) for i in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


@settings(deadline=None, max_examples=200)
@given(devices())
def test_every_device_has_its_share_and_pays_for_it_alone(run: Devices) -> None:
    everything = list(range(run.layers.num_layers))
    run.layers.warm_up()
    assert run.num_uploaded() == [schedule.warm_up_uploads for schedule in run.schedules]
    for sweep in range(1, 5):
        before = run.num_uploaded()
        assert run.run_sweep() == everything
        for schedule, controller, transfer, num_before in zip(
            run.schedules, run.layers.controllers, run.transfers, before, strict=True
        ):
            uploads = schedule.first_sweep_uploads if sweep == 1 else schedule.uploads_per_sweep
            assert len(transfer.uploaded) - num_before == controller.stats.last_sweep_uploads == uploads
        each, stats = [controller.stats for controller in run.layers.controllers], run.layers.stats
        assert stats.uploads == sum(run.num_uploaded())
        assert stats.last_sweep_bytes_uploaded == sum(s.last_sweep_bytes_uploaded for s in each)
        assert stats.peak_device_bytes == sum(s.peak_device_bytes for s in each)
        assert (stats.sweeps, stats.sweeps_aborted, stats.last_sweep_is_steady) == (sweep, 0, sweep > 1)
        run.check_slots()
    run.layers.close()
    assert not any(transfer.live for transfer in run.transfers)


FAULTS = st.tuples(
    st.sampled_from(["before", "after", "in_flight", "raise", "break", "none"]), st.integers(0, 9), st.integers(0, 3)
)


@settings(deadline=None, max_examples=200)
@given(devices(), st.lists(FAULTS, min_size=1, max_size=5))
def test_what_fails_on_one_device_is_aborted_on_all_and_the_next_sweep_is_right(
    run: Devices, faults: list[tuple[str, int, int]]
) -> None:
    everything, sweeps, aborted = list(range(run.layers.num_layers)), 0, 0
    whole = False
    for fault, at, device_idx in [*faults, *[("none", 0, 0)] * 3]:  # a copy that failed may be for the next sweep
        may_fail = fault not in ("none", "break") or any(transfer.has_failing_copy() for transfer in run.transfers)
        for i, transfer in enumerate(run.transfers):
            fails = i == device_idx and fault in ("before", "after", "in_flight")
            transfer.upload_faults = {at: fault} if fails else {}
        try:
            seen = run.run_sweep(raise_at=at if fault == "raise" else None, break_at=at if fault == "break" else None)
            whole = not (fault == "break" and at in everything)
            assert seen == (everything if whole else everything[: at + 1])
        except (InjectedError, ConsumerError):
            whole = False
            assert may_fail
        run.check_slots()
        sweeps, aborted = sweeps + whole, aborted + (not whole)
        assert (run.layers.stats.sweeps, run.layers.stats.sweeps_aborted) == (sweeps, aborted)
        for controller in run.layers.controllers:  # none is in the middle of anything
            states = [controller.state(i) for i in range(controller.num_layers)]
            num_present = sum(state is not LayerState.ABSENT for state in states)
            if controller.schedule.releases:
                assert num_present in ((0,) if fault in ("raise", "break") and not whole else (0, end_of(controller)))
            controller.sweep()
    assert whole
    assert run.layers.stats.last_sweep_is_steady
    assert run.layers.stats.last_sweep_uploads == sum(schedule.uploads_per_sweep for schedule in run.schedules)
    run.layers.close()
    assert not any(transfer.live for transfer in run.transfers)


def end_of(controller: Controller) -> int:
    return controller.schedule.end_resident_layers


def test_sweeps_end_where_python_has_no_assertions() -> None:
    code = """
import numpy as np
from vramjax.residency import Controller, DeviceTransfer, HostStore, MultiController, pinned_ring

controllers = [
    Controller(HostStore([np.full(4, i, np.float32) for i in range(3)]), pinned_ring(3, 1), DeviceTransfer())
    for _ in range(2)
]
with MultiController(controllers) as layers:
    for _ in range(3):
        seen = [layer_idx for layer_idx, _ in layers.sweep()]
    print(seen, layers.stats.sweeps, layers.stats.sweeps_aborted, layers.stats.last_sweep_is_steady)
"""
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[0, 1, 2, 3, 4, 5] 3 0 True\n", done.stderr


def test_a_sweep_that_fails_on_the_last_device_has_ended_on_none() -> None:
    run = Devices([window(3, 2), window(3, 2), window(3, 2)])
    run.run_sweep()
    run.transfers[2].upload_faults = {run.schedules[2].uploads_per_sweep - 1: "before"}
    # By the upload for the next sweep, after the last layer. Who keeps the error keeps every frame of the sweep alive.
    with pytest.raises(InjectedError) as kept:
        run.run_sweep()
    assert [controller.stats.sweeps for controller in run.layers.controllers] == [1, 1, 1]
    assert [controller.stats.sweeps_aborted for controller in run.layers.controllers] == [1, 1, 1]
    run.run_sweep()
    assert run.layers.stats.last_sweep_uploads == sum(schedule.first_sweep_uploads for schedule in run.schedules)
    assert kept.value.__traceback__ is not None


def test_a_device_uploads_when_its_next_layer_is_asked_for() -> None:
    """And not earlier: then what the consumer queues for that layer would wait for the upload."""
    run = Devices([window(2, 1), window(2, 1)])
    run.run_sweep()
    log: list[str] = []

    class Log(list):
        def append(self, layer_idx: int) -> None:
            log.append(f"upload {layer_idx}")

    for transfer in run.transfers:
        transfer.uploaded = Log()
    for layer_idx, _ in run.layers.sweep():
        log.append(f"layer {layer_idx}")
    # Both layers of each device pass through one slot: own layer 1 comes when own layer 0 has gone.
    assert log == ["layer 0", "layer 1", "upload 1", "layer 2", "upload 1", "layer 3", "upload 0", "upload 0"]


def test_one_sweep_at_a_time() -> None:
    run = Devices([window(2, 1), window(1, 1)])
    sweep = run.layers.sweep()
    second = run.layers.sweep()  # nothing has begun, so nothing is wrong yet
    next(sweep)
    for call in (run.layers.sweep, run.layers.warm_up, lambda: next(second)):
        with pytest.raises(VramjaxError, match="another sweep of this controller is not finished"):
            call()
    assert [layer_idx for layer_idx, _ in sweep] == [1, 2]  # it has not suffered
    assert (run.layers.stats.sweeps, run.layers.stats.sweeps_aborted) == (1, 0)


def test_closing_ends_the_sweep_on_all_devices() -> None:
    for at in range(5):
        run = Devices([window(2, 1), window(2, 1), window(1, 1)])
        with pytest.raises(VramjaxError, match=r"closed in the middle of a sweep"):
            for layer_idx, _ in run.layers.sweep():
                if layer_idx == at:
                    run.layers.close()
        assert not any(transfer.live for transfer in run.transfers)
        with pytest.raises(VramjaxError, match="the controller is closed"):
            run.layers.sweep()
        run.layers.close()


def test_a_free_that_fails_on_one_device_leaves_nothing_on_the_others() -> None:
    run = Devices([window(2, 1), window(2, 1)])
    run.run_sweep()
    run.transfers[0].free_faults = {0}
    with pytest.raises(InjectedError):
        run.layers.close()
    assert not any(transfer.live for transfer in run.transfers)


@pytest.mark.parametrize("counts", [(), (1, 2), (3, 1), (2, 2, 1, 2)])
def test_shares_that_are_none(counts: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"the controllers have \[.*\] layers; expected"):
        Devices([window(count, None) for count in counts])
