"""The settings of the Q8 product that are worth a try for a shape. Times nothing."""

from __future__ import annotations

import itertools
from typing import Any

from pallas_kernels.q8_matmul import _tiling
from pallas_kernels.tuning import MOST_FEW, Q8Config
from vramjax.layout import MatrixSpec

_FEW = {
    "block_columns": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (3, 5),
    "num_programs": (132, 264, 528),
    "joined": (False, True),
}
_MANY = {
    "block_columns": (64, 128),
    "block_rows": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (3, 4),
    "num_programs": (1, 264),
}


def configs(matrix: MatrixSpec, num_rows: int) -> list[Q8Config]:
    """All that are to be tried for a matrix and so many rows; of those that come to the same only one."""
    distinct: dict[Any, Q8Config] = {}
    tried: dict[str, tuple[Any, ...]] = _FEW if num_rows <= MOST_FEW else _MANY
    for values in itertools.product(*tried.values()):
        config = Q8Config(**dict(zip(tried, values, strict=True)))
        if matrix.n_padded % config.block_columns == 0:
            cut = _tiling(num_rows, matrix.n_padded, matrix.k_padded, matrix.group, config)
            distinct.setdefault((cut, config.num_warps, config.num_stages, config.joined), config)
    return list(distinct.values())
