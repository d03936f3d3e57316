"""How tests run the kernels: compiled where there is a GPU, else interpreted."""

from __future__ import annotations

import jax

from pallas_kernels import Backend

KERNELS: Backend = "triton" if jax.default_backend() == "gpu" else "interpret"
IS_COMPILED = KERNELS == "triton"
