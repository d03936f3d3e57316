"""Attention over a KV cache: the kernels and the reference, against float64 on the host and bit by bit."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering
from kernels import IS_COMPILED, KERNELS

from pallas_kernels import Backend, Operand, OperandSpec, cached_attention, cached_attention_reference
from pallas_kernels.attention_tiles import SPLIT
from pallas_kernels.decode_attention import COMBINED, FIRST_COMBINED, MAX_WORKERS
from pallas_kernels.operand import make_operand

NOT_IN_USE = 0  # the row that may come out as anything
POSITIONS = [-1, 0, 63, 64, 255, 256, 300, 511]  # what pieces of 64 and splits of 128 begin and end with
CAPACITY = 512
NUM_SLOTS = 3
BACKENDS: tuple[Backend, ...] = (KERNELS, "reference")
# Relative to the largest value. The kernel multiplies in the cache's type: bfloat16 keeps 8 bits.
# A GPU's exponential is off by some bits.
TOLERANCE = {(KERNELS, "float32"): 1e-5 if IS_COMPILED else 2e-6, (KERNELS, "bfloat16"): 1e-2}
TOLERANCE |= {("reference", "float32"): 2e-6, ("reference", "bfloat16"): 2e-6}

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array]

attend = jax.jit(cached_attention, static_argnames="backend")


def make_inputs(
    *,
    group: int,
    head_dim: int,
    dtype: str = "float32",
    scalar_slot: bool = False,
    seed: int = 0,
) -> Inputs:
    """q [T, H, Hd], kv [B, S, 2, KvH, Hd], slots [T] or [], positions [T]; scores of a spread that matters."""
    rng = np.random.default_rng(seed)
    rows, num_kv_heads = len(POSITIONS), 2
    q = rng.normal(0, 2, (rows, group * num_kv_heads, head_dim)).astype(np.float32)
    kv = rng.normal(0, 1, (NUM_SLOTS, CAPACITY, 2, num_kv_heads, head_dim))
    slots = np.int32(1) if scalar_slot else rng.integers(0, NUM_SLOTS, rows).astype(np.int32)
    return jnp.asarray(q), jnp.asarray(kv, dtype), jnp.asarray(slots), jnp.asarray(POSITIONS, jnp.int32)


def in_use(rows: Any) -> np.ndarray:
    """Of all rows of `POSITIONS` those in use."""
    return np.delete(np.asarray(rows), NOT_IN_USE, axis=0)


def oracle(q: jax.Array, kv: jax.Array, slots: jax.Array, positions: jax.Array) -> np.ndarray:
    """The definition, row by row and head by head, in float64."""
    queries, cache = np.asarray(q, np.float64), np.asarray(kv.astype(jnp.float32), np.float64)
    row_slots, group = np.broadcast_to(slots, len(queries)), queries.shape[1] // cache.shape[3]
    out = np.zeros_like(queries)
    for t, (slot, position) in enumerate(zip(row_slots, np.asarray(positions), strict=True)):
        for h in range(queries.shape[1]) if position >= 0 else ():
            k, v = cache[slot, : position + 1, 0, h // group], cache[slot, : position + 1, 1, h // group]
            scores = k @ queries[t, h] / math.sqrt(queries.shape[2])
            weights = np.exp(scores - scores.max())
            out[t, h] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [(1, 16, "float32"), (3, 64, "float32"), (3, 64, "bfloat16"), (8, 80, "bfloat16"), (1, 128, "float32")],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_float64(backend: Backend, group: int, head_dim: int, dtype: str) -> None:
    inputs = make_inputs(group=group, head_dim=head_dim, dtype=dtype, scalar_slot=head_dim == 16)
    actual = attend(*inputs, backend=backend)
    assert actual.dtype == jnp.float32 and actual.shape == inputs[0].shape
    expected = oracle(*inputs)
    error = np.abs(in_use(np.asarray(actual, np.float64) - expected)).max() / np.abs(expected).max()
    assert error < TOLERANCE[backend, dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_visible_position_is_its_value(backend: Backend) -> None:
    q, kv, slots, _ = make_inputs(group=3, head_dim=16)
    out = attend(q, kv, slots, jnp.zeros(len(POSITIONS), jnp.int32), backend=backend)
    expected = np.repeat(np.asarray(kv)[np.asarray(slots), 0, 1], 3, axis=1)
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_sequences(backend: Backend) -> None:
    """Of more splits than are added up at once, and than there are programs for."""
    capacity = SPLIT * (FIRST_COMBINED + COMBINED + 2)
    assert capacity > SPLIT * MAX_WORKERS
    rng = np.random.default_rng(0)
    ends = (FIRST_COMBINED, FIRST_COMBINED + 1, FIRST_COMBINED + COMBINED, MAX_WORKERS)
    positions = jnp.array([*(SPLIT * end - 1 for end in ends), capacity - 1], jnp.int32)
    q = jnp.asarray(rng.normal(0, 2, (len(positions), 2, 16)).astype(np.float32))
    kv = jnp.asarray(rng.normal(0, 1, (1, capacity, 2, 1, 16)).astype(np.float32))
    slots = jnp.zeros(len(positions), jnp.int32)
    whole = attend(q, kv, slots, positions, backend=backend)
    expected = oracle(q, kv, slots, positions)
    assert np.abs(np.asarray(whole, np.float64) - expected).max() < 1e-5 * np.abs(expected).max()
    # By as many programs as there are splits it is the same.
    shorter = attend(q[:2], kv[:, : SPLIT * (FIRST_COMBINED + 1)], slots[:2], positions[:2], backend=backend)
    np.testing.assert_array_equal(shorter, whole[:2])


@pytest.mark.parametrize("scale", [1e-4, 30.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_flat_and_peaked_scores(backend: Backend, scale: float) -> None:
    q, *rest = make_inputs(group=3, head_dim=16)
    actual, expected = attend(q * scale, *rest, backend=backend), oracle(q * scale, *rest)
    # Scores of some hundreds lose 1e-5 in float32 before the exponential.
    np.testing.assert_allclose(in_use(actual), in_use(expected), atol=2e-4 if scale > 1 else 1e-5)


# Bit by bit


@pytest.mark.parametrize(("backend", "dtype"), [(KERNELS, "bfloat16"), ("reference", "float32")])
class TestRowIndependence:
    """A row's result has the same bits whatever else there is."""

    def test_other_rows(self, backend: Backend, dtype: str) -> None:
        q, kv, slots, positions = make_inputs(group=3, head_dim=64, dtype=dtype)
        whole = np.asarray(attend(q, kv, slots, positions, backend=backend))
        other = make_inputs(group=3, head_dim=64, dtype=dtype, seed=1)
        for row in (1, 3, 5, 7):
            for their_position in (-1, 0, CAPACITY - 1):
                actual = attend(
                    other[0].at[row].set(q[row]),
                    other[1].at[slots[row]].set(kv[slots[row]]),
                    other[2].at[row].set(slots[row]),
                    jnp.full_like(positions, their_position).at[row].set(positions[row]),
                    backend=backend,
                )
                np.testing.assert_array_equal(actual[row], whole[row])

    def test_what_lies_beyond_a_row(self, backend: Backend, dtype: str) -> None:
        q, kv, slots, positions = make_inputs(group=3, head_dim=64, dtype=dtype)
        whole = np.asarray(attend(q, kv, slots, positions, backend=backend))
        for row in (1, 2, 4, 5):
            # What the same slot holds at later positions, and all other slots.
            changed = (
                jnp.full_like(kv, 1e30).at[slots[row], : POSITIONS[row] + 1].set(kv[slots[row], : POSITIONS[row] + 1])
            )
            np.testing.assert_array_equal(attend(q, changed, slots, positions, backend=backend)[row], whole[row])

    def test_a_larger_cache(self, backend: Backend, dtype: str) -> None:
        q, kv, slots, positions = make_inputs(group=3, head_dim=64, dtype=dtype)
        whole = in_use(attend(q, kv, slots, positions, backend=backend))
        wider = jnp.concatenate([kv, jnp.ones_like(kv)], axis=1)
        np.testing.assert_array_equal(in_use(attend(q, wider, slots, positions, backend=backend)), whole)
        more = jnp.concatenate([kv, jnp.ones_like(kv)], axis=0)
        np.testing.assert_array_equal(in_use(attend(q, more, slots, positions, backend=backend)), whole)

    @pytest.mark.parametrize("kind", ["one sequence", "slots"])
    def test_tiles(self, backend: Backend, dtype: str, kind: str) -> None:
        """A row of a chunk, or of a decode tile, is the same in a smaller one."""
        q, kv, _, positions = make_inputs(group=3, head_dim=64, dtype=dtype)
        slots = jnp.int32(2) if kind == "one sequence" else jnp.full(len(POSITIONS), 2, jnp.int32)
        whole = np.asarray(attend(q, kv, slots, positions, backend=backend))
        for rows in (slice(0, 4), slice(4, 8), slice(3, 4)):
            part = attend(q[rows], kv, slots if slots.ndim == 0 else slots[rows], positions[rows], backend=backend)
            # Of the reference they are two programs, which XLA may round in two ways; a model has tiles of one size.
            np.testing.assert_allclose(part, whole[rows], rtol=0, atol=1e-6 if backend == "reference" else 0)


