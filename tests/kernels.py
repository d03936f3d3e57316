"""How tests run the kernels: compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import importlib.util

import jax
import pytest

from pallas_kernels import Backend

IS_COMPILED = jax.default_backend() == "gpu"
KERNELS: Backend = "triton" if IS_COMPILED else "interpret"

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_EXTRA = HAS_TRITON and importlib.util.find_spec("jax_triton") is not None
needs_gpu_and_extra = pytest.mark.skipif(
    not (IS_COMPILED and HAS_EXTRA), reason="needs an NVIDIA GPU and vramjax[triton]"
)
JAX_TRITON = pytest.param("jax_triton", marks=(pytest.mark.gpu, needs_gpu_and_extra))
