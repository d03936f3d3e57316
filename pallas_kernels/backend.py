"""How a kernel is run: the one place that names a Pallas lowering, or jax_triton.

JAX changes which lowering `pallas_call` takes when no compiler parameters are given (Mosaic GPU in 0.10, Triton from
0.11 on), so they are always given here.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

# "triton": compiled for an NVIDIA GPU. "triton_chained": the same for a kernel that another of this package follows,
# on a GPU of compute capability 9.0 or more: that one is launched before this one has ended. "jax_triton": as "triton",
# but what is there in Triton's own language too, the Q8 product, by the Triton that is installed (extra `triton`).
# "interpret": the Pallas kernel, run by JAX on any device, slowly, for tests. "reference": plain jnp, for every device
# without these kernels.
Backend = Literal["triton", "triton_chained", "jax_triton", "interpret", "reference"]
COMPILED: tuple[Backend, ...] = ("triton", "triton_chained", "jax_triton")

# Of a kernel that lets the next one be launched early. Those of a prompt have more, and took 5 % longer if they did.
_MAX_CHAINED_PROGRAMS = 2047


def default_backend(device: jax.Device) -> Backend:
    """The backend that `device` runs best, whatever is done with the results."""
    return "triton" if device.platform in ("gpu", "cuda") else "reference"


def chained_backend(device: jax.Device) -> Backend:
    """The backend that `device` runs best for kernels whose results only kernels of this package take.

    The last of them is to be `unchained`.
    """
    backend = default_backend(device)
    major, _, _ = str(getattr(device, "compute_capability", "0")).partition(".")
    return "triton_chained" if backend == "triton" and major.isdigit() and int(major) >= 9 else backend


def unchained(backend: Backend) -> Backend:
    """The same for a kernel whose results anything may take."""
    return "triton" if backend == "triton_chained" else backend


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
    if backend == "triton_chained" and math.prod(grid) <= _MAX_CHAINED_PROGRAMS:
        kernel = functools.partial(_let_next_be_launched, kernel)
    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=tuple(grid),
        compiler_params=pltriton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=backend == "interpret",
        input_output_aliases=dict(input_output_aliases or {}),
        name=name,
    )


def _let_next_be_launched(kernel: Callable[..., None], *refs: Any) -> None:
    """The kernel, after it has allowed the next one to be launched: what that takes passes while this one computes.

    XLA launches kernels so that this may happen (programmatic dependent launch, PTX ISA: griddepcontrol), and has each
    wait, where it begins, until all before it have ended and their results are in memory; where XLA does not, the next
    one is launched when this one has ended, as ever. Kernels that XLA makes itself wait too, but may read through a
    cache that the wait does not clear, unless XLA knows what comes before them, which it does not here
    (openxla/xla#43894). So none of those may take the results. Copies may: they begin when all kernels have ended.
    """
    (zero,) = pltriton.elementwise_inline_asm(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;",
        args=[jnp.zeros((1,), jnp.int32)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    # Always so; what nothing depends on would be left out by the compiler.
    pl.when(zero.sum() == 0)(lambda: kernel(*refs))


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
