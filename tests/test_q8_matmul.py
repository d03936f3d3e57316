"""The Q8 matrix product against float64: its kernels, compiled or interpreted, and its reference."""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering
from kernels import JAX_TRITON, KERNELS

from pallas_kernels import Backend, Operand, q8_matmul
from pallas_kernels.operand import OperandSpec, make_operand
from pallas_kernels.q8_kernel import _tiling, q8_partial_sums
from pallas_kernels.tuning import DEFAULT_FEW, DEFAULT_MANY, MOST_FEW, Q8Config

TOLERANCE = 5e-5  # relative, of the whole result; bfloat16 activations would be off by 2e-3

each_kernel = pytest.mark.parametrize("backend", [KERNELS, JAX_TRITON])


def _problem(rows: int, k: int, n: int, group: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    num_groups = -(-k // group)
    x = rng.standard_normal((rows, k), np.float32)
    values = rng.integers(-127, 128, (n, num_groups * group)).astype(np.int8)
    values[:, k:] = 0
    scales = rng.uniform(0.001, 0.01, (num_groups, n)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(values), jnp.asarray(scales)


def _product(x: jax.Array, values: jax.Array, scales: jax.Array, group: int) -> np.ndarray:  # float64 [T, N]
    weights = np.asarray(values) * np.repeat(np.asarray(scales, np.float64).T, group, axis=1)  # [N, K_padded]
    return np.asarray(x, np.float64) @ weights[:, : x.shape[1]].T


def _error(y: Any, expected: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("backend", [KERNELS, JAX_TRITON, "reference"])
@pytest.mark.parametrize(
    ("rows", "k", "n", "group"),
    [
        (1, 256, 128, 128),
        (16, 1408, 64, 128),  # splits of K, the last of them shorter
        (3, 576, 192, 128),  # the last group half empty
        (17, 576, 64, 32),  # 18 groups, two at a time
        (2, 1024, 64, 32),  # four groups at a time, and splits
        (5, 192, 64, 64),
        (16, 40, 64, 32),
        (70, 20, 128, 32),  # less than a group; two tiles of rows
        (1, 96, 64, 32),
        (2, 256, 64, 256),
    ],
)
def test_agrees_with_float64(backend: Backend, rows: int, k: int, n: int, group: int):
    x, values, scales = _problem(rows, k, n, group)
    y = jax.jit(lambda *a: q8_matmul(*a, group=group, backend=backend))(x, values, scales)
    assert y.shape == (rows, n) and y.dtype == jnp.float32
    assert _error(y, _product(x, values, scales, group)) < TOLERANCE


@pytest.mark.parametrize("backend", [KERNELS, JAX_TRITON, "reference"])
def test_scales_inside_a_longer_array(backend: Backend):
    x, values, scales = _problem(2, 384, 64, 128)
    flat = jnp.pad(scales.ravel(), (37, 5), constant_values=jnp.nan)
    y = q8_matmul(x, values, flat, group=128, scales_offset=37, backend=backend)
    assert _error(y, _product(x, values, scales, 128)) < TOLERANCE


@each_kernel
@pytest.mark.parametrize(("k", "group"), [(1408, 128), (576, 32)])
def test_row_does_not_depend_on_the_others(backend: Backend, k: int, group: int):
    x, values, scales = _problem(16, k, 64, group)
    y = q8_matmul(x, values, scales, group=group, backend=backend)
    others = jax.random.uniform(jax.random.key(0), x.shape, minval=-1e6, maxval=1e6).at[5].set(x[5])
    np.testing.assert_array_equal(q8_matmul(others, values, scales, group=group, backend=backend)[5], y[5])


@each_kernel
@pytest.mark.parametrize("group", [32, 256])
def test_the_largest_sums_of_a_group(backend: Backend, group: int):
    """All weights and all activations at their largest, of either sign: what a digit and a sum in int32 must hold."""
    x = jnp.full((16, 512), 3.0).at[1::2].set(-3.0)
    values = jnp.full((64, 512), 127, jnp.int8).at[1::2].set(-127)
    scales = jnp.ones((512 // group, 64))
    y = q8_matmul(x, values, scales, group=group, backend=backend)
    assert _error(y, _product(x, values, scales, group)) < 1e-6


@each_kernel
def test_large_and_small_activations(backend: Backend):
    x, values, scales = _problem(4, 256, 64, 128)
    x = x * jnp.array([[1e-30], [1e-6], [1e6], [1e30]])
    y = np.asarray(q8_matmul(x, values, scales, group=128, backend=backend))
    expected = _product(x, values, scales, 128)
    assert [_error(y[row], expected[row]) < TOLERANCE for row in range(4)] == [True] * 4


@pytest.mark.parametrize("group", [32, 64, 128])
def test_tiling_covers_every_group_once(group: int):
    inputs, columns = (20, 40, 576, 1536, 2048, 4096, 11008, 12288, 18944), (64, 960, 2048, 6144, 151936)
    for k, n in itertools.product(inputs, columns):
        num_groups = -(-k // group)
        tiling = _tiling(16, n, num_groups * group, group, DEFAULT_FEW)
        splits, per_split = tiling.num_splits, tiling.steps_per_split
        num_steps, rest = divmod(num_groups, tiling.groups_per_step)
        assert rest == 0
        assert (splits - 1) * per_split < num_steps <= splits * per_split
        # No more splits than it takes: each costs another [T, N] of partial sums.
        assert splits == 1 or (splits - 1) * n // DEFAULT_FEW.block_columns < DEFAULT_FEW.num_programs
        for rows in (1, 17, 64):
            other = _tiling(rows, n, num_groups * group, group, DEFAULT_FEW)
            assert (other.num_splits, other.steps_per_split) == (splits, per_split)


def test_tiling_of_known_matrices():
    def summary(rows: int, n: int, k: int) -> tuple[int, int, int]:
        tiling = _tiling(rows, n, k, 128, DEFAULT_FEW if rows <= 64 else DEFAULT_MANY)
        return tiling.block_rows, tiling.num_splits, tiling.steps_per_split

    assert summary(16, 24576, 4096) == (16, 1, 32)
    assert summary(16, 6144, 4096) == (16, 4, 8)
    assert summary(1, 2048, 6144) == (16, 12, 4)
    assert summary(256, 2048, 2048) == (64, 1, 16)


@each_kernel
@pytest.mark.parametrize(
    "config",
    [
        Q8Config(block_columns=128, num_warps=8),
        Q8Config(step_inputs=256, num_programs=1),
        Q8Config(num_programs=10_000),
        Q8Config(joined=True, step_inputs=256, num_programs=1),
    ],
)
def test_every_config_gives_the_product(backend: Backend, config: Q8Config) -> None:
    x, values, scales = _problem(3, 1024, 128, 64)
    operand = make_operand(x, OperandSpec(k_padded=1024, group=64))
    sums = q8_partial_sums(operand, values, scales, num_rows=3, group=64, config=config, backend=backend)
    assert _error(sums.sum(0)[:3], _product(x, values, scales, 64)) < TOLERANCE


@each_kernel
@pytest.mark.parametrize("config", [None, Q8Config(joined=True)])
def test_activations_in_one_digit(backend: Backend, config: Q8Config | None) -> None:
    """Each is one of 127 steps, which the product takes as they are."""
    x, values, scales = _problem(70, 576, 64, 128)
    operand = make_operand(x, OperandSpec(k_padded=640, group=128, num_digits=1))
    run = functools.partial(q8_partial_sums, num_rows=70, group=128, config=config, backend=backend)
    sums = run(operand, values, scales)
    steps = np.asarray(operand.digits[0], np.float32) * np.repeat(np.asarray(operand.scales).T, 128, axis=1)
    assert _error(sums.sum(0)[:70], _product(jnp.asarray(steps[:70, :576]), values, scales, 128)) < 1e-6
    assert 1e-3 < _error(sums.sum(0)[:70], _product(x, values, scales, 128)) < 1e-2


@each_kernel
@pytest.mark.parametrize(("num_rows", "joined"), [(5, True), (16, False), (70, False)])
def test_rows_that_are_not_in_use(backend: Backend, num_rows: int, joined: bool) -> None:
    """They change nothing of the others, whatever the operand has in their places."""
    x, values, scales = _problem(num_rows, 256, 128, 64)
    positions = jnp.arange(num_rows, dtype=jnp.int32).at[1::3].set(-1)
    in_use, unused = np.flatnonzero(positions >= 0), np.flatnonzero(positions < 0)
    digits, x_scales = make_operand(x, OperandSpec(k_padded=256, group=64))
    config = Q8Config(joined=joined)
    run = functools.partial(q8_partial_sums, num_rows=num_rows, group=64, config=config, backend=backend)
    whole = run(Operand(digits, x_scales), values, scales)
    some = Operand(digits.at[:, unused].set(77), x_scales.at[:, unused].set(jnp.nan))
    np.testing.assert_array_equal(run(some, values, scales, positions=positions)[:, in_use], whole[:, in_use])
    if backend == "interpret":  # which has NaNs where nothing is written
        written = np.isfinite(run(Operand(digits, x_scales), values, scales, positions=positions))
        assert written[:, in_use].all() and (written[:, unused] == (num_rows > MOST_FEW)).all()


@each_kernel
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_shows(backend: Backend, value: float) -> None:
    """In the results of its row, all of them, and of no other."""
    x, values, scales = _problem(4, 256, 64, 128)
    clean = q8_matmul(x, values, scales, group=128, backend=backend)
    y = np.asarray(q8_matmul(x.at[2, 7].set(value), values, scales, group=128, backend=backend))
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(np.delete(y, 2, axis=0), np.delete(clean, 2, axis=0))


def test_refuses_what_was_made_for_another_matrix():
    x, values, scales = _problem(3, 256, 64, 128)
    operand = make_operand(x, OperandSpec(k_padded=256, group=64))
    with pytest.raises(ValueError, match=r"scales of .*\(4, 16\).*; expected .*\(2, 16\).*: make it for this matrix"):
        q8_partial_sums(operand, values, scales, num_rows=3, group=128, backend=KERNELS)
    operand, config = make_operand(x, OperandSpec(k_padded=256, group=128)), Q8Config(block_columns=128)
    with pytest.raises(ValueError, match="values has 64 rows; expected a multiple of the config's 128 columns"):
        q8_partial_sums(operand, values, scales, num_rows=3, group=128, config=config, backend=KERNELS)
    positions = jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"positions is \[2\]; expected \[T = 3\]"):
        q8_partial_sums(operand, values, scales, num_rows=3, group=128, positions=positions, backend=KERNELS)


def test_refuses_what_is_larger_than_it_can_count():
    def trace(n: int, k: int) -> Any:
        operand = OperandSpec(k_padded=k, group=128).shape(1)
        values, scales = jax.ShapeDtypeStruct((n, k), jnp.int8), jax.ShapeDtypeStruct((k // 128, n), jnp.float32)
        return jax.eval_shape(functools.partial(q8_partial_sums, num_rows=1, group=128), operand, values, scales)

    assert trace(2**17 - 64, 2**14).shape[1:] == (16, 2**17 - 64)
    with pytest.raises(ValueError, match=r"values is int8\[131072, 16384\]; expected at most 2147483647 entries"):
        trace(2**17, 2**14)


@each_kernel
@pytest.mark.parametrize("numbers", [(1, 16, 17, 64), (65, 128, 130)])
@pytest.mark.parametrize("joined", [False, True])
def test_a_row_is_the_same_among_more(backend: Backend, numbers: tuple[int, ...], joined: bool):
    """Among few, and among many."""
    x, values, scales = _problem(max(numbers), 576, 64, 64)
    spec, config = OperandSpec(k_padded=576, group=64), Q8Config(joined=joined, num_programs=3)
    rows = [
        q8_partial_sums(
            make_operand(x[:num_rows], spec),
            values,
            scales,
            num_rows=num_rows,
            group=64,
            config=config,
            backend=backend,
        )[:, :1]
        for num_rows in numbers
    ]
    for row in rows[1:]:
        np.testing.assert_array_equal(row, rows[0])


def _zeros(shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("x is float32.*expected float32 .T, K.", {"x": _zeros((256,))}),
        ("x is bfloat16.*expected float32", {"x": jnp.zeros((2, 256), jnp.bfloat16)}),
        ("values is int8.*expected int8 .N, K_padded.", {"values": _zeros((256,), np.int8)}),
        ("values is int32.*expected int8", {"values": _zeros((64, 256), np.int32)}),
        ("group is 96; expected a power of two from 32 to 256", {"group": 96}),
        ("group is 16; expected a power of two", {"group": 16}),
        ("group is 512; expected a power of two", {"group": 512}),
        ("values has 96 rows; expected a multiple of 64", {"values": _zeros((96, 256), np.int8)}),
        ("K = 256 and values 192; expected K padded", {"values": _zeros((64, 192), np.int8)}),
        ("K = 128 and values 256; expected K padded", {"x": _zeros((2, 128))}),
        ("K = 257 and values 256; expected K padded", {"x": _zeros((2, 257))}),
        ("scales is float16.*expected float32", {"scales": _zeros((2, 64), np.float16)}),
        ("scales is float32.2, 64, 1.*expected float32 .G, N.", {"scales": _zeros((2, 64, 1))}),
        ("from -1; expected float32", {"scales": _zeros((128,)), "scales_offset": -1}),
        (r"scales is \[64, 2\]; expected \[G, N\] = \[2, 64\]", {"scales": _zeros((64, 2))}),
        (r"expected \[G, N\] = \[2, 64\]", {"scales_offset": 1}),
        ("scales holds 130 floats; expected 128 from 3 on", {"scales": _zeros((130,)), "scales_offset": 3}),
    ],
)
@pytest.mark.parametrize("backend", ["triton", "jax_triton", "interpret", "reference"])
def test_refuses(backend: Backend, message: str, changes: dict[str, Any]):
    fitting = {"x": _zeros((2, 256)), "values": _zeros((64, 256), np.int8), "scales": _zeros((2, 64)), "group": 128}
    arguments = fitting | changes
    operands = [jnp.asarray(arguments.pop(name)) for name in ("x", "values", "scales")]
    with pytest.raises(ValueError, match=message):
        q8_matmul(*operands, backend=backend, **arguments)


@pytest.mark.parametrize("missing", ["triton", "jax_triton"])
def test_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "pallas_kernels.q8_triton", raising=False)
    x, values, scales = _problem(1, 64, 64, 64)
    with pytest.raises(ImportError, match=r'^backend is "jax_triton", .* pip install "vramjax\[triton\]"'):
        jax.eval_shape(functools.partial(q8_matmul, group=64, backend="jax_triton"), x, values, scales)


@needs_cuda_lowering
@pytest.mark.parametrize(
    ("rows", "k", "n", "group"),
    [(1, 576, 960, 128), (16, 4096, 6144, 128), (16, 576, 192, 32), (256, 1536, 576, 64), (16, 4096, 151936, 128)],
)
def test_lowers_for_cuda(rows: int, k: int, n: int, group: int):
    num_groups = -(-k // group)
    operands = [
        jax.ShapeDtypeStruct((rows, k), jnp.float32),
        jax.ShapeDtypeStruct((n, num_groups * group), jnp.int8),
        jax.ShapeDtypeStruct((num_groups * n + 7,), jnp.float32),
    ]
    text = lower_for_cuda(lambda *a: q8_matmul(*a, group=group, scales_offset=7, backend="triton"), *operands)
    assert text.count("__gpu$xla.gpu.triton") == 2  # one makes the operand


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@each_kernel
@pytest.mark.parametrize(
    ("rows", "k", "n", "group"),
    [(16, 4096, 6144, 128), (1, 576, 1024, 32), (256, 2048, 4096, 128), (100, 2048, 192, 64), (16, 576, 49152, 32)],
)
def test_compiled(backend: Backend, rows: int, k: int, n: int, group: int):
    x, values, scales = _problem(rows, k, n, group)
    function = jax.jit(lambda x: q8_matmul(x, values, scales, group=group, backend=backend))
    y = np.asarray(function(x))
    assert _error(y, _product(x, values, scales, group)) < TOLERANCE
    for other_rows in (1, 5, 16, 64) if rows <= 64 else (65, 128, 256):
        tile = jnp.full((other_rows, k), 7.0).at[-1].set(x[0])
        np.testing.assert_array_equal(np.asarray(function(tile))[-1], y[0])
