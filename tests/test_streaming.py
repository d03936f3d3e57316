"""`vramjax.stream` within a budget of bytes: kept at every moment, with the bits of the resident run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from faults import arrays_besides, arrays_left

import vramjax
from vramjax.errors import BudgetError, ConfigError, VramjaxError
from vramjax.residency import streaming
from vramjax.residency.budget import AUTO_RESERVE_BYTES
from vramjax.residency.host_store import HostStore

WIDTH = 16


def block(layer_idx: int, inner: int) -> dict[str, Any]:
    """A layer of 2 * 16 * inner float32."""
    rng = np.random.default_rng(layer_idx)
    return {
        "up": rng.standard_normal((WIDTH, inner), np.float32),
        "down": [rng.standard_normal((inner, WIDTH), np.float32)],
    }


def step(weights, x, *, scale=0.5):
    return x + scale * jnp.tanh(x @ weights["up"]) @ weights["down"][0]


def run(layers: Any, function: Any, num_sweeps: int = 3) -> list[np.ndarray]:
    """What comes out of each sweep; the next one goes on with it."""
    x, outputs = jnp.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH), []
    for _ in range(num_sweeps):
        for _, weights in layers.sweep():
            x = function(weights, x)
        outputs.append(np.asarray(x))
    return outputs


STACKS = {
    "one kind": [block(i, 32) for i in range(9)],
    "two kinds": [block(i, 32 if i % 3 else 64) for i in range(9)],
    "dense first": [block(i, 96 if i < 2 else 32) for i in range(10)],
    "one odd layer": [block(i, 48 if i == 4 else 32) for i in range(8)],
}


def bytes_of(layer: Any) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(layer))


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.8, 0.99])
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("warm", [False, True])
def test_a_budget_is_kept_and_the_bits_are_those_of_the_resident_run(
    stack: list[Any], share: float, warm: bool
) -> None:
    smallest = sum({bytes_of(layer) for layer in stack})
    budget = int(smallest + share * (sum(map(bytes_of, stack)) - smallest))
    with vramjax.stream(stack) as everything:
        expected = run(everything, jax.jit(step))
        assert everything.schedule.name == "resident"
    for fused in (True, False):
        with vramjax.stream(stack, device_budget=budget, warm_up=warm) as layers:
            outputs = run(layers, layers.jit(step) if fused else jax.jit(step))
            stats = layers.stats
        np.testing.assert_array_equal(outputs, expected)  # bitwise
        assert stats.peak_device_bytes <= budget
        assert stats.last_sweep_bytes_uploaded == layers.schedule.bytes_per_sweep([bytes_of(la) for la in stack]) > 0
        assert stats.pool_misses == sum(layers.schedule.peak_slots([bytes_of(la) for la in stack]).values())


@pytest.mark.parametrize("policy", ["past", "both_sides", "pinned_ring"])
def test_every_policy_keeps_a_budget(policy: Any) -> None:
    stack = STACKS["two kinds"]
    budget = 4 * bytes_of(stack[0])
    with vramjax.stream(stack, device_budget=budget, policy=policy) as layers, vramjax.stream(stack) as everything:
        np.testing.assert_array_equal(run(layers, layers.jit(step)), run(everything, jax.jit(step)))
        assert layers.schedule.name == policy
        assert layers.stats.peak_device_bytes <= budget
        assert layers.stats.last_sweep_bytes_uploaded > 0


def test_budgets_as_people_write_them() -> None:
    stack = [np.full((1024, 256), i, np.float32) for i in range(6)]  # 1 MiB each
    for budget in ("3MiB", "3145728", 3 << 20, "3.2 MB", "3.5MiB"):
        with vramjax.stream(stack, device_budget=budget) as layers:
            assert layers.schedule.keep == 3
    for budget, message in (
        ("3G", "device_budget is '3G'; expected bytes"),
        (0, "device_budget is 0; expected bytes, at least 1"),
        (True, "device_budget is True"),
        ([3], r"device_budget is \[3\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            vramjax.stream(stack, device_budget=budget)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="keep is 2 and device_budget is '3MiB'; expected one of the two"):
        vramjax.stream(stack, keep=2, device_budget="3MiB")


def test_too_small_a_budget_names_the_smallest_that_works() -> None:
    stack = STACKS["two kinds"]
    smallest = bytes_of(stack[0]) + bytes_of(stack[1])
    with pytest.raises(BudgetError, match=r"^device_budget is 5000 bytes; ") as caught:
        vramjax.stream(stack, device_budget=5000)
    assert str(caught.value).endswith(
        f"expected at least {smallest} bytes, room for one layer of each of the 2 kinds: raise it to that"
    )
    with pytest.raises(BudgetError):
        vramjax.stream(stack, device_budget=smallest - 1)
    with vramjax.stream(stack, device_budget=smallest) as layers, vramjax.stream(stack) as everything:
        np.testing.assert_array_equal(run(layers, layers.jit(step)), run(everything, jax.jit(step)))
        assert layers.stats.peak_device_bytes == smallest


def test_sizes_in_errors_are_exact_and_readable() -> None:
    stack = [np.full((1024, 256), i, np.float32) for i in range(3)]
    with pytest.raises(BudgetError) as caught:
        vramjax.stream(stack, device_budget=100)
    assert str(caught.value) == (
        "device_budget is 100 bytes; expected at least 1048576 bytes (1.0 MiB), room for one layer: raise it to that"
    )


def test_auto_is_what_is_free_less_a_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = STACKS["one kind"]
    free_bytes = AUTO_RESERVE_BYTES + 4 * bytes_of(stack[0])
    asked: list[Any] = []
    monkeypatch.setattr(streaming, "free_device_bytes", lambda device: asked.append(device) or free_bytes)
    for layers_as in (list, iter):
        asked.clear()
        with vramjax.stream(layers_as(stack), device_budget="auto") as layers:
            assert layers.schedule.keep == 4
        assert len(asked) == 1  # one answer for all that depends on it
    free_bytes = 100
    with pytest.raises(
        BudgetError,
        match=r"'auto' \(what is free on .*, less 512.0 MiB in .* is 0 bytes; .*at least 4096.*: free some$",
    ):
        vramjax.stream(stack, device_budget="auto")
    monkeypatch.undo()
    with vramjax.stream(stack, device_budget="auto") as layers:  # this machine has room for a few kilobytes
        assert layers.schedule.name == "resident"


@pytest.mark.parametrize("layers_as", [list, iter])
def test_what_fits_is_resident(layers_as: Any) -> None:
    stack = STACKS["two kinds"]
    with vramjax.stream(layers_as(stack), device_budget=sum(map(bytes_of, stack))) as layers:
        run(layers, layers.jit(step))
        assert layers.schedule.name == "resident"
        assert layers.stats.uploads == len(stack)
    with vramjax.stream(layers_as(stack), device_budget=sum(map(bytes_of, stack)) - 1) as layers:
        assert layers.schedule.name == "pinned_ring"


def test_64_bit_arrays_are_counted_as_the_32_bits_that_jax_makes_of_them() -> None:
    stack = [np.arange(256) + 1000 * i for i in range(4)]
    assert stack[0].dtype == np.int64
    with vramjax.stream(stack, device_budget=4 * 1024) as layers:
        assert layers.schedule.name == "resident"
    with vramjax.stream(stack, device_budget=3 * 1024) as layers:
        for _ in range(2):
            assert [int(weights[3]) for _, weights in layers.sweep()] == [3, 1003, 2003, 3003]
        assert (layers.schedule.keep, layers.stats.peak_device_bytes) == (3, 3 * 1024)


def test_what_is_no_array_is_handed_out_as_it_is() -> None:
    key = jax.random.key(7)
    stack = [{"w": np.full(4, i), "act": jnp.tanh, "rate": 0.1, "name": f"layer {i}", "key": key} for i in range(4)]
    with vramjax.stream(stack, keep=2) as layers:
        for _ in range(2):
            for layer_idx, layer in layers.sweep():
                assert layer["act"] is jnp.tanh
                assert layer["key"] is key
                assert (layer["rate"], layer["name"]) == (0.1, f"layer {layer_idx}")
                assert layer["w"].tolist() == [layer_idx] * 4
        assert layers.stats.last_sweep_uploads == 3


def test_layers_that_differ_in_what_is_no_array_share_slots() -> None:
    stack = [{"w": np.full(256, i, np.float32), "name": f"layer {i}"} for i in range(6)]
    with vramjax.stream(stack, device_budget=2048) as layers:
        assert [layer["name"] for _, layer in layers.sweep()] == [f"layer {i}" for i in range(6)]
        assert layers.stats.peak_device_bytes == 2048


def test_an_array_that_stands_twice_in_a_layer_is_streamed_once() -> None:
    tied = [np.full(256, i, np.float32) for i in range(4)]
    with vramjax.stream([{"a": w, "b": [w]} for w in tied], device_budget=2048) as layers:
        for layer_idx, layer in layers.sweep():
            assert layer["a"] is layer["b"][0]
            assert layer["a"].tolist() == [layer_idx] * 256
        assert layers.stats.bytes_uploaded == 5 * 1024  # 4 layers, and the first again for the next sweep


def test_filter_jit_compiles_a_step_once_for_layers_alike() -> None:
    num_traces = 0

    def apply(layer, x, shift, *, twice):
        nonlocal num_traces
        num_traces += 1
        y = layer["act"](x @ layer["w"]) + layer["rate"] + shift
        return y + y if twice else y

    stack = [{"w": block(i, WIDTH)["up"], "act": jnp.tanh, "rate": 0.5} for i in range(6)]
    with vramjax.stream(stack, keep=1) as layers:  # nothing is uploaded ahead, so nothing travels
        filtered = layers.filter_jit(apply)
        assert num_traces == 0
        x = shift = jnp.ones(WIDTH)  # the same array twice
        for _ in range(2):
            for _, layer in layers.sweep():
                x = filtered(layer, x, shift, twice=True)
        assert num_traces == 1
        x = shift
        for layer in stack * 2:
            x = apply(layer, x, shift, twice=True)
    assert x.shape == (WIDTH,)
    with vramjax.stream(stack, keep=3) as layers, vramjax.stream(stack) as everything:
        travelling = layers.filter_jit(lambda layer, x: apply(layer, x, 0.1, twice=False))
        at_rest = everything.filter_jit(lambda layer, x: apply(layer, x, 0.1, twice=False))
        np.testing.assert_array_equal(run(layers, travelling), run(everything, at_rest))
        assert layers.stats.last_sweep_uploads == 4


def test_random_keys_of_a_layer_may_go_through_filter_jit() -> None:
    stack = [{"w": np.full(4, i, np.float32), "key": jax.random.key(i), "act": jnp.tanh} for i in range(4)]
    with vramjax.stream(stack, keep=2) as layers:
        draw = layers.filter_jit(lambda layer: layer["act"](layer["w"]) + jax.random.normal(layer["key"], (4,)))
        for layer_idx, layer in layers.sweep():
            expected = jnp.tanh(jnp.full(4, layer_idx)) + jax.random.normal(jax.random.key(layer_idx), (4,))
            np.testing.assert_allclose(draw(layer), expected, rtol=1e-6)


def test_a_generator_is_asked_for_one_layer_at_a_time() -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Tracked(np.ndarray):
        """An array that can be counted."""

        def __hash__(self):  # pyright: ignore[reportIncompatibleVariableOverride]
            return id(self)

    def made() -> Iterator[Any]:
        nonlocal most
        for i in range(6):
            gc.collect()
            most = max(most, len(alive))
            w = np.full((64, 64), i, np.float32).view(Tracked)
            alive.add(w)
            yield {"w": w}
            del w

    with vramjax.stream(made(), device_budget=3 * 64 * 64 * 4) as layers:
        gc.collect()
        assert most == len(alive) == 0
        assert [int(layer["w"][0, 0]) for _, layer in layers.sweep()] == [*range(6)]


@pytest.mark.parametrize("how", ["break", "error", "close"])
def test_a_sweep_that_is_left_begins_anew(how: str) -> None:
    stack = STACKS["two kinds"]
    with vramjax.stream(stack, keep=4) as layers, vramjax.stream(stack) as everything:
        jitted = layers.jit(step)
        run(layers, jitted, 1)
        sweep = layers.sweep()
        if how == "error":
            with pytest.raises(ZeroDivisionError):
                for layer_idx, _ in layers.sweep():
                    _ = 1 / (5 - layer_idx)
        elif how == "break":
            for layer_idx, _ in layers.sweep():
                if layer_idx == 5:
                    break
        else:
            for _ in range(2):
                next(sweep)
            sweep.close()  # pyright: ignore[reportAttributeAccessIssue]
        assert layers.stats.sweeps_aborted == 1
        np.testing.assert_array_equal(run(layers, jitted), run(everything, jax.jit(step)))
        assert layers.stats.last_sweep_bytes_uploaded > 0
    with pytest.raises(VramjaxError, match="the controller is closed"):
        layers.sweep()


@pytest.mark.parametrize("release", ["pool", "free"])
@pytest.mark.parametrize("policy", ["past", "pinned_ring"])
@pytest.mark.parametrize("keep", [2, 4, None])
def test_closing_takes_the_arrays_of_a_sweep_that_is_not_finished(keep: int | None, policy: Any, release: Any) -> None:
    """Also while somebody still has its iterator, and the layer that came from it last."""
    before = jax.live_arrays()
    layers = vramjax.stream(STACKS["two kinds"], keep=keep, policy=policy, release=release)
    jitted = layers.jit(step)
    run(layers, jitted, 1)
    sweep, layer = layers.sweep(), None
    for _ in range(5):
        _, layer = next(sweep)
        jitted(layer, jnp.ones((3, WIDTH)))
    assert len(arrays_besides(before)) >= 2
    layers.close()
    assert arrays_left(before) == []
    assert all(array.is_deleted() for array in jax.tree.leaves(layer))
    with pytest.raises(VramjaxError, match="closed in the middle of a sweep"):
        next(sweep)


def test_host_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the stream is closed, and when there never is one."""
    closed = []
    close = HostStore.close
    monkeypatch.setattr(HostStore, "close", lambda store: (closed.append(store.num_layers), close(store)))
    with vramjax.stream(STACKS["one kind"], keep=3) as layers:
        run(layers, layers.jit(step), 1)
        assert closed == []
    assert closed == [9]
    with pytest.raises(BudgetError):
        vramjax.stream(STACKS["one kind"], device_budget=1000)
    assert closed == [9, 9]
    with pytest.raises(ConfigError, match="release is 'drop'"):
        vramjax.stream(STACKS["one kind"], keep=3, release="drop")  # pyright: ignore[reportArgumentType]
    assert closed == [9, 9, 9]


def test_a_device_that_is_none() -> None:
    for device in ("cpu", [jax.devices()[0]]):
        with pytest.raises(ConfigError, match=r"device is .*; expected one of jax\.devices\(\), or None for the first"):
            vramjax.stream([np.ones(2, np.float32)], device=device)  # pyright: ignore[reportArgumentType]
