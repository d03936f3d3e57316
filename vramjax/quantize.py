"""Float weights to Q8 and back, on the host.

Q8 here is symmetric int8 with one float32 scale per row and per group of consecutive inputs (K):
`w[n, k] ~ values[n, k] * scales[k // group, n]`. Scales are stored `[G, N]` so that a kernel walking along K
reads the scales of its block of rows as one contiguous run. Knows nothing of models, files or devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GROUP_SIZES = (32, 64, 128)
ROW_MULTIPLE = 64  # rows are padded to this, the `COLUMN_MULTIPLE` of the kernel: which needs JAX to be imported

_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, kw_only=True)
class Q8Matrix:
    """A quantised weight matrix of N outputs and K inputs; K is padded with zeros to whole groups.

    Example: 960 x 576 at group 128 has values [960, 640] and scales [5, 960]; the last group holds 64 inputs.
    """

    values: np.ndarray  # int8 [N, G * group]
    scales: np.ndarray  # float32 [G, N]
    k: int  # inputs before padding
    group: int

    def __post_init__(self) -> None:
        rows, k_padded = self.values.shape
        num_groups = -(-self.k // self.group)
        assert self.values.dtype == np.int8 and self.scales.dtype == np.float32
        assert k_padded == num_groups * self.group, (self.values.shape, self.k, self.group)
        assert self.scales.shape == (num_groups, rows), (self.scales.shape, self.values.shape)

    @property
    def rows(self) -> int:
        return self.values.shape[0]


def quantize(weight: np.ndarray, group: int = 128) -> Q8Matrix:
    """Rounds a float matrix [N, K] to Q8: scale = max|w| / 127 per row and group, values = round(w / scale).

    A group of zeros has scale 0. Values never reach -128, and no dequantised value overflows float32.

    Raises:
      ValueError: `weight` is not a matrix, has a NaN or an infinity, or `group` is not one of GROUP_SIZES.
    """
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(f"weight has shape {weight.shape}; expected a matrix [N, K] that is not empty")
    if group not in GROUP_SIZES:
        raise ValueError(f"group is {group}; expected one of {GROUP_SIZES}")
    n, k = weight.shape
    num_groups = -(-k // group)
    padded = np.zeros((n, num_groups * group), np.float32)
    padded[:, :k] = weight
    grouped = padded.reshape(n, num_groups, group)  # [N, G, group]
    largest = np.abs(grouped).max(axis=2)  # [N, G]
    if not np.isfinite(largest).all():
        raise ValueError("weight has a NaN or an infinity; expected finite numbers")

    # 127 * scale may round past the float32 maximum; one step down keeps it finite. A scale below the least
    # float32 becomes 0 and its group with it, which is off by less than 1e-42.
    scales = (largest.astype(np.float64) / 127.0).astype(np.float32)  # [N, G]
    scales = np.where(scales.astype(np.float64) * 127.0 > _F32_MAX, np.nextafter(scales, np.float32(0)), scales)
    divisors = np.where(scales > 0, scales, np.float32(np.inf))[:, :, None]
    # Clipped before the cast: numpy casts wrap (128 -> -128).
    values = np.clip(np.rint(grouped / divisors), -127, 127).astype(np.int8)
    return Q8Matrix(
        values=values.reshape(n, num_groups * group), scales=np.ascontiguousarray(scales.T), k=k, group=group
    )


def dequantize(matrix: Q8Matrix) -> np.ndarray:
    """The float32 matrix [N, K] that a Q8 matrix stands for: what all numerics are compared with."""
    n = matrix.rows
    grouped = matrix.values.reshape(n, -1, matrix.group).astype(np.float32)  # [N, G, group]
    return (grouped * matrix.scales.T[:, :, None]).reshape(n, -1)[:, : matrix.k]
