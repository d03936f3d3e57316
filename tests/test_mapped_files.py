"""Layers on disk, streamed: host memory that is bounded, and files that change under a running sweep."""

from __future__ import annotations

import functools
import gc
import json
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_process import assert_ok_on_two_devices, run_python
from test_weight_file import CHANGES, pages_in_cache

from vramjax.checkpoint.safetensors_io import write_safetensors
from vramjax.checkpoint.weight_file import WeightFile
from vramjax.errors import CheckpointError
from vramjax.residency import Controller, DeviceTransfer, HostStore, geometry_of, past_window, pinned_ring
from vramjax.residency.fused_transfer import FusedTransfer
from vramjax.residency.mapped_store import MappedStore

NUM_LAYERS = 8


class Model:
    """Files of layers, and a computation through them."""

    def __init__(self, path: Path, num_rows: int = 300) -> None:
        rng = np.random.default_rng(0)
        self.layers = [
            {"w": rng.integers(-127, 128, (num_rows, 512), np.int8), "s": rng.random((num_rows, 1), np.float32)}
            for _ in range(NUM_LAYERS)
        ]
        self.geometry = geometry_of(self.layers[0])
        self.files = []
        for i, layer in enumerate(self.layers):
            shapes = {name: (array.shape, array.dtype) for name, array in layer.items()}
            file = path / f"layer-{i}.safetensors"
            self.files.append(WeightFile(file, write_safetensors(file, shapes, layer.items()).sha256, shapes))

    def mapped(self, num_buffers: int = 3) -> MappedStore:
        return MappedStore(
            lambda layer_idx, views: self.files[layer_idx].read_into(views, drop_pages=True),
            [self.geometry] * NUM_LAYERS,
            num_buffers=num_buffers,
            will_need=lambda layer_idx: self.files[layer_idx].will_need(),
        )


