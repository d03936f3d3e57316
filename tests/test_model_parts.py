"""RoPE, the KV cache, the layout of a layer, random weights: the parts of the layer step by themselves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rotate_and_store import rotate, write_rows
from vramjax.checkpoint.random_weights import GEOMETRIES, RandomWeights
from vramjax.config import RopeConfig, RopeKind
from vramjax.layout import PARAM_ALIGNMENT
from vramjax.model.kv_cache import cache_bytes, cache_shape, make_cache
from vramjax.model.rope import inverse_frequencies


@pytest.mark.parametrize("position", [0, 1, 4095, 131071])
def test_phases_are_float32_at_every_position(position: int):
    """In bfloat16 position 4095 would be 4096, and every fast dimension would be off by a radian."""
    rope, head_dim = RopeConfig(theta=1e4), 64
    x = np.random.default_rng(0).standard_normal((1, 2, head_dim)).astype(np.float32)
    frequencies = inverse_frequencies(rope, head_dim).astype(np.float64)
    turned = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * position * frequencies)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    on_device = jnp.asarray(inverse_frequencies(rope, head_dim))
    actual = np.asarray(rotate(jnp.asarray(x), jnp.array([position]), on_device))
    # A float32 phase of 131071 radians is known to within 2**-7.
    np.testing.assert_allclose(actual, expected, atol=1e-5 + position * 2**-23 * 4)


def test_frequencies_of_a_stretched_context():
    plain = inverse_frequencies(RopeConfig(theta=1e4), 8)
    np.testing.assert_allclose(plain, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    linear = RopeConfig(kind="linear", theta=1e4, factor=4)
    np.testing.assert_allclose(inverse_frequencies(linear, 8), plain / 4, rtol=1e-6)
    factors = RopeConfig(theta=1e4, freq_factors=(1, 2, 4, 8))
    np.testing.assert_allclose(inverse_frequencies(factors, 8), plain / [1, 2, 4, 8], rtol=1e-6)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("theta", [1 + 2.0**-52, 1e4, 1e30])
@pytest.mark.parametrize("smallest", [1e-6, 1.0, 1e6])
def test_frequencies_are_finite_within_the_bounds(kind: RopeKind, theta: float, smallest: float):
    rope = RopeConfig(
        kind=kind,
        theta=theta,
        factor=smallest,
        original_max_positions=2**31 - 1,
        low_freq_factor=1e-6,
        high_freq_factor=1e6,
        beta_fast=smallest,
        beta_slow=smallest,
        freq_factors=(1e-6, 1.0, 8.0, 1e30),
    )
    phases = inverse_frequencies(rope, 8) * np.float32(2**31)
    assert np.isfinite(phases).all()


def test_rows_that_are_not_in_use_write_nothing():
    """Position -1 must not count from the end, and a position past the end must not be clamped to it."""
    kv = jnp.full((2, 256, 2, 1, 4), 7.0)
    rows = jnp.arange(4 * 2 * 4, dtype=jnp.float32).reshape(4, 2, 1, 4)
    written = write_rows(kv, rows, jnp.array([0, 0, 1, 1]), jnp.array([5, -1, 255, 256]))
    expected = np.asarray(kv).copy()
    expected[0, 5], expected[1, 255] = rows[0], rows[2]
    np.testing.assert_array_equal(written, expected)


def test_the_kv_cache_follows_the_request():
    config = GEOMETRIES["qwen3-vl-2b"]
    assert config.max_positions == 262144
    assert cache_shape(config, 1, 300) == (1, 384, 2, 8, 128)
    assert cache_bytes(config, 1, 300, jnp.bfloat16) == 28 * 384 * 2 * 8 * 128 * 2
    cache = make_cache(config, 1, 10, jnp.bfloat16, jax.devices()[0])
    assert config.num_layers * cache.nbytes == cache_bytes(config, 1, 10, jnp.bfloat16)


def test_random_weights_have_the_size_of_the_model_and_keep_activations_in_bounds():
    weights = RandomWeights(GEOMETRIES["qwen3-vl-2b"])
    layer = weights.load_layer(3)
    assert {name: (array.shape, array.dtype) for name, array in layer.items()} == weights.layout.shapes
    assert sum(array.nbytes for array in layer.values()) == weights.layout.num_bytes
    assert all(entry.offset % PARAM_ALIGNMENT == 0 for _, entry in weights.layout.params)
    for name, array in weights.load_layer(3).items():
        np.testing.assert_array_equal(array, layer[name])
    assert not np.array_equal(layer["o"], weights.load_layer(4)["o"])

    spec, scales = weights.layout.matrix("down"), weights.layout.param("down_scales")
    assert scales is not None
    per_row = layer["params"][scales.offset : scales.stop].reshape(scales.shape).T  # [N, G]
    rows = layer["down"][:64].reshape(64, -1, spec.group) * per_row[:64, :, None]
    gain = np.square(rows).sum(axis=(1, 2))  # what a row multiplies the variance of its input by
    assert 0.8 < gain.mean() < 1.4
