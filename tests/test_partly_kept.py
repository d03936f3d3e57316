"""A store that keeps what is streamed and reads the rest once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from vramjax.residency.controller import Controller
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.geometry import PyTree, geometry_of
from vramjax.residency.partly_kept import PartlyKeptStore
from vramjax.residency.policy import past_window, pinned_ring
from vramjax.residency.schedule import Schedule

NUM_LAYERS = 7
GEOMETRY = geometry_of({"w": np.zeros((64, 32), np.int8), "s": np.zeros(64, np.float32)})


class Disk:
    """Layer i is filled with i + 1; counts reads."""

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.fails_at: int | None = None

    def read_into(self, layer_idx: int, views: PyTree) -> None:
        if layer_idx == self.fails_at:
            raise OSError("the disk is gone")
        self.reads[layer_idx] += 1
        views["w"][...] = layer_idx + 1
        views["s"][...] = layer_idx + 1


@pytest.fixture
def disk() -> Disk:
    return Disk()


def open_store(disk: Disk, schedule: Schedule) -> PartlyKeptStore:
    return PartlyKeptStore(disk.read_into, [GEOMETRY] * NUM_LAYERS, kept=schedule.streamed_layers)


def sums(controller: Controller) -> Iterator[tuple[int, int]]:
    for layer_idx, weights in controller.sweep():
        yield layer_idx, int(np.asarray(weights["w"], np.int64).sum() // (64 * 32)) + int(weights["s"][5])


EXPECTED = [(i, 2 * (i + 1)) for i in range(NUM_LAYERS)]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    "schedule", [lambda warm: pinned_ring(7, 4, warm=warm), lambda warm: past_window(7, 3, warm=warm)]
)
def test_each_layer_is_read_once(disk: Disk, schedule, warm: bool) -> None:
    planned = schedule(warm)
    assert 0 < len(planned.streamed_layers) < NUM_LAYERS
    store = open_store(disk, planned)
    assert sorted(disk.reads) == list(planned.streamed_layers)
    with Controller(store, planned, FusedTransfer()) as controller:
        for _ in range(5):
            assert list(sums(controller)) == EXPECTED
        assert disk.reads == Counter(range(NUM_LAYERS))
        assert controller.stats.uploads > NUM_LAYERS + 4 * len(planned.streamed_layers) - 3
    store.close()
    store.close()


def test_after_a_broken_sweep_the_rest_is_read_again(disk: Disk) -> None:
    schedule = pinned_ring(NUM_LAYERS, 4)
    store = open_store(disk, schedule)
    with Controller(store, schedule, FusedTransfer()) as controller:
        for stop in (1, 4, 6):
            assert list(itertools.islice(sums(controller), stop)) == EXPECTED[:stop]
            assert list(sums(controller)) == EXPECTED
            assert list(sums(controller)) == EXPECTED
        assert all(disk.reads[i] == 1 for i in schedule.streamed_layers)
        assert all(disk.reads[i] > 1 for i in set(range(NUM_LAYERS)) - set(schedule.streamed_layers))
    store.close()


def num_arrays() -> int:
    """Arrays that are alive, but for scalars: a thread that waits for the device makes some."""
    return sum(array.ndim > 0 for array in jax.live_arrays())


def test_a_read_that_fails(disk: Disk) -> None:
    schedule = pinned_ring(NUM_LAYERS, 4)
    pinned = min(set(range(NUM_LAYERS)) - set(schedule.streamed_layers))
    store = open_store(disk, schedule)
    with Controller(store, schedule, FusedTransfer()) as controller:
        disk.fails_at = pinned
        with pytest.raises(OSError, match="the disk is gone"):
            list(sums(controller))
        disk.fails_at = None
        assert list(sums(controller)) == EXPECTED
    store.close()
    before = num_arrays()
    disk.fails_at = schedule.streamed_layers[-1]
    with pytest.raises(OSError, match="the disk is gone"):
        open_store(disk, schedule)
    assert num_arrays() <= before  # some of before may be gone by now