@functools.partial(jax.jit, inline=True)
def layer_step(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh((weights["w"].astype(jnp.float32) * weights["s"] / 200).T @ (weights["w"] @ x / 9000))


def run(controller: Controller, num_sweeps: int) -> list[np.ndarray]:
    step, results = controller.jit(layer_step), []
    for _ in range(num_sweeps):
        x = jnp.ones(512)
        for _, weights in controller.sweep():
            x = step(weights, x)
        results.append(np.array(x))  # a view would keep the device array
    return results


def sweep_and_change(controller: Controller, change: Callable[[], None]) -> None:
    """One sweep, in the middle of which something changes."""
    for layer_idx, _ in controller.sweep():
        if layer_idx == 2:
            change()


def on_device() -> list[tuple[int, ...]]:
    """The shapes of all that is in device memory."""
    gc.collect()
    return [array.shape for array in jax.live_arrays() if array.sharding.memory_kind == "device"]


def test_files_stream_bit_for_bit_and_leave_no_pages(tmp_path: Path) -> None:
    model = Model(tmp_path)
    schedule = pinned_ring(NUM_LAYERS, 4)
    with Controller(HostStore(model.layers), schedule, DeviceTransfer()) as controller:
        expected = run(controller, 1)[0]
    store = model.mapped()
    with Controller(store, schedule, FusedTransfer()) as controller:
        for result in run(controller, 5):
            np.testing.assert_array_equal(result, expected)
        assert controller.stats.last_sweep_uploads == schedule.uploads_per_sweep >= NUM_LAYERS - 4
    store.close()
    assert np.abs(expected).max() > 0.01
    num_pages = [pages_in_cache(file.path) for file in model.files]
    if num_pages[0] > 1:  # layer 0 is pinned: it was read once, and dropped
        pytest.skip("this file system lives in memory")
    # The layer that comes next may have been read ahead.
    assert sum(num > 1 for num in num_pages) <= 1


@pytest.mark.parametrize(("change", "message"), CHANGES.items(), ids=lambda case: getattr(case, "__name__", ""))
@pytest.mark.parametrize("transfer", [DeviceTransfer, FusedTransfer])
def test_a_file_that_changes_under_a_running_sweep(
    tmp_path: Path, transfer: type[DeviceTransfer], change: Callable[[Path], None], message: str
) -> None:
    """One clear error; device memory is given back; the process can load again."""
    model, before = Model(tmp_path), on_device()
    content = model.files[5].path.read_bytes()
    store = model.mapped()
    with Controller(store, past_window(NUM_LAYERS, 2), transfer()) as controller:
        expected = run(controller, 2)[0]
        with pytest.raises(CheckpointError, match=message) as caught:
            sweep_and_change(controller, lambda: change(model.files[5].path))
            run(controller, 2)  # what was read ahead is still right
        assert str(model.files[5].path) in str(caught.value) and "\n" not in str(caught.value)
        with pytest.raises(CheckpointError, match=message):
            run(controller, 1)
    store.close()
    del controller, store, caught
    assert on_device() == before

    model.files[5].path.write_bytes(content)
    again = Model.__new__(Model)
    again.geometry = model.geometry
    again.files = [WeightFile(file.path, file._sha256, file.shapes) for file in model.files]
    store = again.mapped()
    with Controller(store, past_window(NUM_LAYERS, 2), transfer()) as controller:
        np.testing.assert_array_equal(run(controller, 2)[1], expected)
    store.close()


MEMORY = """
import json, os, sys
from pathlib import Path
import jax, jax.numpy as jnp
from own_process import peak_bytes, resident_bytes
from vramjax.checkpoint.weight_file import WeightFile
from vramjax.residency import Controller, geometry_of, pinned_ring
from vramjax.residency.geometry import Geometry
from vramjax.residency.mapped_buffers import host_buffers
from vramjax.residency.mapped_store import MappedStore
from vramjax.residency.host_memory import host_bytes
from vramjax.residency.fused_transfer import FusedTransfer

paths, sha256, num_layers, host_budget, size = json.loads(sys.argv[1])
import numpy as np
shapes = {"w": (tuple(size), np.dtype(np.int8))}
files = [WeightFile(Path(path), sha256, shapes) for path in paths]
geometry = geometry_of({"w": np.empty(size, np.int8)})

def step(weights, x):
    return x + weights["w"][0, 0] + weights["w"][-1, -1]

def run(num_sweeps, controller):
    step_jit = controller.jit(step)
    for _ in range(num_sweeps):
        x = jnp.zeros((), jnp.int32)
        for layer_idx, weights in controller.sweep():
            x = step_jit(weights, x)
    return int(x)

jax.block_until_ready(jax.jit(step)({"w": jnp.zeros((2, 2), jnp.int8)}, jnp.zeros((), jnp.int32)))
before = resident_bytes()
num_buffers = host_buffers(host_budget, host_bytes(geometry))
store = MappedStore(
    lambda i, views: files[i % len(files)].read_into(views, drop_pages=True),
    [geometry] * num_layers,
    num_buffers=num_buffers,
    will_need=lambda i: files[i % len(files)].will_need(),
)
with Controller(store, pinned_ring(num_layers, 2), FusedTransfer()) as controller:
    result = run(3, controller)
    stats = controller.stats
on_device = stats.peak_device_bytes if jax.default_backend() == "cpu" else 0
print(json.dumps([peak_bytes() - before, store.num_host_bytes, on_device, stats.bytes_uploaded, result]))
"""


def test_host_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """A model of twelve times the budget, in a process of its own; device memory of a CPU is host memory too."""
    size, num_layers, host_budget = (4 << 10, 4 << 10), 48, 64 << 20
    array = np.ones(size, np.int8)
    shapes = {"w": (array.shape, array.dtype)}
    paths = [tmp_path / f"{i}.safetensors" for i in range(6)]  # each is several layers: the disk has better to do
    sha256, *_ = [write_safetensors(path, shapes, [("w", array)]).sha256 for path in paths]
    argument = json.dumps([[str(path) for path in paths], sha256, num_layers, host_budget, size])
    taken, host_bytes, on_device, bytes_uploaded, result = json.loads(run_python(MEMORY, argument))
    assert host_bytes <= host_budget and result == 2 * num_layers
    assert bytes_uploaded >= 3 * num_layers * array.nbytes
    assert taken <= host_bytes + on_device + (32 << 20), (taken, host_bytes, on_device)
    assert taken < num_layers * array.nbytes // 4


def test_each_device_gets_its_own() -> None:
    code = """
import itertools, jax, numpy as np
from vramjax.residency import Controller, geometry_of, pinned_ring
from vramjax.residency.mapped_store import MappedStore
from vramjax.residency.fused_transfer import FusedTransfer

def read_into(layer_idx, views):
    views["w"][...] = layer_idx

geometry = geometry_of({"w": np.zeros((64, 64), np.float32)})
stores = [MappedStore(read_into, [geometry] * 6, device, num_buffers=2) for device in jax.devices()]
controllers = [
    Controller(store, pinned_ring(6, 3), FusedTransfer(device))
    for store, device in zip(stores, jax.devices(), strict=True)
]
assert len(controllers) == 2
for _ in range(4):
    for sweeps in zip(*(controller.sweep() for controller in controllers), strict=True):
        for (layer_idx, weights), device in zip(sweeps, jax.devices(), strict=True):
            assert weights["w"].devices() == {device}
            assert (np.asarray(weights["w"]) == layer_idx).all()
for controller, store in zip(controllers, stores, strict=True):
    assert controller.stats.last_sweep_uploads == pinned_ring(6, 3).uploads_per_sweep >= 3
    controller.close()
    store.close()
print("ok")
"""
    assert_ok_on_two_devices(code)
