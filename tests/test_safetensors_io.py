"""Safetensors files mean the same here and in the safetensors library, whoever wrote them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file, save_file

from vramjax.checkpoint.safetensors_io import read_float32, read_header, write_safetensors
from vramjax.checkpoint.weight_file import WeightFile

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5)
NAMES = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(
    lambda name: name != "__metadata__"
)
any_arrays = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def arrays_of(*dtypes: type) -> st.SearchStrategy[dict[str, np.ndarray]]:
    one = st.sampled_from(dtypes).flatmap(lambda dtype: hnp.arrays(dtype, SHAPES))
    return st.dictionaries(NAMES, one, max_size=4)


@any_arrays
@given(arrays=arrays_of(np.float32, np.int8))
def test_the_library_reads_what_is_written_here(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    path = tmp_path / "ours.safetensors"
    path.unlink(missing_ok=True)
    written = write_safetensors(path, {n: (a.shape, a.dtype) for n, a in arrays.items()}, arrays.items())
    assert written.num_bytes == path.stat().st_size
    assert_equal(load_file(path), arrays)


@any_arrays
@given(arrays=arrays_of(np.float32, np.int8))
def test_what_the_library_writes_is_read_here(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    path = tmp_path / "theirs.safetensors"
    save_file(arrays, path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert_equal(WeightFile(path, sha256, {n: (a.shape, a.dtype) for n, a in arrays.items()}).load(), arrays)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_floats_that_the_library_writes(tmp_path: Path, dtype: type) -> None:
    """All 16-bit patterns, infinities and NaNs among them."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    values = (bits.astype(np.uint32) << np.uint32(16)).view(dtype) if dtype is np.float32 else bits.view(dtype)
    save_file({"before": np.ones(3, np.int8), "w": values.reshape(256, 256)}, tmp_path / "f.safetensors")
    read = read_float32(tmp_path / "f.safetensors", read_header(tmp_path / "f.safetensors")["w"])
    np.testing.assert_array_equal(read, values.reshape(256, 256).astype(np.float32))


def assert_equal(read: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert read.keys() == expected.keys()
    for name, array in expected.items():
        assert (read[name].shape, read[name].dtype) == (array.shape, array.dtype)
        assert read[name].tobytes() == array.tobytes()
