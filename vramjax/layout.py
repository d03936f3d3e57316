"""Where everything of one layer lies: four Q8 matrices and one float32 array for all that is small.

A layer is streamed as five arrays, since every array of an upload has a cost of its own. The matrices that share an
input are fused (q, k, v; gate, up). `params` holds what is left, each entry at a multiple of 64 floats:
norm weights, the scales of the four matrices, and biases and q/k norms where the model has them. Kernels read scales
at their offset, so nothing is sliced apart at run time. Knows shapes only: no JAX, no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from vramjax.config import ModelConfig
from vramjax.quantize import ROW_MULTIPLE, Q8Matrix

PARAM_ALIGNMENT = 64  # floats; 256 bytes, what a GPU likes to read from
MATRICES = ("qkv", "o", "gate_up", "down")
PARTS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


@dataclass(frozen=True, kw_only=True)
class MatrixSpec:
    """The geometry of one Q8 matrix: N outputs, K inputs, one scale per row and group."""

    n: int
    k: int
    group: int

    @property
    def n_padded(self) -> int:
        return -(-self.n // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def num_groups(self) -> int:
        return -(-self.k // self.group)

    @property
    def k_padded(self) -> int:
        return self.num_groups * self.group

    @property
    def values_shape(self) -> tuple[int, int]:
        return (self.n_padded, self.k_padded)

    @property
    def scales_shape(self) -> tuple[int, int]:
        return (self.num_groups, self.n_padded)


@dataclass(frozen=True, kw_only=True)
class Param:
    """One entry of `params`: `shape` floats from `offset` on."""

    offset: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.offset + math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class LayerLayout:
    """The five arrays of a layer. Equal layouts mean equal geometry: one compiled layer step serves both.

    Example, SmolLM2-135M at group 128: qkv int8 [960, 640], o [576, 640], gate_up [3072, 640], down [576, 1536], and
    params float32 with `input_norm` at 0, `post_norm` at 576, the scales of qkv [5, 960] at 1152, and so on.
    """

    matrices: tuple[tuple[str, MatrixSpec], ...]
    params: tuple[tuple[str, Param], ...]

    @classmethod
    def of(cls, config: ModelConfig, groups: Mapping[str, int]) -> LayerLayout:
        """The layout of `config`'s layers with each fused matrix in groups of `groups[name]` inputs."""
        shapes = matrix_shapes(config)
        matrices = {name: MatrixSpec(n=n, k=k, group=groups[name]) for name, (n, k) in shapes.items()}
        entries: dict[str, tuple[int, ...]] = {
            "input_norm": (config.hidden_size,),
            "post_norm": (config.hidden_size,),
            **{f"{name}_scales": spec.scales_shape for name, spec in matrices.items()},
        }
        biased = {"qkv": config.qkv_bias, "o": config.o_bias}
        biased |= {"gate_up": config.mlp_bias, "down": config.mlp_bias}
        entries |= {f"{name}_bias": (matrices[name].n_padded,) for name in MATRICES if biased[name]}
        if config.qk_norm:
            entries |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
        params, offset = [], 0
        for name, shape in entries.items():
            params.append((name, Param(offset=offset, shape=shape)))
            offset += -(-math.prod(shape) // PARAM_ALIGNMENT) * PARAM_ALIGNMENT
        return cls(matrices=tuple(matrices.items()), params=tuple(params))

    def matrix(self, name: str) -> MatrixSpec:
        return dict(self.matrices)[name]

    def param(self, name: str) -> Param | None:
        """The entry called `name`, or None where this model has none."""
        return dict(self.params).get(name)

    def offset(self, name: str) -> int:
        """Where the entry called `name`, which this model has, begins in `params`."""
        return dict(self.params)[name].offset

    @property
    def num_params(self) -> int:
        """Floats in `params`."""
        return -(-self.params[-1][1].stop // PARAM_ALIGNMENT) * PARAM_ALIGNMENT

    @property
    def shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Name -> (shape, dtype) of the five arrays."""
        int8, float32 = np.dtype(np.int8), np.dtype(np.float32)
        return {name: (spec.values_shape, int8) for name, spec in self.matrices} | {
            "params": ((self.num_params,), float32)
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer, on disk, on the link and on the device."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.shapes.values())

    def pack(self, matrices: Mapping[str, Q8Matrix], vectors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The five arrays of a layer from its fused, row-padded matrices and its norm and bias vectors [N]."""
        params = np.zeros(self.num_params, np.float32)
        arrays = {}
        for name, spec in self.matrices:
            matrix = matrices[name]
            assert matrix.values.shape == spec.values_shape, (name, matrix.values.shape, spec)
            arrays[name] = matrix.values
        for name, entry in self.params:
            if name.endswith("_scales"):
                source = matrices[name.removesuffix("_scales")].scales.reshape(-1)
            else:
                source = vectors[name]
            assert len(source) <= math.prod(entry.shape), (name, source.shape, entry)
            params[entry.offset : entry.offset + len(source)] = source
        return arrays | {"params": params}

    def __iter__(self) -> Iterator[tuple[str, MatrixSpec]]:
        return iter(self.matrices)


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(N, K) of each fused matrix."""
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * config.head_dim
    return {
        "qkv": (q_rows + 2 * kv_rows, config.hidden_size),
        "o": (config.hidden_size, q_rows),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
    }
