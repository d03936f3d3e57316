"""The settings of the Q8 product that are worth a try for a shape, in two rounds. Times nothing."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from pallas_kernels.q8_kernel import _tiling
from pallas_kernels.tuning import MOST_FEW, Q8Config
from vramjax.layout import MatrixSpec

# How a product is cut up; 384 programs are three for each multiprocessor of an H200, or a little less.
_CUTS_OF_FEW = {"block_columns": (64, 128), "num_programs": (132, 264, 384, 396, 528), "joined": (False, True)}
_CUTS_OF_MANY = {"block_columns": (64, 128), "block_rows": (64, 128), "num_warps": (4, 8), "num_programs": (1, 264)}
# How a program of it runs: of few rows it waits for memory, of many it may not have registers enough.
_RUNS_OF_FEW = {"num_warps": (4, 8), "num_stages": (3, 4, 5)}
_RUNS_OF_MANY = {"num_warps": (4, 8), "num_stages": (2, 3, 4)}


def cuts(matrix: MatrixSpec, num_rows: int, *, now: Q8Config) -> list[Q8Config]:
    """The first round for a matrix and so many rows: ways to cut it up, after the settings that it has now."""
    varied = _CUTS_OF_FEW if num_rows <= MOST_FEW else _CUTS_OF_MANY
    return _distinct(matrix, num_rows, [now, *_varied(Q8Config(), varied)])


def runs(matrix: MatrixSpec, num_rows: int, *, best: Sequence[Q8Config], tried: Sequence[Q8Config]) -> list[Q8Config]:
    """The second round: the best of the first with other numbers of warps and stages, less what was tried."""
    varied = _RUNS_OF_FEW if num_rows <= MOST_FEW else _RUNS_OF_MANY
    others = (config for each in best for config in _varied(each, varied))
    return _distinct(matrix, num_rows, [*tried, *others])[len(tried) :]


def _varied(config: Q8Config, varied: dict[str, tuple[Any, ...]]) -> Iterable[Q8Config]:
    for values in itertools.product(*varied.values()):
        yield dataclasses.replace(config, **dict(zip(varied, values, strict=True)))


def _distinct(matrix: MatrixSpec, num_rows: int, configs: Iterable[Q8Config]) -> list[Q8Config]:
    """Those that the matrix can have; of those that come to the same only the first."""
    distinct: dict[Any, Q8Config] = {}
    for config in configs:
        if matrix.n_padded % config.block_columns == 0:
            cut = _tiling(num_rows, matrix.n_padded, matrix.k_padded, matrix.group, config)
            distinct.setdefault((cut, config.num_warps, config.num_stages, config.joined), config)
    return list(distinct.values())
