"""Real copies with JAX, on whatever device is first: the right bytes, in memory that is reused and never shared."""

from __future__ import annotations

import gc
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vramjax.errors import BudgetError, ConfigError
from vramjax.residency import (
    Controller,
    DeviceTransfer,
    HostStore,
    LazyStore,
    Pool,
    both_sides_window,
    geometry_of,
    host_store,
    past_window,
    programs,
    resident,
)
from vramjax.residency.controller import ReleaseMode
from vramjax.residency.host_memory import PinningError


def aligned(array: np.ndarray) -> np.ndarray:
    """The same numbers at a 64-byte boundary, where a CPU device would adopt the memory rather than copy it."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def make_layer(layer_idx: int, width: int = 48) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([layer_idx, width])
    return {
        "w": aligned(rng.integers(-127, 128, (width, 64), np.int8)),  # [N, K]
        "s": aligned(rng.standard_normal((2, width)).astype(np.float32)),  # [G, N]
        "t": aligned(rng.standard_normal((2, width)).astype(np.float32)),  # the shape of s: they must not swap
        "h": rng.standard_normal(width).astype(jnp.bfloat16),  # [N]
    }


def addresses(slot) -> list[int]:
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(slot)]


def on_device() -> dict[int, jax.Array]:
    """Everything alive in device memory, by address; the arrays too, as an address of a dead one can come again."""
    gc.collect()
    return {a.unsafe_buffer_pointer(): a for a in jax.live_arrays() if a.sharding.memory_kind == "device"}


def assert_equal(slot, layer) -> None:
    assert jax.tree.structure(slot) == jax.tree.structure(layer)
    for got, expected in zip(jax.tree.leaves(slot), jax.tree.leaves(layer), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))


@pytest.fixture
def no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(geometry, device):
        raise PinningError("RESOURCE_EXHAUSTED: no pinned memory today")

    monkeypatch.setattr(host_store, "HostArrays", refuse)


# Store


def test_the_store_pins_private_copies() -> None:
    layers = [make_layer(i) for i in range(3)]
    store = HostStore(layers)
    expected = [make_layer(i) for i in range(3)]
    for layer in layers:
        for array in layer.values():
            array[...] = 0
    assert store.num_layers == store.num_pinned_layers == 3
    for i in range(3):
        assert_equal(store.layer(i), expected[i])
        assert store.geometry(i) == geometry_of(expected[i])
        assert store.geometry(i).num_bytes == 48 * 64 + 2 * (2 * 48 * 4) + 48 * 2
        assert {array.sharding.memory_kind for array in jax.tree.leaves(store.layer(i))} == {"pinned_host"}
    assert store.is_pinned


def test_the_store_takes_one_layer_at_a_time() -> None:
    alive: set[int] = set()

    class Tracked(np.ndarray):
        layer_idx: int

        def __del__(self) -> None:
            alive.discard(getattr(self, "layer_idx", -1))

    def layers():
        for layer_idx in range(4):
            array = np.full((8, 8), layer_idx, np.float32).view(Tracked)
            array.layer_idx = layer_idx
            alive.add(layer_idx)
            yield {"w": array}
            del array
            assert not alive, "the store still refers to a layer while the next one is being made"

    assert HostStore(layers()).num_layers == 4


def test_jax_arrays_64_bit_arrays_and_scalars_are_taken() -> None:
    layer = {
        "a": jnp.arange(4.0),
        "b": np.arange(4.0),
        "c": np.float32(3),
        "d": np.ones((2, 3)).T,
        "e": np.zeros((0, 3)),
    }
    for store in (HostStore([layer]), LazyStore([layer].__getitem__, 1)):
        slot = DeviceTransfer().upload(store.layer(0), None)
        assert {name: (array.shape, array.dtype.name) for name, array in slot.items()} == {
            "a": ((4,), "float32"),
            "b": ((4,), "float32"),
            "c": ((), "float32"),
            "d": ((3, 2), "float32"),
            "e": ((0, 3), "float32"),
        }
        assert store.geometry(0) == geometry_of(slot)
        DeviceTransfer().free(slot)
        assert float(layer["a"].sum()) == 6  # the caller's array is not the one that was deleted


def test_pinning_refused_costs_one_warning(no_pinned_memory: None) -> None:
    expected = [make_layer(i) for i in range(4)]
    layers = [make_layer(i) for i in range(4)]
    with pytest.warns(UserWarning, match="4 of 4 layers could not be put in pinned") as caught:
        store = HostStore(layers)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "(RESOURCE_EXHAUSTED: no pinned memory today)" in message
    assert "2 to 10 times slower" in message
    for layer in layers:
        layer["w"][...] = 0
    assert store.num_pinned_layers == 0
    assert not store.is_pinned
    controller = Controller(store, past_window(4, 1), DeviceTransfer(), release="free")
    for _ in range(3):
        for layer_idx, weights in controller.sweep():
            assert isinstance(store.layer(layer_idx)["w"], np.ndarray)
            assert_equal(weights, expected[layer_idx])
    assert controller.stats.last_sweep_uploads == 3


def test_pinning_refused_halfway_keeps_what_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    host_arrays, calls = host_store.HostArrays, []

    def limited(geometry, device):
        calls.append(1)
        if len(calls) > 2:
            raise PinningError("not today")
        return host_arrays(geometry, device)

    monkeypatch.setattr(host_store, "HostArrays", limited)
    expected = [make_layer(i) for i in range(5)]
    with pytest.warns(UserWarning, match=r"3 of 5 layers could not be put in pinned host memory \(not today\)"):
        store = HostStore(expected)
    assert store.num_pinned_layers == 2
    assert len(calls) == 3, "after a refusal nothing more is tried"
    controller = Controller(store, both_sides_window(5, 2), DeviceTransfer(), release="free")
    for _ in range(4):
        for layer_idx, weights in controller.sweep():
            assert_equal(weights, expected[layer_idx])
    controller.close()
    for layer_idx in range(5):
        assert_equal(store.layer(layer_idx), expected[layer_idx])


def test_a_lazy_store_loads_when_asked_and_keeps_nothing() -> None:
    loaded: list[int] = []

    def load(layer_idx: int) -> dict[str, np.ndarray]:
        loaded.append(layer_idx)
        return make_layer(layer_idx, 16 * (layer_idx + 1))

    store = LazyStore(load, 3)
    assert loaded == []
    assert_equal(store.layer(1), make_layer(1, 32))
    assert store.geometry(1).num_bytes == geometry_of(make_layer(1, 32)).num_bytes
    assert loaded == [1]
    assert store.geometry(2) == geometry_of(make_layer(2, 48))
    assert loaded == [1, 2]
    with Controller(store, resident(3), DeviceTransfer()) as controller:
        for _ in range(2):
            for layer_idx, weights in controller.sweep():
                assert_equal(weights, make_layer(layer_idx, 16 * (layer_idx + 1)))
    assert loaded == [1, 2, 0, 1, 2]


def test_no_layers() -> None:
    for make in (lambda: HostStore([]), lambda: LazyStore(lambda i: None, 0)):
        with pytest.raises(ConfigError, match="there are no layers; expected at least one pytree of arrays"):
            make()


# Transfer


@pytest.mark.parametrize("make_store", [HostStore, lambda layers: LazyStore(layers.__getitem__, len(layers))])
def test_upload_copies_the_bytes(make_store) -> None:
    layers = [make_layer(0), make_layer(1)]
    store, device = make_store(layers), DeviceTransfer()
    first = device.upload(store.layer(0), None)
    device.wait(first)
    assert_equal(first, make_layer(0))
    assert {array.sharding.memory_kind for array in first.values()} == {"device"}
    layers[0]["w"][...] = 0
    layers[0]["s"][...] = 0
    assert_equal(first, make_layer(0))

    second = device.upload(store.layer(1), first)
    assert not device.is_alive(first)
    assert device.is_alive(second)
    assert_equal(second, make_layer(1))
    device.free(second)
    device.free(second)
    assert not device.is_alive(second)


def test_a_slot_keeps_its_addresses_and_shares_none_with_the_host() -> None:
    store, device = HostStore(make_layer(i) for i in range(3)), DeviceTransfer()
    slot = device.upload(store.layer(0), None)
    home = addresses(slot)
    assert len(set(home)) == 4
    for layer_idx in (1, 2, 0, 1):
        old = slot
        slot = device.upload(store.layer(layer_idx), old)
        assert addresses(slot) == home
        assert all(array.is_deleted() for array in old.values())
        assert_equal(slot, make_layer(layer_idx))
    assert not set(home) & {address for i in range(3) for address in addresses(store.layer(i))}


def num_compiled_copies() -> int:
    return programs.copy_into._cache_size()  # type: ignore


def test_one_compiled_copy_per_geometry() -> None:
    widths = [24, 40, 24, 40, 24]  # two geometries that no other test has
    store = HostStore(make_layer(i, width) for i, width in enumerate(widths))
    controller = Controller(store, past_window(5, 1), DeviceTransfer())
    before = num_compiled_copies()
    counts = []
    for _ in range(6):
        for _ in controller.sweep():
            pass
        counts.append(num_compiled_copies() - before)
    assert counts[1:] == [2] * 5


def test_memory_is_not_overwritten_before_queued_work_has_read_it() -> None:
    """The host dispatches several sweeps without waiting; each result is that of the weights it was given."""
    num_layers, n = 4, 256
    store = HostStore({"w": np.full((n, n), i + 1, np.float32)} for i in range(num_layers))
    slow_sum = jax.jit(lambda w, x: jnp.sum(w @ (w @ x)) / float(n) ** 4)
    x = jnp.ones((n, n), jnp.float32)
    controller = Controller(store, past_window(num_layers, 1), DeviceTransfer())
    results = [(i, slow_sum(weights["w"], x)) for _ in range(8) for i, weights in controller.sweep()]
    assert controller.stats.pool_misses == 2
    for layer_idx, result in results:
        assert float(result) == (layer_idx + 1) ** 2


@pytest.mark.parametrize("policy", [past_window, both_sides_window])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("widths", [[48] * 6, [48, 16, 48, 16, 16, 48]], ids=["uniform", "mixed"])
def test_device_addresses_form_a_closed_set(policy, warm: bool, widths: list[int]) -> None:
    expected = [make_layer(i, width) for i, width in enumerate(widths)]
    store = HostStore(expected)
    for keep in (1, 2, 4, 5):
        schedule = policy(6, keep, warm=warm)
        with Controller(store, schedule, DeviceTransfer()) as controller:
            seen: set[int] = set()
            for _ in range(8):
                for layer_idx, weights in controller.sweep():
                    assert_equal(weights, expected[layer_idx])
                    seen |= set(addresses(weights))
            kinds = [geometry_of(layer) for layer in expected]
            peak_slots = schedule.peak_slots(kinds)
            assert len(seen) == 4 * sum(peak_slots.values()), "a new device buffer"
            stats = controller.stats
            assert stats.pool_misses == sum(peak_slots.values())
            assert stats.last_sweep_uploads == schedule.uploads_per_sweep
            assert stats.last_sweep_bytes_uploaded == sum(
                store.geometry(i).num_bytes for i in range(6) if policy is both_sides_window or i < 6 - keep
            )
            num_bytes = {kind: geometry_of(layer).num_bytes for kind, layer in zip(kinds, expected, strict=True)}
            assert stats.peak_device_bytes == sum(num * num_bytes[kind] for kind, num in peak_slots.items())  # type: ignore


def test_release_free_and_a_full_pool_really_delete() -> None:
    store = HostStore(make_layer(i) for i in range(4))
    arms: list[tuple[ReleaseMode, int]] = [("free", 128), ("pool", 0)]
    for release, cap in arms:
        controller = Controller(store, past_window(4, 1), DeviceTransfer(), Pool(cap), release=release)
        held = []
        for _ in range(2):
            for layer_idx, weights in controller.sweep():
                assert_equal(weights, make_layer(layer_idx))
                held.append(weights)
        assert sum(not weights["w"].is_deleted() for weights in held) == 2  # layer 3, which was used twice
        stats = controller.stats
        assert (stats.pool_hits, stats.pool_misses, stats.slots_freed) == (0, 7, 6)
        assert stats.pool_fallback_frees == (0 if release == "free" else 6)


def test_closing_deletes_every_device_array_and_no_host_array() -> None:
    store = HostStore(make_layer(i) for i in range(5))
    controller = Controller(store, past_window(5, 2), DeviceTransfer())
    before = on_device()
    for _ in range(2):
        for _ in controller.sweep():
            pass
    assert len(on_device().keys() - before) == 4 * 4  # four arrays in each of the four slots of the peak
    controller.close()
    assert not on_device().keys() - before
    for layer_idx in range(5):
        assert_equal(store.layer(layer_idx), make_layer(layer_idx))


@pytest.mark.parametrize("consumed", [False, True])
@pytest.mark.parametrize("upload", range(9))
def test_a_failed_copy_leaves_nothing_half_done(monkeypatch: pytest.MonkeyPatch, upload: int, consumed: bool) -> None:
    """Whether or not the slot was already donated when the copy failed."""
    copy_into, calls = programs.copy_into, []

    def failing(slot, host):
        calls.append(1)
        if len(calls) == upload + 1:
            if consumed:
                copy_into(slot, host)
            raise jax.errors.JaxRuntimeError("INTERNAL: cable pulled")
        return copy_into(slot, host)

    monkeypatch.setattr(programs, "copy_into", failing)
    store = HostStore(make_layer(i) for i in range(5))
    before = on_device()
    pool = Pool()
    controller = Controller(store, past_window(5, 2), DeviceTransfer(), pool)
    failures = 0
    for _ in range(6):
        try:
            for layer_idx, weights in controller.sweep():
                assert_equal(weights, make_layer(layer_idx))
        except jax.errors.JaxRuntimeError:
            failures += 1
            assert len(on_device().keys() - before) == 4 * pool.num_slots
    assert failures == 1
    assert controller.stats.slots_lost == consumed
    assert controller.stats.pool_misses == 4 + consumed
    controller.close()
    assert not on_device().keys() - before


def test_a_full_device_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self, host):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5000 bytes")

    monkeypatch.setattr(DeviceTransfer, "_put", full)
    store = HostStore([{"w": np.zeros((1000, 2500), np.int8)}])
    with pytest.raises(BudgetError, match=r"has no memory left for a layer of 2\.5 MB; keep fewer layers"):
        list(Controller(store, resident(1), DeviceTransfer()).sweep())


def test_nothing_warns() -> None:
    """Donation that finds no partner, for one, would be a warning and a second buffer."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = HostStore(make_layer(i, 80) for i in range(3))
        with Controller(store, past_window(3, 1), DeviceTransfer()) as controller:
            for _ in range(3):
                list(controller.sweep())


def test_what_a_consumer_does_to_a_layers_containers_stays_with_it() -> None:
    expected = [make_layer(i) for i in range(3)]
    with Controller(HostStore(expected), past_window(3, 1), DeviceTransfer()) as controller:
        for _ in range(3):
            for layer_idx, weights in controller.sweep():
                assert_equal(weights, expected[layer_idx])
                weights.clear()
