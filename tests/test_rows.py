"""What stands between two products: kernels against their references, bit by bit where they must be."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering
from kernels import IS_COMPILED, KERNELS

from pallas_kernels import (
    Operand,
    OperandSpec,
    Rms,
    add_norm_rows,
    add_rows,
    inverse_rms,
    norm_rows,
    quantise_rows,
    rotate_and_store,
    swiglu_rows,
)
from pallas_kernels.operand import make_operand, padded_rows

ROWS = [17]  # one more than a tile of the smallest size
TOLERANCE = 2e-5  # of the largest value: an operand keeps 15 bits of it
# D, K_padded, group: a whole number of groups, the last half empty, less than a block
SIZES = [(256, 256, 128), (576, 640, 128), (40, 64, 32)]
BIAS, WEIGHT, NUM_PARAMS = 64, 2048, 4096
RMS = Rms(row_length=256, eps=1e-3)


def floats(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def partial_sums(num_rows: int, num_columns: int, num_splits: int = 3) -> jax.Array:
    """As a product leaves them; of rows that only fill the tile up, whatever."""
    sums = floats(num_splits, padded_rows(num_rows), num_columns, seed=1)
    return sums.at[:, num_rows:].set(jnp.nan)


def squares_of(num_rows: int) -> jax.Array:
    """As a norm leaves them, in two pieces; of rows that only fill the tile up, zeros."""
    squares = RMS.row_length * jnp.abs(floats(padded_rows(num_rows), 2, seed=5))
    return squares.at[num_rows:].set(0)


def values_of(operand: Any, num_rows: int, k: int) -> np.ndarray:
    """The activations that an operand holds, float32 [T, K]; what it holds beyond them is nothing."""
    assert isinstance(operand, Operand)
    digits, scales = np.asarray(operand.digits, np.float32), np.asarray(operand.scales).T
    steps = digits[0] if len(digits) == 1 else 256 * digits[0] + digits[1]
    x = steps * np.repeat(scales, steps.shape[1] // scales.shape[1], axis=1)
    assert not x[num_rows:].any() and not x[:, k:].any()
    return x[:num_rows, :k]


def assert_close(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def test_an_operand_is_the_activations() -> None:
    for num_rows, (k, k_padded, group) in zip([1, 16, 70], SIZES, strict=True):
        x, spec = floats(num_rows, k), OperandSpec(k_padded=k_padded, group=group)
        operand = make_operand(x, spec)
        assert_close(values_of(operand, num_rows, k), x)
        by_kernel = quantise_rows(x, operand=spec, backend=KERNELS)
        assert_close(values_of(by_kernel, num_rows, k), x)
        if not IS_COMPILED:  # where a division may be off by its last bit
            jax.tree.map(np.testing.assert_array_equal, by_kernel, operand)


def test_every_group_has_a_scale_of_its_own() -> None:
    """Groups of all sizes are kept equally well; what is too small for that is zero."""
    x = floats(1, 256) * jnp.repeat(jnp.array([1e30, 1.0, 1e-25, 1e-32, 0, 1e-9, 1e-3, 7]), 32)
    kept = values_of(make_operand(x, OperandSpec(k_padded=256, group=32)), 1, 256).reshape(8, 32)
    for actual, expected in zip(kept, np.asarray(x).reshape(8, 32), strict=True):
        assert_close(actual, expected if abs(expected).max() > 1e-30 else 0 * expected)


@pytest.mark.parametrize("num_digits", [1, 2])
@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("d", "k_padded", "group"), SIZES)
def test_norm_rows(num_rows: int, d: int, k_padded: int, group: int, num_digits: int) -> None:
    spec = OperandSpec(k_padded=k_padded, group=group, num_digits=num_digits)
    run = functools.partial(norm_rows, weight_offset=WEIGHT, operand=spec)
    h, params = floats(num_rows, d), floats(NUM_PARAMS, seed=2)
    normed, expected = (run(h, norm_params=params, backend=backend) for backend in (KERNELS, "reference"))
    assert_close(values_of(normed.rows, num_rows, d), expected.rows, 2e-5 if num_digits == 2 else 4e-3)
    # The norm itself, when what is left of it is done.
    scale = inverse_rms(normed.squares, RMS)[:num_rows]
    weights = np.asarray(params, np.float64)[WEIGHT : WEIGHT + d]
    whole = (
        np.asarray(h, np.float64) / np.sqrt((np.asarray(h, np.float64) ** 2).sum(1) / RMS.row_length + RMS.eps)[:, None]
    )
    assert_close(expected.rows * scale, whole * weights)
    assert not normed.squares[num_rows:].any()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("bias_offset", [None, BIAS])
@pytest.mark.parametrize(("d", "k_padded", "group"), SIZES)
def test_add_norm_rows(num_rows: int, d: int, k_padded: int, group: int, bias_offset: int | None) -> None:
    h, params, sums = floats(num_rows, d), floats(NUM_PARAMS, seed=2), partial_sums(num_rows, d + 24)
    norm: dict[str, Any] = {"norm_params": floats(NUM_PARAMS, seed=4), "weight_offset": WEIGHT}
    norm |= {"operand": OperandSpec(k_padded=k_padded, group=group)}
    expected = add_norm_rows(h, sums, params, bias_offset=bias_offset, **norm, backend="reference")
    added, normed = add_norm_rows(h, sums, params, bias_offset=bias_offset, **norm, backend=KERNELS)
    np.testing.assert_array_equal(added, add_rows(h, sums, params, bias_offset=bias_offset, backend=KERNELS))
    alone = norm_rows(added, **norm, backend=KERNELS)
    jax.tree.map(np.testing.assert_array_equal, normed.rows, alone.rows)
    # An interpreter adds as XLA likes.
    np.testing.assert_allclose(normed.squares, alone.squares, rtol=0 if IS_COMPILED else 1e-6)
    assert_close(added, expected[0])
    assert_close(values_of(normed.rows, num_rows, d), expected[1].rows)
    assert_close(normed.squares.sum(1)[:num_rows], expected[1].squares[:, 0])


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("bias_offset", [None, BIAS])
@pytest.mark.parametrize(("f", "k_padded", "group"), [*SIZES, (1536, 1536, 64)])
def test_swiglu_rows(num_rows: int, f: int, k_padded: int, group: int, bias_offset: int | None) -> None:
    run = functools.partial(
        swiglu_rows,
        4 * partial_sums(num_rows, 2 * f + 16),
        squares_of(num_rows),
        floats(NUM_PARAMS, seed=2),
        rms=RMS,
        num_rows=num_rows,
        num_columns=f,
        bias_offset=bias_offset,
        operand=OperandSpec(k_padded=k_padded, group=group),
    )
    assert_close(values_of(run(backend=KERNELS), num_rows, f), run(backend="reference"))


def test_swiglu_of_large_gates() -> None:
    """exp(-gate) overflows where silu(gate) is 0."""
    sums = jnp.tile(jnp.array([-200.0, -89.0, 0.0, 200.0] * 8 + [3.0] * 32), (1, 16, 1))
    run = functools.partial(
        swiglu_rows,
        sums,
        jnp.full((16, 1), RMS.row_length * (1 - RMS.eps)),
        floats(8),
        rms=RMS,
        num_rows=16,
        num_columns=32,
        bias_offset=None,
        operand=OperandSpec(k_padded=32, group=32),
    )
    actual = values_of(run(backend=KERNELS), 16, 32)
    np.testing.assert_allclose(actual[0, :4], [0, 0, 0, 600], rtol=1e-4, atol=1e-30)


HEADS = [  # num_heads, num_kv_heads, head_dim
    (4, 2, 16),
    (9, 3, 20),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("slots", [1, [0, 1, 1, 0, 1, 1]])
def test_rotate_and_store(
    dtype: str, num_heads: int, num_kv_heads: int, head_dim: int, has_norms: bool, slots: Any
) -> None:
    positions = jnp.array([0, 5, 255, -1, 256, 100], jnp.int32)  # the last but one is beyond the cache
    frequencies = jnp.asarray(1e4 ** -(np.arange(0, head_dim, 2) / head_dim), jnp.float32)
    kv = floats(2, 256, 2, num_kv_heads, head_dim, seed=3).astype(dtype)
    run = jax.jit(
        functools.partial(
            rotate_and_store,
            rms=RMS,
            num_heads=num_heads,
            bias_offset=BIAS if has_norms else None,
            norm_offsets=(WEIGHT, WEIGHT + 100) if has_norms else None,
            amplitude=1.25,
        ),
        static_argnames="backend",
    )
    sums = partial_sums(len(positions), (num_heads + 2 * num_kv_heads) * head_dim + 8)
    squares = squares_of(len(positions))
    arguments = (sums, squares, floats(NUM_PARAMS, seed=2), kv, jnp.array(slots, jnp.int32), positions, frequencies)
    (q, written), (expected_q, expected_kv) = (run(*arguments, backend=name) for name in (KERNELS, "reference"))
    in_use = np.asarray(positions) >= 0
    assert_close(q[in_use], expected_q[in_use])
    assert written.dtype == kv.dtype
    tolerance = 0.02 if dtype == "bfloat16" else 1e-5  # where rounding goes the other way
    np.testing.assert_allclose(written.astype(jnp.float32), expected_kv.astype(jnp.float32), atol=tolerance)
    # Only what belongs to a row was written: a key and a value at each of four places.
    same = np.asarray((written == kv).astype(jnp.float32)).all(axis=(2, 3, 4))
    places = {(int(s), int(p)) for s, p in zip(np.broadcast_to(slots, 6), positions, strict=True) if 0 <= p < 256}
    assert set(zip(*(i.tolist() for i in np.nonzero(~same)), strict=True)) == places and len(places) == 4


@pytest.mark.parametrize("num_rows", [3, 16])
def test_row_does_not_depend_on_the_others(num_rows: int) -> None:
    h, params, sums = floats(num_rows, 576), floats(NUM_PARAMS, seed=2), partial_sums(num_rows, 576)
    run = functools.partial(
        add_norm_rows,
        params=params,
        norm_params=params,
        bias_offset=BIAS,
        weight_offset=WEIGHT,
        operand=OperandSpec(k_padded=640, group=128),
        backend=KERNELS,
    )
    added, normed = run(h, sums)
    others = jnp.full_like(h, 1e20).at[1].set(h[1]), jnp.full_like(sums, -1e20).at[:, 1].set(sums[:, 1])
    other_added, others_normed = run(*others)
    np.testing.assert_array_equal(added[1], other_added[1])
    np.testing.assert_array_equal(others_normed.squares[1], normed.squares[1])
    for actual, expected in zip(others_normed.rows, normed.rows, strict=True):  # digits [P, T, K], and scales [G, T]
        np.testing.assert_array_equal(actual[:, 1], expected[:, 1])


@pytest.mark.parametrize("num_rows", [3, 70])
def test_rows_that_are_not_in_use(num_rows: int) -> None:
    """They stay as they are in the residual stream, and change nothing of the others, whatever there is of them."""
    positions = jnp.arange(num_rows, dtype=jnp.int32).at[1::3].set(-1)
    in_use = np.asarray(positions) >= 0
    unused = np.flatnonzero(~in_use)
    h, params = floats(num_rows, 576), floats(NUM_PARAMS, seed=2)
    sums, squares = partial_sums(num_rows, 1200), squares_of(num_rows)
    settings: dict[str, Any] = {"bias_offset": BIAS, "backend": KERNELS}
    norm: dict[str, Any] = {"norm_params": params, "weight_offset": WEIGHT}
    norm["operand"] = swiglu_operand = OperandSpec(k_padded=640, group=128)

    def all_of_them(sums: jax.Array, squares: jax.Array, positions: jax.Array | None) -> tuple[list[jax.Array], Any]:
        added, normed = add_norm_rows(h, sums, params, positions=positions, **norm, **settings)
        form: dict[str, Any] = {"num_rows": num_rows, "num_columns": 600, "operand": swiglu_operand, "rms": RMS}
        return (
            [added, add_rows(h, sums, params, positions=positions, **settings)],
            [
                normed,
                norm_rows(h, positions=positions, **norm, backend=KERNELS),
                swiglu_rows(sums, squares, params, positions=positions, **form, **settings),
            ],
        )

    whole, whole_rows = all_of_them(sums, squares, None)
    some, some_rows = all_of_them(sums.at[:, unused].set(jnp.nan), squares.at[unused].set(jnp.nan), positions)
    for actual, expected in zip(some, whole, strict=True):
        np.testing.assert_array_equal(actual[in_use], expected[in_use])
        np.testing.assert_array_equal(actual[unused], h[unused])
    for actual, expected in zip(jax.tree.leaves(some_rows), jax.tree.leaves(whole_rows), strict=True):
        row_axis = actual.shape.index(padded_rows(num_rows))
        places = np.flatnonzero(in_use)
        np.testing.assert_array_equal(actual.take(places, row_axis), expected.take(places, row_axis))


@needs_cuda_lowering
@pytest.mark.parametrize("num_rows", [16, 256])
def test_lowers_for_cuda(num_rows: int) -> None:
    def layer_parts(h: jax.Array, sums: jax.Array, params: jax.Array, kv: jax.Array, rows: jax.Array) -> Any:
        norm: dict[str, Any] = {"norm_params": params, "weight_offset": 0}
        norm["operand"] = OperandSpec(k_padded=640, group=128)
        normed = norm_rows(h, **norm)
        q, kv = rotate_and_store(
            sums, normed.squares, params, kv, rows, rows, params[:32], rms=RMS, num_heads=9, norm_offsets=(0, 64)
        )
        return (
            normed,
            add_norm_rows(h, sums, params, bias_offset=7, **norm),
            add_rows(h, sums, params, bias_offset=None),
            swiglu_rows(
                sums,
                normed.squares,
                params,
                rms=RMS,
                num_rows=num_rows,
                num_columns=480,
                bias_offset=None,
                operand=OperandSpec(k_padded=512, group=128),
            ),
            q,
            kv,
        )

    shapes = [(num_rows, 576), (2, padded_rows(num_rows), 960), (NUM_PARAMS,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arguments += [
        jax.ShapeDtypeStruct((2, 256, 2, 3, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_rows,), jnp.int32),
    ]
    assert lower_for_cuda(layer_parts, *arguments).count("__gpu$xla.gpu.triton") == 5