@pytest.mark.parametrize("kind", ["one sequence", "slots"])
@pytest.mark.parametrize(("group", "k_padded"), [(32, 192), (128, 256)])
def test_an_operand_holds_the_result(kind: str, group: int, k_padded: int) -> None:
    """As a product takes it, of groups that are parts of a head or of several; zeros beyond the last head."""
    q, kv, slots, positions = make_inputs(group=3, head_dim=32, scalar_slot=kind == "one sequence")
    attended = attend(q, kv, slots, positions, backend=KERNELS).reshape(len(q), -1)
    spec = OperandSpec(group=group, k_padded=k_padded)
    operand = cached_attention(q, kv, slots, positions, operand=spec, backend=KERNELS)
    digits, scales = of_rows_in_use(operand)
    expected_digits, expected_scales = of_rows_in_use(make_operand(attended, spec))
    if not IS_COMPILED:
        np.testing.assert_array_equal(digits, expected_digits)
        np.testing.assert_array_equal(scales, expected_scales)
    # Compiled, a division may be off by its last bit, and so a step by one.
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)
    steps, expected_steps = (256 * each[:, 0].astype(int) + each[:, 1] for each in (digits, expected_digits))
    assert abs(steps - expected_steps).max() <= 1


def of_rows_in_use(operand: Operand) -> tuple[np.ndarray, np.ndarray]:
    """Digits int8 [R, P, K], and scales float32 [R, G]."""
    digits, scales = np.moveaxis(np.asarray(operand.digits), 1, 0), np.asarray(operand.scales).T
    return in_use(digits[: len(POSITIONS)]), in_use(scales[: len(POSITIONS)])


