"""Layers of Flax NNX, of Equinox and of nothing but JAX go through `vramjax.stream` as what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vramjax
from vramjax.errors import ConfigError
from vramjax.residency.streaming import LayerStream

WIDTH, NUM_LAYERS = 16, 8
X = jnp.sin(jnp.arange(5.0 * WIDTH)).reshape(5, WIDTH)


class FlaxBlock(nnx.Module):
    """Norm, two linear layers, dropout with its own random keys, an activation function as an attribute."""

    def __init__(self, inner: int, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, inner, rngs=rngs)
        self.down = nnx.Linear(inner, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.activation = nnx.gelu

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(self.down(self.activation(self.up(self.norm(x)))))


class EquinoxBlock(eqx.Module):
    """The same, with numbers and functions among the leaves (in Dropout and MLP) and a static field."""

    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    name: str = eqx.field(static=True)

    def __init__(self, inner: int, key: jax.Array, name: str) -> None:
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, inner, depth=1, activation=jax.nn.gelu, key=key)
        self.dropout = eqx.nn.Dropout(0.5, inference=True)
        self.name = name

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jax.vmap(lambda row: self.mlp(self.norm(row)))(x))


def flax_layers() -> list[FlaxBlock]:
    layers = [FlaxBlock(inner(i), nnx.Rngs(i)) for i in range(NUM_LAYERS)]
    for layer in layers:
        layer.eval()
    return layers


def equinox_layers() -> list[EquinoxBlock]:
    return [EquinoxBlock(inner(i), jax.random.key(i), "block") for i in range(NUM_LAYERS)]


def jax_layers() -> list[dict[str, Any]]:
    def normal(i: int, *shape: int) -> np.ndarray:
        return np.random.default_rng(i).standard_normal(shape, np.float32) / 4

    return [{"up": normal(i, WIDTH, inner(i)), "down": normal(i, inner(i), WIDTH)} for i in range(NUM_LAYERS)]


def inner(layer_idx: int) -> int:
    """Layers of two kinds: every third is wider."""
    return 24 if layer_idx % 3 else 64


def call(module: Any, x: jax.Array) -> jax.Array:
    return module(x)


def jax_block(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]


LAYERS: dict[str, Callable[[], list[Any]]] = {"jax": jax_layers, "flax": flax_layers, "equinox": equinox_layers}
# How a user of each would make a step: of `layers.jit`, of the framework itself, or not compiled at all.
STEPS: dict[tuple[str, str], Callable[[LayerStream], Callable[..., Any]]] = {
    ("jax", "stream.jit"): lambda stream: stream.jit(jax_block),
    ("jax", "jax.jit"): lambda stream: jax.jit(jax_block),
    ("jax", "eager"): lambda stream: jax_block,
    ("flax", "stream.jit"): lambda stream: stream.jit(call),
    ("flax", "jax.jit"): lambda stream: jax.jit(call),
    ("flax", "nnx.jit"): lambda stream: nnx.jit(call),
    ("flax", "eager"): lambda stream: call,
    ("equinox", "stream.filter_jit"): lambda stream: stream.filter_jit(call),
    ("equinox", "eqx.filter_jit"): lambda stream: eqx.filter_jit(call),
    ("equinox", "eager"): lambda stream: call,
}


def run(stream: Any, step: Callable[..., Any]) -> list[np.ndarray]:
    outputs = []
    for sweep in range(3):
        x = X + sweep
        for _, layer in stream.sweep():
            x = step(layer, x)
        outputs.append(np.asarray(x))
    return outputs


@pytest.mark.parametrize(("framework", "how"), STEPS, ids=map(" ".join, STEPS))
def test_bits_of_the_resident_run_within_a_budget(framework: str, how: str) -> None:
    layers = LAYERS[framework]()
    sizes = [sum(a.nbytes for a in jax.tree.leaves(layer) if isinstance(a, np.ndarray | jax.Array)) for layer in layers]
    budget = sum(sizes) // 2
    make_step = STEPS[framework, how]
    with vramjax.stream(layers) as everything, vramjax.stream(layers, device_budget=budget) as stream:
        expected = run(everything, make_step(everything))
        np.testing.assert_array_equal(run(stream, make_step(stream)), expected)  # bitwise
        assert everything.stats.last_sweep_bytes_uploaded == 0
        assert stream.stats.last_sweep_bytes_uploaded > 0
        assert stream.stats.peak_device_bytes <= budget
    x = X
    for layer in layers:  # and without vramjax
        x = (jax_block if framework == "jax" else call)(layer, x)
    np.testing.assert_allclose(expected[0], x, rtol=1e-5, atol=1e-5)
    assert not np.allclose(expected[0], X)


@pytest.mark.parametrize("framework", ["flax", "equinox"])
def test_modules_come_back_as_modules(framework: str) -> None:
    layers = LAYERS[framework]()
    with vramjax.stream(iter(layers), keep=3) as stream:
        for _ in range(2):
            for layer_idx, layer in stream.sweep():
                assert type(layer) is type(layers[layer_idx])
                assert jax.tree.structure(layer) == jax.tree.structure(layers[layer_idx])
                for got, given in zip(jax.tree.leaves(layer), jax.tree.leaves(layers[layer_idx]), strict=True):
                    if isinstance(given, jax.Array) and not jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
                        np.testing.assert_array_equal(got, given)
                        assert got is not given
                    else:
                        assert got is given  # functions, numbers, keys
        assert stream.stats.last_sweep_bytes_uploaded > 0


@pytest.mark.parametrize("framework", LAYERS)
def test_the_step_is_traced_as_often_as_there_are_kinds(framework: str) -> None:
    num_traces = 0

    def counted(layer: Any, x: jax.Array) -> jax.Array:
        nonlocal num_traces
        num_traces += 1
        return jax_block(layer, x) if framework == "jax" else layer(x)

    with vramjax.stream(LAYERS[framework](), keep=2, policy="past") as stream:  # nothing travels: one program a kind
        run(stream, stream.filter_jit(counted) if framework == "equinox" else stream.jit(counted))
    assert num_traces == 2


def test_a_step_may_be_a_method_of_an_equinox_module() -> None:
    class Model(eqx.Module):
        scale: jax.Array
        activation: Callable[[jax.Array], jax.Array]

        def step(self, block: EquinoxBlock, x: jax.Array) -> jax.Array:
            return x + self.scale * self.activation(block(x))

    layers = equinox_layers()
    models = [Model(jnp.float32(scale), jnp.tanh) for scale in (0.5, 2.0)]
    outputs = []
    with vramjax.stream(layers, keep=3) as stream, vramjax.stream(layers) as everything:
        for model in models:  # what arrays the module holds is an argument of the program
            outputs.append(run(stream, stream.filter_jit(model.step)))
            np.testing.assert_array_equal(outputs[-1], run(everything, everything.filter_jit(model.step)))
        assert stream.stats.last_sweep_bytes_uploaded > 0
    assert not np.allclose(*outputs)


def test_states_of_flax_modules_are_layers_too() -> None:
    graphdefs, states = zip(*(nnx.split(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i))) for i in range(4)), strict=True)
    x = X
    with vramjax.stream(states, keep=2) as stream:
        step = stream.jit(lambda state, x: nnx.merge(graphdefs[0], state)(x))
        for _, state in stream.sweep():
            assert isinstance(state, nnx.State)
            x = step(state, x)
        assert stream.stats.bytes_uploaded > 0
    expected = X
    for i in range(4):
        expected = nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i))(expected)
    np.testing.assert_allclose(x, expected, rtol=1e-5, atol=1e-5)


def test_layers_of_a_module_that_holds_them() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(i)) for i in range(4)])

    keys = jax.random.split(jax.random.key(0), 4)
    for layers in (Model().layers, eqx.nn.Sequential([eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys])):
        with vramjax.stream(layers, keep=2) as stream:
            assert [type(layer) for _, layer in stream.sweep()] == [type(layers[0])] * 4
            assert stream.stats.bytes_uploaded > 0


def test_a_flax_module_that_is_no_pytree_is_refused() -> None:
    class Hidden(nnx.Module, pytree=False):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x * self.w

    with pytest.raises(ConfigError, match=r"layers\[1\]\['hidden'\] is of type Hidden; .*must be a registered pytree"):
        vramjax.stream([{"w": np.ones(3), "hidden": hidden} for hidden in (jnp.tanh, Hidden())], keep=1)


@pytest.mark.parametrize("module", [flax_layers, equinox_layers], ids=["flax", "equinox"])
def test_one_module_is_no_list_of_layers(module: Callable[[], list[Any]]) -> None:
    layer = module()[0]
    with pytest.raises(ConfigError, match=f"layers is of type {type(layer).__name__}; expected a list or an iterator"):
        vramjax.stream(layer, keep=1)
