"""How a kernel is run: the one place that names a Pallas lowering.

JAX changes which lowering `pallas_call` takes when no compiler parameters are given (Mosaic GPU in 0.10, Triton from
0.11 on), so they are always given here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

# "triton": compiled for an NVIDIA GPU. "interpret": the same kernel, run by JAX on any device, slowly, for tests.
# "reference": plain jnp, for every device without these kernels.
Backend = Literal["triton", "interpret", "reference"]


def default_backend(device: jax.Device) -> Backend:
    """The backend that `device` runs best."""
    return "triton" if device.platform in ("gpu", "cuda") else "reference"


def kernel_call(
    kernel: Callable[..., None],
    *,
    out_shape: Any,
    grid: Sequence[int],
    backend: Backend,
    num_warps: int,
    num_stages: int,
    name: str,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """`pallas_call` over whole arrays: each program of `grid` sees all of every array and picks what is its own.

    What calls this is a function of its own to `jax.jit`: traced and translated once for a program that has it for
    each of many layers.

    `input_output_aliases` gives inputs, by their place, whose memory is that of an output.
    """
    assert backend != "reference", "the reference is no kernel"
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=tuple(grid),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=backend == "interpret",
        input_output_aliases=dict(input_output_aliases or {}),
        name=name,
    )
