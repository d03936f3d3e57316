"""`residency.stream` as a stranger would use it, on stacks of layers of their own."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_process import run_python

import vramjax.residency
from vramjax import residency
from vramjax.errors import ConfigError
from vramjax.residency import host_store
from vramjax.residency.controller import ReleaseMode
from vramjax.residency.host_memory import PinningError


def test_an_example() -> None:
    rng = np.random.default_rng(0)
    layers = [{"w": rng.standard_normal((64, 64), np.float32), "b": np.ones(64, np.float32)} for _ in range(8)]

    @jax.jit
    def layer_step(weights, x):
        return jnp.tanh(weights["w"] @ x + weights["b"])

    def run(controller, x):
        for _, weights in controller.sweep():
            x = layer_step(weights, x)
        return x

    x = jnp.arange(64.0)
    with residency.stream(layers) as everything, residency.stream(layers, keep=3) as window:
        for _ in range(3):
            assert jnp.array_equal(run(window, x), run(everything, x))  # bitwise
        assert everything.stats.last_sweep_uploads == 0
        assert window.stats.last_sweep_uploads == 6  # 8 layers, 2 pinned
        assert window.stats.peak_resident_layers == 3


@jax.tree_util.register_dataclass
@dataclass
class Block:
    w: np.ndarray
    scales: list[np.ndarray]


class Opaque:
    """Not registered as a pytree: JAX does not see what is in it."""

    def __init__(self, weights: np.ndarray) -> None:
        self.inner = {"w": weights}

    def __call__(self, x):
        return self.inner["w"] @ x


class Pair(NamedTuple):
    up: np.ndarray
    down: np.ndarray


def w(layer_idx: int, n: int = 8) -> np.ndarray:
    return np.random.default_rng(layer_idx).standard_normal((n, n)).astype(np.float32)


STACKS = {
    "arrays": [w(i) for i in range(6)],
    "one stacked array": np.stack([w(i) for i in range(6)]),
    "dicts": [{"w": w(i), "deep": {"er": [w(i + 10)]}} for i in range(6)],
    "tuples": [(w(i), (w(i + 10),)) for i in range(6)],
    "named tuples": [Pair(w(i), w(i + 10)) for i in range(6)],
    "dataclasses": [Block(w(i), [w(i + 10), w(i + 20)]) for i in range(6)],
    "jax arrays": [{"w": jnp.asarray(w(i))} for i in range(6)],
    "several geometries": [w(i, 8 if i % 3 else 16) for i in range(6)],
    "several structures": [{"w": w(i)} if i % 2 else (w(i), None) for i in range(6)],
    "one array twice": [{"w": (a := w(i)), "tied": a} for i in range(6)],
}


@pytest.mark.parametrize("keep", [1, 2, 5, 6, None])
@pytest.mark.parametrize("policy", ["past", "both_sides", "pinned_ring"])
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS)
def test_any_pytree_streams(stack, policy, keep: int | None) -> None:
    arms: list[tuple[bool, ReleaseMode]] = [(False, "pool"), (True, "free")]
    for warm, release in arms:
        with residency.stream(stack, keep=keep, policy=policy, warm_up=warm, release=release) as controller:
            for _ in range(3):
                for layer_idx, weights in controller.sweep():
                    assert jax.tree.structure(weights) == jax.tree.structure(stack[layer_idx])
                    for got, expected in zip(jax.tree.leaves(weights), jax.tree.leaves(stack[layer_idx]), strict=True):
                        np.testing.assert_array_equal(np.asarray(got), np.asarray(expected))
            resident = keep is None or keep >= 6
            kept = 6 if keep is None else keep
            uploads = {"both_sides": 6, "past": 6 - kept, "pinned_ring": 6 - kept + 1}[policy]
            assert controller.stats.last_sweep_uploads == (0 if resident else uploads)
            assert controller.schedule.name == ("resident" if resident else policy)
    for layer in stack:
        jax.tree.map(np.asarray, layer)  # nothing of the caller's was deleted


@pytest.mark.parametrize("keep", [2, None])
def test_a_generator_streams(keep: int | None) -> None:
    with residency.stream((w(i) for i in range(5)), keep=keep) as controller:
        for _ in range(2):
            for layer_idx, weights in controller.sweep():
                np.testing.assert_array_equal(weights, w(layer_idx))


@pytest.mark.parametrize("keep", [None, 3, 100])
def test_what_fits_is_resident_and_says_so(keep: int | None) -> None:
    with residency.stream([w(i) for i in range(3)], keep=keep) as controller:
        assert controller.schedule.describe().startswith("resident, keep 3 of 3 layers: 0 uploads per sweep")
        for _ in range(3):
            list(controller.sweep())
        assert controller.stats.uploads == controller.stats.resident_layers_end == 3


def test_warm_uploads_at_once() -> None:
    layers = [w(i) for i in range(6)]
    with residency.stream(layers, keep=2, warm_up=True) as controller:
        assert controller.stats.uploads == 2
    with residency.stream(layers, warm_up=True) as controller:
        assert controller.stats.uploads == 6
    with residency.stream(layers, keep=2) as controller:
        assert controller.stats.uploads == 0


@pytest.mark.parametrize("keep", [None, 2])
def test_changing_the_source_later_changes_nothing(keep: int | None) -> None:
    layers = [{"w": w(i)} for i in range(4)]
    with residency.stream(layers, keep=keep, warm_up=True) as controller:
        for layer in layers:
            layer["w"][...] = 0
        for _ in range(2):
            for layer_idx, weights in controller.sweep():
                np.testing.assert_array_equal(weights["w"], w(layer_idx))


def test_weights_kept_too_long_are_an_error_and_never_another_layer() -> None:
    with residency.stream([w(i) for i in range(6)], keep=1) as controller:
        list(controller.sweep())
        held = [weights for _, weights in controller.sweep()]
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(held[0])


@pytest.mark.parametrize("keep", [0, -1, 1.5, "2", True])
@pytest.mark.parametrize("policy", ["past", "both_sides"])
def test_bad_keep(keep, policy) -> None:
    def never():
        raise AssertionError("a bad argument must be refused before any work")
        yield

    with pytest.raises(ConfigError, match=r"^keep is .*; expected .*at least 1"):
        residency.stream(never(), keep=keep, policy=policy)


@pytest.mark.parametrize("keep", [None, 2])
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "there are no layers; expected at least one pytree of arrays"),
        (iter([]), "there are no layers"),
        (7, "layers is of type int; expected a list or an iterator of pytrees of arrays"),
        ([w(0), {}, w(2)], r"layers\[1\] has no arrays; expected a pytree with at least one"),
        ([w(0), w(1), ("text", 3.0, jnp.tanh)], r"layers\[2\] has no arrays"),
        (
            [{"w": w(0)}, {"w": w(1), "mlp": [w(2), Opaque(w(3))]}, w(2)],
            r"layers\[1\]\['mlp'\]\[1\] is of type Opaque;",
        ),
        ([w(0), w(1), (w(2), Opaque(w(3)).__call__)], r"layers\[2\]\[1\] is of type method; expected"),
        ([w(0), w(1), (w(2), functools.partial(jnp.dot, w(3)))], r"layers\[2\]\[1\] is of type partial; expected"),
        (
            [w(0), w(1), {"w": object()}],
            r"layers\[2\]\['w'\] is of type object; expected .*must be a registered pytree",
        ),
        ([np.array(["a", "b"])] * 3, r"layers\[0\] is an array of <U1; expected"),
        ([{"k": jax.random.key(0)}] * 3, r"layers\[0\] has no arrays"),
        ({"w": w(0)}, "layers is of type dict; expected a list or an iterator"),
    ],
)
def test_bad_layers(layers, message: str, keep: int | None) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        residency.stream(layers, keep=keep, warm_up=True)
    assert "\n" not in str(caught.value)


def test_bad_words() -> None:
    with pytest.raises(ConfigError, match="policy is 'future'; expected one of past, both_sides, pinned_ring"):
        residency.stream([w(0)], policy="future")  # type: ignore
    with pytest.raises(ConfigError, match="release is 'drop'; expected 'pool' or 'free'"):
        residency.stream([w(0)], release="drop")  # type: ignore


def test_every_public_name_is_there_and_nothing_imports_jax_early() -> None:
    assert {"HostArrays", "MappedStore", "MultiController", "TurnTransfer", "layers_of_device"} < set(residency.__all__)
    assert set(residency.__all__) == set(residency._MODULE_OF)
    for name in vramjax.residency.__all__:
        assert getattr(vramjax.residency, name).__module__.startswith("vramjax.residency.")
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        vramjax.residency.Missing  # noqa: B018
    names = "r.past_window(3, 1), r.Pool(), r.Controller, r.MultiController"
    code = f"import sys, vramjax.residency as r; {names}; print('jax' in sys.modules)"
    assert run_python(code) == "False\n"


def test_layers_that_cannot_be_pinned_are_not_said_to_be_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX makes new device arrays for them, so the counters must not speak of pool hits."""

    def refuse(geometry, device):
        raise PinningError("not today")

    monkeypatch.setattr(host_store, "HostArrays", refuse)
    with (
        pytest.warns(UserWarning, match="could not be put in pinned"),
        residency.stream([{"w": w(i)} for i in range(4)], keep=1) as controller,
    ):
        for _ in range(3):
            assert [int(weights["w"][0, 0]) for _, weights in controller.sweep()] == [int(w(i)[0, 0]) for i in range(4)]
        stats = controller.stats
    assert (stats.pool_hits, stats.pool_misses, stats.slots_freed) == (0, stats.uploads, stats.evictions)
