"""Layers read straight into host memory, by several threads."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from own_process import run_python

from vramjax.errors import BudgetError, ConfigError
from vramjax.residency import Controller, DeviceTransfer, Geometry, HostStore, geometry_of, host_store, past_window
from vramjax.residency.host_memory import HostArrays, PinningError


def make_layer(layer_idx: int) -> dict[str, np.ndarray]:
    width = 48 if layer_idx % 3 else 16  # two geometries
    rng = np.random.default_rng(layer_idx)
    return {"w": rng.integers(-127, 128, (width, 64), np.int8), "s": rng.standard_normal((2, width), np.float32)}


def read_into(layer_idx: int, views: dict[str, np.ndarray]) -> None:
    for name, array in make_layer(layer_idx).items():
        views[name][...] = array


GEOMETRIES = [geometry_of(make_layer(i)) for i in range(10)]


def assert_right(store: HostStore) -> None:
    assert store.num_layers == 10
    for layer_idx in range(10):
        assert store.geometry(layer_idx) == GEOMETRIES[layer_idx]
        for name, array in make_layer(layer_idx).items():
            np.testing.assert_array_equal(np.asarray(store.layer(layer_idx)[name]), array)


def test_layers_are_read_into_pinned_memory() -> None:
    progress: list[int] = []
    store = HostStore.read(read_into, GEOMETRIES, num_threads=4, progress=progress.append)
    assert_right(store)
    assert store.is_pinned and store.num_pinned_layers == 10
    assert {a.sharding.memory_kind for i in range(10) for a in store.layer(i).values()} == {"pinned_host"}
    assert sorted(progress) == sorted(geometry.num_bytes for geometry in GEOMETRIES)
    arrays = store.layer(3)
    store.close()
    store.close()
    assert store.num_layers == 0 and all(array.is_deleted() for array in arrays.values())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_read_at_the_same_time(num_threads: int) -> None:
    together = threading.Barrier(num_threads)

    def read(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        if layer_idx < 9:  # a multiple of the threads
            together.wait(timeout=10)
        read_into(layer_idx, views)

    assert_right(HostStore.read(read, GEOMETRIES, num_threads=num_threads))


@pytest.mark.parametrize("error", [OSError("disk gone"), KeyboardInterrupt()])
def test_the_first_error_ends_it(error: BaseException) -> None:
    begun: list[int] = []

    def read(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        begun.append(layer_idx)
        if layer_idx == 2:
            raise error
        read_into(layer_idx, views)

    with pytest.raises(type(error)) as caught:
        HostStore.read(read, GEOMETRIES, num_threads=1)
    assert caught.value is error
    assert 2 in begun and not any(thread.name.startswith("vramjax-read") for thread in threading.enumerate())


class Made:
    """Every `HostArrays` of a store, and the memory under each: whether it is still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int = sys.maxsize) -> None:
        self.arrays: list[jax.Array] = []
        self.memories: list[weakref.ref[np.ndarray]] = []
        host_arrays = host_store.HostArrays

        def make(geometry: Geometry, device: jax.Device) -> HostArrays:
            if len(self.memories) >= fails_at:  # two threads may come at once
                raise BudgetError("there is no host memory for a layer")
            host = host_arrays(geometry, device)
            self.arrays.extend(host.arrays.values())
            self.memories.append(weakref.ref(host.views["w"].base))
            return host

        monkeypatch.setattr(host_store, "HostArrays", make)

    @property
    def num_held(self) -> int:
        gc.collect()
        return sum(memory() is not None for memory in self.memories)


def stop() -> Iterator[dict[str, np.ndarray]]:
    yield from map(make_layer, range(8))
    raise OSError("gone")


@pytest.mark.parametrize("fails", ["read", "memory", "progress", "layers"])
def test_who_keeps_an_error_does_not_keep_the_memory(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """As a notebook does. Its frames may have a hold of the layer that it came from, but of no other."""
    made = Made(monkeypatch, fails_at=8 if fails == "memory" else sys.maxsize)

    def read(layer_idx: int, views: dict[str, np.ndarray]) -> None:
        read_into(layer_idx, views)
        if fails == "read" and layer_idx == 8:
            raise OSError("gone")

    def progress(num_bytes: int) -> None:
        if fails == "progress" and len(made.memories) >= 8:
            raise KeyboardInterrupt

    with pytest.raises((OSError, BudgetError, KeyboardInterrupt)) as kept:
        if fails == "layers":
            HostStore(stop())
        else:
            HostStore.read(read, GEOMETRIES, num_threads=2, progress=progress)
    assert len(made.memories) >= 8
    assert all(array.is_deleted() for array in made.arrays)
    assert made.num_held <= 1
    assert kept.value.__traceback__ is not None


def test_no_layers() -> None:
    with pytest.raises(ConfigError, match="there are no layers"):
        HostStore.read(read_into, [])


@pytest.mark.parametrize("num_accepted", [0, 4])
def test_what_cannot_be_pinned_is_pageable(monkeypatch: pytest.MonkeyPatch, num_accepted: int) -> None:
    host_arrays, calls = host_store.HostArrays, []

    def limited(geometry, device):
        calls.append(1)
        if len(calls) > num_accepted:
            raise PinningError("RESOURCE_EXHAUSTED: enough")
        return host_arrays(geometry, device)

    monkeypatch.setattr(host_store, "HostArrays", limited)
    message = (
        rf"^{10 - num_accepted} of 10 layers could not be put in pinned host memory \(RESOURCE_EXHAUSTED: enough\)"
    )
    with pytest.warns(UserWarning, match=message) as caught:
        store = HostStore.read(read_into, GEOMETRIES, num_threads=1)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert len(calls) == num_accepted + 1
    assert not store.is_pinned and store.num_pinned_layers == num_accepted
    assert_right(store)
    with Controller(store, past_window(10, 2), DeviceTransfer()) as controller:
        for _ in range(3):
            for layer_idx, weights in controller.sweep():
                np.testing.assert_array_equal(np.asarray(weights["w"]), make_layer(layer_idx)["w"])
        assert controller.stats.last_sweep_uploads == 8
    store.close()


MEMORY = """
import json, sys
from pathlib import Path
import jax, numpy as np
from own_process import peak_bytes
from vramjax.checkpoint.safetensors_io import write_safetensors
from vramjax.checkpoint.weight_file import WeightFile
from vramjax.residency import HostStore, geometry_of

array, files = np.ones((1 << 12, 1 << 12), np.int8), []
shapes = {"w": (array.shape, array.dtype)}
for i in range(24):
    path = Path(sys.argv[1]) / str(i)
    files.append(WeightFile(path, write_safetensors(path, shapes, [("w", array)]).sha256, shapes))
jax.block_until_ready(jax.numpy.ones(8) + 1)
before = peak_bytes()
store = HostStore.read(lambda i, views: files[i].read_into(views), 24 * [geometry_of({"w": array})], num_threads=8)
print(json.dumps([peak_bytes() - before, 24 * array.nbytes]))
"""


def test_loading_takes_the_bytes_of_the_layers(tmp_path: Path) -> None:
    """The peak of a process of its own; 1.05 times the bytes and a constant are allowed, it is less."""
    taken, layer_bytes = json.loads(run_python(MEMORY, tmp_path))
    assert 0.9 * layer_bytes <= taken <= 1.05 * layer_bytes + (16 << 20)


def test_layers_of_a_given_device() -> None:
    device = jax.devices()[-1]
    store = HostStore.read(read_into, GEOMETRIES, device)
    assert all(array.devices() == {device} for i in range(10) for array in store.layer(i).values())
