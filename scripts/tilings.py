"""The settings of the Q8 product that are worth a try for a shape. Times nothing."""

from __future__ import annotations

import itertools
from typing import Any

from pallas_kernels.q8_matmul import _tiling
from pallas_kernels.tuning import Q8Config
from vramjax.layout import MatrixSpec

_TRIED = {
    "block_columns": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "step_inputs": (128, 256),
    "num_programs": (132, 264, 384, 528, 792),
}


def configs(matrix: MatrixSpec) -> list[Q8Config]:
    """All that are to be tried for a matrix; of those that cut it up in the same way only one."""
    distinct: dict[Any, Q8Config] = {}
    for values in itertools.product(*_TRIED.values()):
        config = Q8Config(**dict(zip(_TRIED, values, strict=True)))
        if matrix.n_padded % config.block_columns == 0:
            cut = _tiling(1, matrix.n_padded, matrix.k_padded, matrix.group, config)
            distinct.setdefault((cut, config.num_warps, config.num_stages), config)
    return list(distinct.values())
