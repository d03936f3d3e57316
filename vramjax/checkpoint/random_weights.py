"""Weights that are made on the spot, of a real model's shapes: for benchmarks and for trying out a size.

Values are random and scaled like those of a trained model, so that activations stay of order 1 through all layers;
what is decoded from them means nothing, but costs what the real model costs.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from vramjax.checkpoint.packed import group_names, head_bytes, head_shapes
from vramjax.config import ModelConfig, RopeConfig
from vramjax.layout import LayerLayout

_INT8_STD = 73.3  # of integers spread evenly over -127 .. 127


_QWEN3 = ModelConfig(
    family="qwen3",
    num_layers=36,
    hidden_size=4096,
    intermediate_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    rms_norm_eps=1e-6,
    qk_norm=True,
    rope=RopeConfig(theta=1e6),
)

# Name -> config, from the config.json of the models that are named.
GEOMETRIES: dict[str, ModelConfig] = {
    "qwen3-vl-2b": replace(
        _QWEN3,
        family="qwen3_vl",
        num_layers=28,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=16,
        max_positions=262144,
        tied_embeddings=True,
        rope=RopeConfig(theta=5e6),
    ),
    "qwen3-8b": _QWEN3,
    "qwen3-32b": replace(_QWEN3, num_layers=64, hidden_size=5120, intermediate_size=25600, num_heads=64),
    "llama3-70b": ModelConfig(
        family="llama",
        num_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128256,
        max_positions=8192,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5),
    ),
}


class RandomWeights:
    """Random weights of `config`, the same for the same seed; layer i is made when it is asked for.

    Invariant: no two layers are the same. Random bytes are slower to make than to copy, so all layers share one set of
    matrices, whose rows each layer begins at another place; its scales, norms and biases are its own.

    Example: of layer 2, row 0 of each matrix is row 2 of layer 0.
    """

    def __init__(self, config: ModelConfig, *, group: int = 128, seed: int = 0) -> None:
        self.config = config
        self.groups = dict.fromkeys(group_names(config), group)
        self.layout = LayerLayout.of(config, self.groups)
        self._seed = seed
        self._lock = threading.Lock()
        self._matrices: dict[str, np.ndarray] = {}

    @property
    def head_nbytes(self) -> int:
        return head_bytes(self.config, self.groups)

    def load_layer(self, layer_idx: int) -> dict[str, np.ndarray]:
        """The five arrays of `LayerLayout`."""
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in self.layout.shapes.items()}
        self.read_layer_into(layer_idx, arrays)
        return arrays

    def read_layer_into(self, layer_idx: int, arrays: Mapping[str, np.ndarray], *, drop_pages: bool = False) -> None:
        """Fills the five arrays of a layer; threads may do so at the same time. There are no pages to drop."""
        del drop_pages
        for name, matrix in self._base().items():
            shift = layer_idx % len(matrix)
            arrays[name][: len(matrix) - shift] = matrix[shift:]
            arrays[name][len(matrix) - shift :] = matrix[:shift]
        rng = np.random.default_rng((self._seed, layer_idx))
        params = arrays["params"]
        params[...] = 0
        for name, entry in self.layout.params:
            if name.endswith("_scales"):
                part = _scales(rng, entry.shape, self.layout.matrix(name.removesuffix("_scales")).k)
            else:
                part = rng.uniform(0.8, 1.2, entry.shape) if name.endswith("norm") else rng.normal(0, 0.1, entry.shape)
            params[entry.offset : entry.stop] = part.reshape(-1)

    def will_need_layer(self, layer_idx: int) -> None:
        """Nothing: there is no file to read ahead in."""

    def _base(self) -> dict[str, np.ndarray]:
        """The matrices of layer 0, which stay in memory."""
        with self._lock:
            if not self._matrices:
                rng = np.random.default_rng((self._seed, self.config.num_layers + 1))
                self._matrices = {name: _values(rng, spec.values_shape, spec.k) for name, spec in self.layout}
            return self._matrices

    def load_head(self) -> dict[str, np.ndarray]:
        """The arrays of `head_shapes`."""
        rng = np.random.default_rng((self._seed, self.config.num_layers))
        head, k = {}, self.config.hidden_size
        for name, (shape, dtype) in head_shapes(self.config, self.groups).items():
            if dtype == np.int8:
                head[name] = _values(rng, shape, k)
            elif name.endswith("_scales"):
                head[name] = _scales(rng, shape, k)
            else:
                head[name] = rng.uniform(0.8, 1.2, shape).astype(np.float32)
        return head

    def read_head_into(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Fills the arrays of `load_head`."""
        for name, array in self.load_head().items():
            arrays[name][...] = array


def _values(rng: np.random.Generator, shape: tuple[int, ...], k: int) -> np.ndarray:
    """int8 [N, K_padded], zeros from column `k` on."""
    values = rng.integers(0, 1 << 32, -(-math.prod(shape) // 4), np.uint32).view(np.int8)  # random bytes
    values = values[: math.prod(shape)].reshape(shape)
    np.maximum(values, -127, out=values)
    values[:, k:] = 0
    return values


def _scales(rng: np.random.Generator, shape: tuple[int, ...], k: int) -> np.ndarray:
    """Scales that give a matrix of `k` inputs a variance of about 1 / k."""
    scales = rng.random(shape, np.float32) + np.float32(0.5)
    scales /= np.float32(_INT8_STD * math.sqrt(k))
    return scales
