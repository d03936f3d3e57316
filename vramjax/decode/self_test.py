"""A check, before anything else runs on a GPU, that it multiplies right.

Wrong results from a compiler or a driver look like a bad model. One small Q8 product against the reference costs a
fraction of a second, and finds a device or a compiler that is wrong throughout.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import default_backend, q8_matmul
from vramjax.errors import VramjaxError

TOLERANCE = 1e-3  # relative; activations in two digits leave about 3e-5


@functools.lru_cache
def check_kernels(device: jax.Device) -> None:
    """Compares one Q8 product on `device` with float64 on the host, once per process; does nothing on a CPU.

    Raises:
      VramjaxError: the device computes something else.
    """
    if default_backend(device) == "reference":
        return
    rows, n, k, group = 16, 256, 576, 128
    rng = np.random.default_rng(0)
    k_padded = -(-k // group) * group
    x = rng.standard_normal((rows, k), dtype=np.float32)
    values = rng.integers(-127, 128, (n, k_padded)).astype(np.int8)
    values[:, k:] = 0
    scales = rng.uniform(0.5, 2.0, (k_padded // group, n)).astype(np.float32)
    run = jax.jit(functools.partial(q8_matmul, group=group, backend=default_backend(device)))
    actual = np.asarray(run(*(jnp.asarray(array, device=device) for array in (x, values, scales))), np.float64)
    dequantised = values.astype(np.float64) * np.repeat(scales.T, group, axis=1)
    expected = x.astype(np.float64) @ dequantised[:, :k].T
    error = float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
    if not error < TOLERANCE:
        raise VramjaxError(
            f"{device.device_kind} computes a Q8 matrix product with a relative error of {error:.1e}; expected less "
            f"than {TOLERANCE:.0e}: update jax ({jax.__version__} is installed) or the driver"
        )
