"""The tilings of the Q8 product that a sweep tries, and the kernel with any of them.

The one file of the benchmarks that knows which settings the kernel has, and how it is given them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels import q8_partial_sums
from vramjax.layout import MatrixSpec

_KERNEL = importlib.import_module("pallas_kernels.q8_matmul")  # whose function has the same name
_TRIED = {
    "block_columns": (64, 128),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5),
    "step_inputs": (128, 256),
    "num_programs": (132, 264, 384, 528, 792),
}


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Settings of the kernel. Example: `Tiling(block_columns=128, num_warps=8, num_stages=3, ...)`."""

    block_columns: int  # of a program
    num_warps: int  # of a program
    num_stages: int  # of the pipeline that loads
    step_inputs: int  # of one turn of the loop
    num_programs: int  # that there should be at least, by cutting K


def tilings(matrix: MatrixSpec, rows: int) -> list[Tiling]:
    """All that are to be tried for a product; of those that come to the same for it only one."""
    distinct: dict[Any, Tiling] = {}
    for values in itertools.product(*_TRIED.values()):
        tiling = Tiling(**dict(zip(_TRIED, values, strict=True)))
        if matrix.n_padded % tiling.block_columns == 0:
            with _applied(tiling):
                cut = _KERNEL._tiling(rows, matrix.n_padded, matrix.k_padded, matrix.group)
            distinct.setdefault((cut, tiling.block_columns, tiling.num_warps, tiling.num_stages), tiling)
    return list(distinct.values())


def partial_sums_with(tiling: Tiling) -> Callable[..., jax.Array]:
    """`q8_partial_sums` with these settings."""

    def call(*args: Any, **kwargs: Any) -> jax.Array:
        with _applied(tiling):
            return q8_partial_sums(*args, **kwargs)

    return call


@contextlib.contextmanager
def _applied(tiling: Tiling) -> Iterator[None]:
    """What the kernel reads when it is traced, which is in this thread."""
    names = {name: name.upper() for name in dataclasses.asdict(tiling)}
    before = {constant: getattr(_KERNEL, constant) for constant in names.values()}
    try:
        for name, constant in names.items():
            setattr(_KERNEL, constant, getattr(tiling, name))
        yield
    finally:
        for constant, value in before.items():
            setattr(_KERNEL, constant, value)
