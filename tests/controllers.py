"""What tests of the controller share: schedules of every kind, a device that is made up, and a consumer that looks."""

from __future__ import annotations

from collections.abc import Callable

from fake_transfer import FakeStore, FakeTransfer

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
