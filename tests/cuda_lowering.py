"""Lowering for an NVIDIA GPU where there is none: whether JAX can still translate a kernel, not whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

needs_cuda_lowering = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="jax 0.10 lowers Pallas kernels for CUDA only where there is a GPU"
)


def lower_for_cuda(function: Callable[..., Any], *arguments: Any) -> str:
    """The program that `function` becomes for an H200, as text; of arrays only shapes and dtypes are looked at."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arguments)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
