"""The cases of the kernel benchmark: products and attention of models' shapes, with data, bytes and a reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app

from pallas_kernels import (
    Backend,
    cached_attention,
    cached_attention_reference,
    q8_matmul,
    q8_partial_sums,
    unchained,
)
from pallas_kernels.operand import OperandSpec, make_operand
from vramjax.checkpoint.packed import group_names
from vramjax.checkpoint.random_weights import GEOMETRIES
from vramjax.config import ModelConfig
from vramjax.layout import MatrixSpec, matrix_shapes
from vramjax.model.kv_cache import capacity

if TYPE_CHECKING:
    from vramjax.decode.spec import EngineSpec

Model = tuple[ModelConfig, Mapping[str, int]]  # and the groups of its matrices

PRODUCT_ARMS = ("q8", "kernel", "int8", "xla")
_MAX_TILE_ROWS = 16
_CHECKED_COLUMNS = 256  # of a product, compared with float64


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape: the functions that compute it, and what they are measured by."""

    row: Mapping[str, Any]  # what it is, for the result file
    arms: Mapping[str, Callable[..., jax.Array]]  # all of them take what `make` returns
    make: Callable[[jax.Array], tuple[Any, ...]]  # a random key -> arguments
    num_bytes: int  # read by a call
    flops: int
    error: Callable[[tuple[Any, ...], Any], float]  # relative, of the result of any arm

    def example(self) -> Any:
        """Shapes and dtypes of the arguments."""
        return jax.eval_shape(self.make, jax.random.key(0))


