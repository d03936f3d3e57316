"""The Q8 product in Triton's own language beside the Pallas kernel: its results, and what becomes of it for a GPU.

Without a GPU Triton's interpreter runs it, and Triton's compiler, which needs none, compiles it for a Hopper GPU. What
is skipped says what it needs; `test_q8_matmul.py` has more for a GPU.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import lower_for_cuda, needs_cuda_lowering
from kernels import HAS_EXTRA, HAS_TRITON, needs_gpu_and_extra
from own_process import run_python
from triton_interpreter import stand_in

from pallas_kernels import Operand, OperandSpec, q8_partial_sums
from pallas_kernels.operand import make_operand
from pallas_kernels.tuning import Q8Config

needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="needs triton, which vramjax[triton] brings")

CASES = {
    "digits apart": (3, 1024, 128, 64, 2, Q8Config()),
    "digits joined": (3, 1024, 128, 64, 2, Q8Config(joined=True)),
    "splits, the last of them shorter": (16, 1408, 64, 128, 2, Q8Config(joined=True, num_programs=5)),
    "several groups a step": (2, 1024, 128, 32, 2, Q8Config(block_columns=128, step_inputs=256)),
    "two tiles of rows": (70, 576, 64, 128, 2, Q8Config(joined=True, num_programs=1)),
    "one digit": (70, 576, 64, 128, 1, Q8Config(joined=True)),
    "small tiles of many rows": (130, 256, 64, 32, 2, Q8Config(block_rows=32, num_programs=1)),
}

SETTINGS: dict[str, Any] = {"group": 128, "scales_offset": 7, "backend": "jax_triton"}


def results(backend: Any, rows: int, k: int, n: int, group: int, num_digits: int, config: Q8Config) -> np.ndarray:
    """The partial sums [S, T, N] of a product whose scales are inside a longer array."""
    rng = np.random.default_rng(0)
    num_groups = -(-k // group)
    x = jnp.asarray(rng.standard_normal((rows, k), np.float32))
    operand = make_operand(x, OperandSpec(k_padded=num_groups * group, group=group, num_digits=num_digits))
    values = rng.integers(-127, 128, (n, num_groups * group)).astype(np.int8)
    scales = np.full(num_groups * n + 42, np.nan, np.float32)
    scales[37:-5] = rng.uniform(0.001, 0.01, num_groups * n)
    settings: dict[str, Any] = {"num_rows": rows, "group": group, "scales_offset": 37, "config": config}
    return np.asarray(q8_partial_sums(operand, values, scales, backend=backend, **settings))[:, :rows]


@needs_triton
def test_interpreted_agrees_with_pallas() -> None:
    """Within what float32 rounds: where a product is added with one rounding or two is a compiler's choice."""
    code = """
        from triton_interpreter import interpret_triton
        interpret_triton()
        from test_q8_triton import CASES, results
        for name, case in CASES.items():
            actual, expected = results("jax_triton", *case), results("interpret", *case)
            largest = abs(actual - expected).max() / abs(expected).max()  # a NaN is less than nothing
            print(name if largest < 5e-7 else (name, largest))
    """
    printed = run_python(code, TRITON_INTERPRET="1", JAX_PLATFORMS="cpu")
    assert printed.splitlines() == list(CASES)


@pytest.mark.gpu
@needs_gpu_and_extra
@pytest.mark.parametrize("name", CASES)
def test_compiled_agrees_with_pallas(name: str) -> None:
    actual, expected = (results(backend, *CASES[name]) for backend in ("jax_triton", "triton"))
    assert abs(actual - expected).max() < 5e-7 * abs(expected).max()


@needs_triton
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("rows", [16, 256])
def test_multiplies_int8_on_hopper_tensor_cores(monkeypatch: pytest.MonkeyPatch, rows: int, joined: bool) -> None:
    from triton import compile as compile_kernel  # pyright: ignore[reportMissingImports]
    from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]
    from triton.compiler import ASTSource  # pyright: ignore[reportMissingImports]

    call = _launch(monkeypatch, rows=rows, joined=joined)
    kernel, options = call.pop("kernel"), {name: call.pop(name) for name in ("num_warps", "num_stages")}
    pointers = dict(zip(kernel.arg_names, ["*i8", "*fp32", "*i8", "*fp32", "*fp32"], strict=False))
    source = ASTSource(
        fn=kernel,
        signature=pointers | dict.fromkeys(call, "constexpr"),
        constexprs=call,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    compiled = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    products = re.findall(r"\S*mma\S*s32\S*", compiled.asm["ptx"])
    assert products and all(re.fullmatch(r"wgmma\.mma_async\S*\.s32\.s8\.s8", product) for product in products)
    assert "cp.async" in compiled.asm["ptx"]  # it loads ahead
    assert compiled.metadata.shared < 227 << 10  # what a program may have


@needs_cuda_lowering
@pytest.mark.skipif(not HAS_EXTRA, reason="needs vramjax[triton]")
def test_lowers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    library = importlib.import_module("jax_triton.triton_lib").triton_kernel_call_lib
    if library is None:
        pytest.skip("needs JAX's CUDA plugin")
    monkeypatch.setattr(library, "get_compute_capability", lambda _: 90)  # it would ask the GPU
    text = lower_for_cuda(lambda *a: q8_partial_sums(*a, num_rows=16, **SETTINGS), *_shapes(rows=16))
    assert text.count("triton_kernel_call") == 1


def _shapes(rows: int) -> tuple[Operand, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """The arrays of a product with a matrix [6144, 4096]."""
    operand = OperandSpec(k_padded=4096, group=128).shape(rows)
    return operand, jax.ShapeDtypeStruct((6144, 4096), jnp.int8), jax.ShapeDtypeStruct((32 * 6144 + 7,), jnp.float32)


def _launch(monkeypatch: pytest.MonkeyPatch, *, rows: int, joined: bool) -> dict[str, Any]:
    """With what `triton_call` is called: the kernel, its constants and options. Of jax_triton nothing is there."""
    calls: list[dict[str, Any]] = []

    def triton_call(*_: jax.Array, out_shape: jax.ShapeDtypeStruct, grid: Any, name: str, **call: Any) -> jax.Array:
        calls.append(call)
        return jnp.zeros(out_shape.shape, out_shape.dtype)

    monkeypatch.setitem(sys.modules, "jax_triton", stand_in(triton_call))
    trace = inspect.unwrap(q8_partial_sums)  # or `jax.jit` would remember what was traced
    jax.eval_shape(lambda *a: trace(*a, num_rows=rows, config=Q8Config(joined=joined), **SETTINGS), *_shapes(rows))
    (call,) = calls
    return call
