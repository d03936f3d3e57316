"""A check, before anything else runs on a GPU, that it multiplies right.

Wrong results from a compiler or a driver look like a bad model. Small Q8 products against float64 cost a second, and
find a device or a compiler that is wrong throughout: one for each form of the kernel that decoding may take.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

from pallas_kernels import OperandSpec, default_backend, make_operand, q8_partial_sums, total_rows
from pallas_kernels.tuning import DEFAULT_FEW, DEFAULT_MANY
from vramjax.errors import VramjaxError

TOLERANCE = 2e-4  # relative; activations in two digits leave about 3e-5

_PRODUCTS = (  # rows, and settings
    (16, DEFAULT_FEW),
    (16, dataclasses.replace(DEFAULT_FEW, joined=True)),
    (128, DEFAULT_MANY),
)
_N, _K, _GROUP = 256, 576, 128


@functools.lru_cache
def check_kernels(device: jax.Device) -> None:
    """Compares Q8 products on `device` with float64 on the host, once per process; does nothing on a CPU.

    Raises:
      VramjaxError: the device computes something else.
    """
    backend = default_backend(device)
    if backend == "reference":
        return
    rng = np.random.default_rng(0)
    spec = OperandSpec(k_padded=-(-_K // _GROUP) * _GROUP, group=_GROUP)
    values = rng.integers(-127, 128, (_N, spec.k_padded)).astype(np.int8)
    values[:, _K:] = 0
    scales = rng.uniform(0.5, 2.0, (spec.k_padded // _GROUP, _N)).astype(np.float32)
    dequantised = values.astype(np.float64) * np.repeat(scales.T, _GROUP, axis=1)
    for num_rows, config in _PRODUCTS:
        x = rng.standard_normal((num_rows, _K), dtype=np.float32)
        arrays = jax.device_put((x, values, scales), device)
        run = jax.jit(functools.partial(_product, spec=spec, num_rows=num_rows, config=config, backend=backend))
        expected = x.astype(np.float64) @ dequantised[:, :_K].T
        error = float(np.linalg.norm(np.asarray(run(*arrays), np.float64) - expected) / np.linalg.norm(expected))
        if not error < TOLERANCE:
            raise VramjaxError(
                f"{device.device_kind} computes a Q8 matrix product with a relative error of {error:.1e}; expected "
                f"less than {TOLERANCE:.0e}: update jax ({jax.__version__} is installed) or the driver"
            )


def _product(
    x: jax.Array, values: jax.Array, scales: jax.Array, *, spec: OperandSpec, num_rows: int, **settings: Any
) -> jax.Array:
    operand = make_operand(x, spec)
    sums = q8_partial_sums(operand, values, scales, num_rows=num_rows, group=spec.group, **settings)
    return total_rows(sums, num_rows)
