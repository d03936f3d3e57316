"""Stand-ins for jax_triton: one that runs Triton's kernels in Triton's interpreter, without a GPU, slowly.

That takes a process of its own, in which TRITON_INTERPRET=1 is set before Triton is imported.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_ONE_AT_A_TIME = threading.Lock()  # the interpreter replaces parts of Triton as long as a kernel runs


def stand_in(triton_call: Callable[..., jax.Array]) -> types.ModuleType:
    """A jax_triton with another `triton_call`."""
    module: Any = importlib.util.module_from_spec(importlib.machinery.ModuleSpec("jax_triton", None))
    module.__version_info__ = (0, 3, 1)
    module.triton_call = triton_call
    return module


def interpret_triton() -> None:
    """From now on jax_triton interprets."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    sys.modules["jax_triton"] = stand_in(_interpret)

    # Triton 3.6 converts arrays of one element, which NumPy 2.5 refuses.
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor


def _interpret(
    *arrays: jax.Array,
    kernel: Any,
    out_shape: jax.ShapeDtypeStruct,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    name: str,
    **constants: int,
) -> jax.Array:
    def run(*arguments: Any) -> np.ndarray:
        out = np.full(out_shape.shape, np.nan, out_shape.dtype)
        with _ONE_AT_A_TIME:
            kernel[grid](*[_Tensor(np.asarray(a)) for a in arguments], _Tensor(out), **constants)
        return out

    return jax.pure_callback(run, out_shape, *arrays)


class _Tensor:
    """What the interpreter asks of a tensor of PyTorch, over an array of NumPy."""

    def __init__(self, array: np.ndarray) -> None:
        assert array.flags.c_contiguous
        self._array = array
        self.dtype = array.dtype

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def untyped_storage(self) -> _Tensor:
        return self

    def cpu(self) -> _Tensor:
        return self

    def new_empty(self, *_: Any, **__: Any) -> _Tensor:
        return _Tensor(self._array)

    def set_(self, *_: Any) -> None:
        """An empty one has the memory of this one from the start."""

    def copy_(self, *_: Any) -> None:
        """Back to where it never left."""

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self._array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self._array.itemsize for n in self._array.strides)
