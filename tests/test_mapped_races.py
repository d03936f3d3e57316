"""Layers that pass from disk through a few host buffers: never another layer's bytes, whatever is slow or fails."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import TIMEOUT_S, Copy, in_time

from vramjax.errors import CheckpointError, VramjaxError
from vramjax.residency import (
    geometry_of,
    host_memory,
    mapped_buffers,
)
from vramjax.residency.mapped_store import MappedStore


def geometries_of(kinds: Sequence[int]) -> list[Any]:
    widths = [8 * (kind + 1) for kind in kinds]
    return [geometry_of({"w": np.zeros((n, 16), np.int8), "s": np.zeros(n, np.float32)}) for n in widths]


class Device:
    """A device that copies when it likes, in the order of dispatch, and looks at every byte when it does."""

    def __init__(self, delays: Callable[[], float]) -> None:
        self.in_flight: dict[int, int] = {}  # address -> copies from it that have not ended
        self.lock = threading.Lock()
        self.errors: list[str] = []
        self.num_copies = 0
        self._delays = delays
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def copy(self, arrays: Any, layer_idx: int) -> Copy:
        """Dispatches a copy of one array; the result is ready when it has ended."""
        copied, address = Copy(), arrays.unsafe_buffer_pointer()
        with self.lock:
            self.in_flight[address] = self.in_flight.get(address, 0) + 1

        def run() -> None:
            time.sleep(self._delays())
            if not (np.asarray(arrays) == layer_idx).all():
                self.errors.append(f"layer {layer_idx} was overwritten before its copy had ended")
            with self.lock:
                self.in_flight[address] -= 1
            self.num_copies += 1
            copied.end()

        self._queue.put(run)
        return copied

    def wait_for(self, device: object) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        assert done.wait(TIMEOUT_S)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(TIMEOUT_S)

    def _run(self) -> None:
        while (run := self._queue.get()) is not None:
            run()


class Disk:
    """Reads slowly, and fails on demand; notes writing to memory that the device still copies from."""

    def __init__(self, device: Device, delays: Callable[[], float], failing: set[int]) -> None:
        self.device, self.delays, self.failing = device, delays, failing
        self.reads: list[int] = []
        self.announced: list[int] = []
        self._lock = threading.Lock()

    def read_into(self, layer_idx: int, views: dict[str, np.ndarray]) -> None:
        with self.device.lock:
            if any(self.device.in_flight.get(view.ctypes.data) for view in views.values()):
                self.device.errors.append(f"layer {layer_idx} was read into memory that is being copied")
        for view in views.values():
            view[...] = -1
        time.sleep(self.delays())
        with self._lock:
            self.reads.append(layer_idx)
            n = len(self.reads)
        if n in self.failing:
            raise CheckpointError(f"read {n}, of layer {layer_idx}, failed")
        for view in views.values():
            view[...] = layer_idx


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kinds=st.lists(st.integers(0, 1), min_size=1, max_size=6),
    num_buffers=st.integers(2, 5),
    num_threads=st.integers(1, 4),
    order=st.lists(st.integers(0, 5), max_size=40),
    sweeps=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), min_size=1, max_size=4),
    failing=st.sets(st.integers(1, 30), max_size=3),
    slow=st.sampled_from(["disk", "device", "both", "none"]),
    seed=st.integers(0, 1000),
)
def test_never_another_layers_bytes(
    monkeypatch: pytest.MonkeyPatch,
    kinds: list[int],
    num_buffers: int,
    num_threads: int,
    order: list[int],
    sweeps: list[tuple[int, int]],
    failing: set[int],
    slow: str,
    seed: int,
) -> None:
    """Layers, buffers, threads, orders, aborts at any place with uploads half reported, failing and slow reads."""
    rng = random.Random(seed)

    def delays(what: str) -> Callable[[], float]:
        return lambda: rng.choice([0, 0, 0.0005, 0.002]) if slow in (what, "both") else 0

    device = Device(delays("device"))
    disk = Disk(device, delays("disk"), failing)
    for module in (mapped_buffers, host_memory):
        monkeypatch.setattr(module, "wait_for", device.wait_for)
    order = [layer_idx % len(kinds) for layer_idx in order] or [0]
    # A transfer that spreads uploads has so many under way: a kind has a buffer more than it has layers at most.
    most_pending = min(num_buffers, *(kinds.count(kind) + 1 for kind in kinds)) - 1

    def run() -> None:
        store = MappedStore(
            disk.read_into,
            geometries_of(kinds),
            num_buffers=num_buffers,
            num_threads=num_threads,
            will_need=disk.announced.append,
        )
        num_asked = num_failed = 0
        for length, unreported in sweeps:
            store.expect(itertools.cycle(order))
            pending: list[tuple[int, list[Copy]]] = []  # layers whose upload is spread over later steps
            for layer_idx in itertools.islice(itertools.cycle(order), length):
                if len(pending) == most_pending:
                    reported, copies = pending.pop(0)
                    store.uploaded(reported, copies[-1])
                num_asked += 1
                try:
                    arrays = store.layer(layer_idx)
                except CheckpointError:
                    num_failed += 1
                    break
                assert store.geometry(layer_idx) == geometry_of(arrays)
                for array in arrays.values():
                    assert (np.asarray(array) == layer_idx).all(), "another layer's bytes"
                copies = [device.copy(array, layer_idx) for array in arrays.values()]
                # Uploads of one layer are reported in their order, others in any.
                if rng.random() < 0.5 and layer_idx not in dict(pending):
                    store.uploaded(layer_idx, copies[-1])
                else:
                    pending.append((layer_idx, copies))
            for reported, copies in pending[: len(pending) - unreported]:
                store.uploaded(reported, copies[-1])
        store.close()
        device.wait_for(None)
        assert not device.errors, device.errors[0]
        assert num_failed <= len(failing)
        assert len(disk.reads) >= num_asked - num_failed and device.num_copies == 2 * (num_asked - num_failed)
        with pytest.raises(VramjaxError, match="the store of layers is closed"):
            store.layer(0)

    in_time(run)
    device.close()
