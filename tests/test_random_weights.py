"""Weights that are made on the spot."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from vramjax.checkpoint.random_weights import GEOMETRIES, RandomWeights

CONFIG = replace(
    GEOMETRIES["qwen3-8b"], num_layers=5, hidden_size=192, intermediate_size=320, num_heads=4, num_kv_heads=2
)


def empty(weights: RandomWeights) -> dict[str, np.ndarray]:
    return {name: np.empty(shape, dtype) for name, (shape, dtype) in weights.layout.shapes.items()}


def test_layers_differ_in_every_array_and_are_the_same_each_time() -> None:
    weights = RandomWeights(CONFIG)
    layers = [weights.load_layer(i) for i in range(5)]
    for i, layer in enumerate(layers):
        again = empty(weights)
        RandomWeights(CONFIG).read_layer_into(i, again)
        for name, array in layer.items():
            np.testing.assert_array_equal(again[name], array)
            assert not any(np.array_equal(array, other[name]) for other in layers[i + 1 :])
    assert not np.array_equal(layers[0]["o"], RandomWeights(CONFIG, seed=1).load_layer(0)["o"])


def test_threads_may_read_at_once() -> None:
    weights = RandomWeights(CONFIG)

    def read(layer_idx: int) -> dict[str, np.ndarray]:
        arrays = empty(weights)
        weights.read_layer_into(layer_idx, arrays)
        return arrays

    with ThreadPoolExecutor(4) as pool:
        for layer_idx, arrays in enumerate(pool.map(read, range(5))):
            for name, array in weights.load_layer(layer_idx).items():
                np.testing.assert_array_equal(arrays[name], array)


def test_padding_is_zero() -> None:
    """As it is in packed models: inputs of 192 in groups of 128 take 256 columns."""
    layer = RandomWeights(CONFIG).load_layer(3)
    assert layer["qkv"].shape[1] == 256 and not layer["qkv"][:, 192:].any() and layer["qkv"][:, :192].all(axis=0).any()
    assert layer["down"].min() == -127
