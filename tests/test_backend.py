"""Which way of running a kernel is taken, and what is said to a GPU for it."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering

from pallas_kernels import Backend, OperandSpec, chained_backend, default_backend, quantise_rows, unchained


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ({"platform": "cpu"}, "reference"),
        ({"platform": "tpu", "compute_capability": "9.0"}, "reference"),
        ({"platform": "gpu", "compute_capability": "8.9"}, "triton"),
        ({"platform": "gpu", "compute_capability": "9.0"}, "triton_chained"),
        ({"platform": "cuda", "compute_capability": "12.0"}, "triton_chained"),
        ({"platform": "gpu", "compute_capability": "gfx90a"}, "triton"),
        ({"platform": "gpu"}, "triton"),
    ],
)
def test_of_a_device(device: dict[str, Any], expected: Backend) -> None:
    """What is chained is so among kernels alone: by default, and at their end, it is not."""
    found: Any = SimpleNamespace(**device)
    assert chained_backend(found) == expected
    assert default_backend(found) == unchained(expected) == expected.removesuffix("_chained")


@needs_cuda_lowering
def test_only_newer_gpus_are_told_to_launch_the_next_kernel() -> None:
    """An older one's assembler does not know how; and kernels of many programs, as of a prompt, only lose by it."""

    def program(backend: Backend, rows: int) -> str:
        x, operand = jax.ShapeDtypeStruct((rows, 256), jnp.float32), OperandSpec(group=128, k_padded=256)
        return lower_for_cuda(functools.partial(quantise_rows, operand=operand, backend=backend), x)

    assert "griddepcontrol.launch_dependents" in program("triton_chained", 16)
    assert "griddepcontrol" not in program("triton", 16) + program("triton_chained", 4096)