def product_case(
    name: str,
    matrix: MatrixSpec,
    rows: int,
    *,
    backend: Backend,
    arms: Sequence[str] = PRODUCT_ARMS,
) -> Case:
    """A product with a Q8 matrix, from activations to the result: "q8"; by XLA: "xla".

    "kernel" is the kernel alone as it runs in a layer, between kernels that make its operand and add its partial sums
    up; "jax_triton" is the same kernel through jax_triton, and "int8" that for activations in one digit, of a prompt's
    chunk only.
    """
    n, k, group, num_groups = matrix.n_padded, matrix.k, matrix.group, matrix.num_groups
    settings: dict[str, Any] = {"group": group, "backend": backend}
    spec = OperandSpec(k_padded=matrix.k_padded, group=group)

    def make(key: jax.Array) -> tuple[dict[str, Any], jax.Array, jax.Array]:
        keys = jax.random.split(key, 3)
        x = jax.random.normal(keys[0], (rows, k))
        both, one = (
            x if backend == "reference" else make_operand(x, replace(spec, num_digits=num_digits))
            for num_digits in (2, 1)
        )
        values = jax.random.randint(keys[1], (n, matrix.k_padded), -127, 128, jnp.int8)
        values = jnp.where(jnp.arange(matrix.k_padded) < k, values, 0)
        scales = jax.random.uniform(keys[2], (num_groups, n), minval=0.5) / (73 * k**0.5)
        return {"x": x, "operand": both, "one_digit": one}, values, scales

    def q8(inputs: dict[str, Any], values: jax.Array, scales: jax.Array) -> jax.Array:
        return q8_matmul(inputs["x"], values, scales, group=group, backend=unchained(backend))

    def partial_sums(inputs: dict[str, Any], values: jax.Array, scales: jax.Array) -> jax.Array:
        return q8_partial_sums(inputs["operand"], values, scales, num_rows=rows, **settings)

    def jax_triton(inputs: dict[str, Any], values: jax.Array, scales: jax.Array) -> jax.Array:
        return q8_partial_sums(inputs["operand"], values, scales, num_rows=rows, group=group, backend="jax_triton")

    def int8(inputs: dict[str, Any], values: jax.Array, scales: jax.Array) -> jax.Array:
        return q8_partial_sums(inputs["one_digit"], values, scales, num_rows=rows, **settings)

    def xla(inputs: dict[str, Any], values: jax.Array, scales: jax.Array) -> jax.Array:
        grouped = values.reshape(n, num_groups, group).astype(jnp.bfloat16)
        w = (grouped * scales.T[..., None].astype(jnp.bfloat16)).reshape(n, -1)[:, :k]
        return jnp.dot(inputs["x"].astype(jnp.bfloat16), w.T, preferred_element_type=jnp.float32)

    def error(arguments: tuple[Any, ...], result: Any) -> float:
        inputs, values, scales = arguments
        columns = slice(None, None, max(1, n // _CHECKED_COLUMNS))
        if result.ndim == 3:  # partial sums, of rows of whole tiles
            result = np.asarray(result).sum(axis=0)[:rows]
        # On the host, where no slice has to be compiled.
        w = np.asarray(values)[columns].astype(np.float64) * np.repeat(np.asarray(scales).T[columns], group, axis=1)
        return relative_error(np.asarray(result)[:, columns], np.asarray(inputs["x"], np.float64) @ w[:, :k].T)

    functions = {"q8": q8, "kernel": partial_sums, "jax_triton": jax_triton, "int8": int8, "xla": xla}
    return Case(
        row={
            "kernel": "q8_matmul",
            "name": name,
            "shape": f"{rows} x {k} -> {matrix.n}",
            "n": matrix.n,
            "k": k,
            "rows": rows,
        },
        arms={arm: functions[arm] for arm in arms if arm != "int8" or rows > _MAX_TILE_ROWS},
        make=make,
        num_bytes=n * matrix.k_padded + 4 * n * num_groups,
        flops=2 * rows * matrix.n * k,
        error=error,
    )


def attention_case(name: str, spec: EngineSpec, context: int, in_use: int) -> Case:
    """A decode tile, of which so many rows are in use, each the last token of a sequence of `context` tokens."""
    config, rows, dtype = spec.config, spec.tile_rows, jnp.dtype(spec.kv_dtype)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    kv_shape = (in_use, capacity(context), 2, kv_heads, head_dim)
    positions = np.where(np.arange(rows) < in_use, context - 1, -1).astype(np.int32)
    slots = (np.arange(rows) % in_use).astype(np.int32)

    def make(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, 2)
        q = 2 * jax.random.normal(keys[0], (rows, heads, head_dim))
        return q, jax.random.normal(keys[1], kv_shape, dtype), jnp.asarray(slots), jnp.asarray(positions)

    def error(arguments: tuple[Any, ...], result: jax.Array) -> float:
        return relative_error(result[:in_use], np.asarray(jax.jit(cached_attention_reference)(*arguments))[:in_use])

    num_positions = in_use * context
    return Case(
        row={
            "kernel": "attention",
            "name": f"{name} attention",
            "shape": f"{in_use} x {context} positions",
            "context": context,
            "rows": in_use,
        },
        arms={"attention": functools.partial(cached_attention, backend=spec.backend)},
        make=make,
        num_bytes=num_positions * 2 * kv_heads * head_dim * dtype.itemsize,
        flops=4 * num_positions * heads * head_dim,
        error=error,
    )


def matrices(config: ModelConfig, groups: Mapping[str, int]) -> dict[str, MatrixSpec]:
    """Name -> matrix of a layer, and of the output projection."""
    shapes = matrix_shapes(config) | {"lm_head": (config.vocab_size, config.hidden_size)}
    head_group = groups.get("head", groups["embed"])
    return {name: MatrixSpec(n=n, k=k, group=groups.get(name, head_group)) for name, (n, k) in shapes.items()}


def models_of(geometries: Sequence[str]) -> dict[str, Model]:
    """Models by name, in groups of 128."""
    if unknown := [name for name in geometries if name not in GEOMETRIES]:
        raise app.UsageError(f"geometries has {unknown[0]!r}; expected names of {', '.join(GEOMETRIES)}")
    configs = {name: GEOMETRIES[name] for name in geometries}
    return {name: (config, dict.fromkeys(group_names(config), 128)) for name, config in configs.items()}


def is_chosen(name: str, only: Sequence[str]) -> bool:
    """Whether a name has one of `only` in it, or everything is chosen."""
    return not only or any(part in name for part in only)


def products(
    models: Mapping[str, Model], rows: Sequence[int], *, only: Sequence[str] = ()
) -> list[tuple[str, MatrixSpec, int]]:
    """Name, matrix and rows of each different product of these models that is chosen by name.

    lm_head has one row or a tile of them to do, and never a prompt's.
    """
    distinct: dict[tuple[MatrixSpec, int], str] = {}
    for model, (config, groups) in models.items():
        for matrix_name, matrix in matrices(config, groups).items():
            for num_rows in rows:
                name = f"{model} {matrix_name}"
                if is_chosen(name, only) and (matrix_name != "lm_head" or num_rows <= _MAX_TILE_ROWS):
                    distinct.setdefault((matrix, num_rows), name)
    return [(name, matrix, num_rows) for (matrix, num_rows), name in distinct.items()]


def relative_error(actual: jax.Array | np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference over that of `expected`."""
    difference = np.asarray(actual, np.float64) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))
