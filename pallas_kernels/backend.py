"""How a kernel is run: the one place that names a Pallas lowering, or jax_triton.

JAX changes which lowering `pallas_call` takes when no compiler parameters are given (Mosaic GPU in 0.10, Triton from
0.11 on), so they are always given here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

# "triton": compiled for an NVIDIA GPU. "jax_triton": the same, but what is there in Triton's own language too, the Q8
# product, by the Triton that is installed (extra `triton`). "interpret": the Pallas kernel, run by JAX on any device,
# slowly, for tests. "reference": plain jnp, for every device without these kernels.
Backend = Literal["triton", "jax_triton", "interpret", "reference"]
COMPILED: tuple[Backend, ...] = ("triton", "jax_triton")


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

    Under "jax_triton" a Pallas kernel runs as under "triton". `input_output_aliases` gives inputs, by their place,
    whose memory is that of an output.
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


def triton_call(
    kernel: Any,
    *,
    out_shape: jax.ShapeDtypeStruct,
    grid: Sequence[int],
    num_warps: int,
    num_stages: int,
    name: str,
    **constants: int,
) -> Callable[..., jax.Array]:
    """`kernel_call` for a kernel in Triton's own language, under "jax_triton".

    The kernel takes pointers to all arrays, the last of them its result, then `constants` as `constexpr`.

    Raises:
      ImportError: the extra `triton` is not installed.
    """
    with triton_extra():
        import jax_triton  # pyright: ignore[reportMissingImports]
    out = "out_type" if jax_triton.__version_info__ >= (0, 4) else "out_shape"
    return functools.partial(
        jax_triton.triton_call,
        kernel=kernel,
        **{out: out_shape},
        grid=tuple(grid),
        num_warps=num_warps,
        num_stages=num_stages,
        name=name,
        **constants,
    )


@contextlib.contextmanager
def triton_extra() -> Iterator[None]:
    """Around imports of what only "jax_triton" needs: says what to install where they fail."""
    try:
        yield
    except ImportError as error:
        raise ImportError(
            f'backend is "jax_triton", which cannot be loaded ({str(error).splitlines()[0]}); expected the packages '
            'jax-triton and triton, and JAX for NVIDIA GPUs: pip install "vramjax[triton]"'
        ) from error