# Edges


def test_public_reference_is_the_reference_backend() -> None:
    inputs = make_inputs(group=1, head_dim=16)
    np.testing.assert_array_equal(cached_attention_reference(*inputs), cached_attention(*inputs, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_shapes_that_do_not_fit(backend: Backend) -> None:
    q, kv, slots, positions = make_inputs(group=3, head_dim=16)
    for inputs, message in (
        ((q[0], kv, slots, positions), r"q is float32\[6, 16\]; expected float32 \[T, H, Hd\]"),
        ((q.astype(jnp.bfloat16), kv, slots, positions), r"q is bfloat16"),
        ((q, kv[0], slots, positions), r"kv is float32\[512, 2, 2, 16\]; expected \[B, S, 2, KvH, Hd = 16\]"),
        ((q, kv[:, :, :1], slots, positions), r"kv is float32\[3, 512, 1, 2, 16\]"),
        ((q, kv[..., :8], slots, positions), r"kv is float32\[3, 512, 2, 2, 8\].*Hd = 16"),
        ((q[:, :5], kv, slots, positions), r"q has 5 heads and kv 2; expected a multiple"),
        ((q, kv[:, :500], slots, positions), r"kv holds 500 positions; expected a multiple of 128"),
        ((q, kv, slots[:3], positions), r"slots is \[3\], positions \[8\]; expected \[T = 8\]"),
        ((q, kv, slots[:1], positions), r"slots is \[1\]"),
        ((q, kv, slots, positions[:3]), r"positions \[3\]"),
        ((q, kv, slots, positions[0]), r"positions \[\]"),
        ((q, kv.astype(jnp.int8), slots, positions), r"kv is int8.*bfloat16 or float32"),
        ((q, kv, slots.astype(jnp.float32), positions), r"slots is float32.*int32"),
        ((q, kv, slots, positions.astype(jnp.int16)), r"positions int16.*int32"),
    ):
        with pytest.raises(ValueError, match=message):
            cached_attention(*inputs, backend=backend)


# Without a GPU


@needs_cuda_lowering
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lowers_for_cuda(dtype: str) -> None:
    inputs = make_inputs(group=3, head_dim=80, dtype=dtype)
    program = lower_for_cuda(partial(cached_attention, backend="triton"), *inputs)
    assert program.count("__gpu$xla.gpu.triton") == 2
    assert "attention_splits" in program and "attention_combine" in program
    inputs = make_inputs(group=3, head_dim=64, dtype=dtype, scalar_slot=True)
    program = lower_for_cuda(
        partial(cached_attention, operand=OperandSpec(group=128, k_padded=512), backend="triton"), *inputs
    )
    assert program.count("__gpu$xla.gpu.triton") == 2
    assert "attention_prefill" in program and "quantise_rows" in program
