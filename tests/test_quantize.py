"""Q8 on the host: rounding, extremes, ragged groups."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.q8_kernel import COLUMN_MULTIPLE, MAX_GROUP
from vramjax.layout import MatrixSpec
from vramjax.quantize import GROUP_SIZES, Q8Matrix, dequantize, quantize

F32_MAX = float(np.finfo(np.float32).max)

groups = st.sampled_from(GROUP_SIZES)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def matrices(elements: st.SearchStrategy[float] = FINITE) -> st.SearchStrategy[np.ndarray]:
    return hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 300)),
        elements=elements,
        fill=st.sampled_from([0.0, 1.0, -3.5]),
    )


@settings(max_examples=150, deadline=None)
@given(matrices(), groups)
def test_error_is_at_most_half_a_step(weight: np.ndarray, group: int):
    q8 = quantize(weight, group)
    back = dequantize(q8)
    k = weight.shape[1]
    assert back.shape == weight.shape and back.dtype == np.float32
    assert np.isfinite(back).all()
    assert np.abs(q8.values.astype(int)).max() <= 127
    steps = np.repeat(q8.scales.T.astype(np.float64), group, axis=1)[:, :k]  # [N, K]
    # Half a step, plus the rounding of scale (relative 2^-24, or 2^-149 near zero) times 127.
    slack = 127 * np.maximum(steps * 2.0**-23, 2.0**-149)
    assert (np.abs(back.astype(np.float64) - weight.astype(np.float64)) <= steps / 2 + slack).all()


@settings(max_examples=100, deadline=None)
@given(matrices(), groups)
def test_rows_and_groups_do_not_touch_each_other(weight: np.ndarray, group: int):
    whole = quantize(weight, group)
    for row in range(len(weight)):
        for g, start in enumerate(range(0, weight.shape[1], group)):
            part = quantize(weight[row : row + 1, start : start + group], group)
            assert (part.values[0] == whole.values[row, start : start + group]).all()
            assert part.scales[0, 0] == whole.scales[g, row]


@settings(max_examples=60, deadline=None)
@given(matrices(st.floats(-4, 4, width=32)), groups)
def test_quantising_again_changes_nothing(weight: np.ndarray, group: int):
    once = quantize(weight, group)
    again = quantize(dequantize(once), group)
    normal = np.repeat(once.scales.T > 1e-30, group, axis=1)  # [N, Kpad]; a scale of a few bits is not stable
    assert (again.values == once.values)[normal].all()


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("largest", [F32_MAX, 1.0, 1e-30, 1e-40, 2.0**-149])
def test_extremes_of_both_signs_are_clipped_before_the_cast(group: int, largest: float):
    weight = np.zeros((2, group), np.float32)
    weight[0, :3] = [largest, -largest, largest / 2]
    q8 = quantize(weight, group)
    back = dequantize(q8)
    assert q8.values.min() >= -127  # a wrapped 128 would be -128
    assert np.isfinite(back).all() and (back[1] == 0).all()
    if largest > 1e-37:
        assert q8.values[0, :2].tolist() == [127, -127]
        np.testing.assert_allclose(back[0, :2], weight[0, :2], rtol=3e-7)
    else:
        assert np.abs(back - weight).max() < 1e-40


def test_zeros_have_scale_zero():
    q8 = quantize(np.zeros((3, 70), np.float32), 32)
    assert not q8.values.any() and not q8.scales.any()
    assert not dequantize(q8).any()


def test_huge_and_tiny_groups_of_one_row_keep_their_own_scale():
    weight = np.concatenate([np.full((1, 32), 3e38), np.full((1, 32), 1e-30), np.zeros((1, 32))], axis=1).astype("f4")
    np.testing.assert_allclose(dequantize(quantize(weight, 32)), weight, rtol=1e-6)


@pytest.mark.parametrize(
    ("k", "group", "num_groups"),
    [(576, 128, 5), (40, 32, 2), (20, 32, 1), (1, 128, 1), (128, 128, 1), (129, 128, 2)],
)
def test_ragged_tail_is_exact(k: int, group: int, num_groups: int):
    rng = np.random.default_rng(k)
    weight = rng.integers(-127, 128, (4, k)).astype(np.float32)
    weight[:, ::group] = 127  # so that every group has scale 1
    q8 = quantize(weight, group)
    assert q8.values.shape == (4, num_groups * group) and q8.scales.shape == (num_groups, 4)
    assert (q8.scales == 1).all()
    assert (q8.values[:, :k] == weight).all() and not q8.values[:, k:].any()
    assert (dequantize(q8) == weight).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(bad: float):
    weight = np.ones((2, 40), np.float32)
    weight[1, 39] = bad
    with pytest.raises(ValueError, match="NaN or an infinity"):
        quantize(weight, 32)


@pytest.mark.parametrize(("shape", "group"), [((4,), 32), ((0, 4), 32), ((4, 0), 32), ((2, 2, 2), 32), ((4, 4), 48)])
def test_wrong_arguments_are_refused(shape: tuple[int, ...], group: int):
    with pytest.raises(ValueError, match="expected"):
        quantize(np.ones(shape, np.float32), group)


def test_a_matrix_checks_its_own_shapes():
    with pytest.raises(AssertionError):
        Q8Matrix(values=np.zeros((2, 64), np.int8), scales=np.zeros((1, 2), np.float32), k=64, group=32)


def test_what_the_kernel_takes() -> None:
    """Rows are padded to no less, and no more, than it needs; and no group is too large for it."""
    assert [MatrixSpec(n=n, k=128, group=128).n_padded for n in (1, COLUMN_MULTIPLE)] == [COLUMN_MULTIPLE] * 2
    assert max(GROUP_SIZES) <= MAX_GROUP
