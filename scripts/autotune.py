"""Finds the best settings of the Q8 product on this GPU, and writes them into the table that the kernel looks in.

    python scripts/autotune.py
    python scripts/autotune.py --geometries=qwen3-8b --only=gate_up,down

Times the kernel with many settings at the shapes of models, for a tile of decode and for a chunk of a prompt, each
within a program, among calls of its own kind over other data (`chains.py`). To that comes what it takes the next kernel
to add the parts of the product up. Other shapes of the table stay.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from kernel_cases import Model

    from pallas_kernels.tuning import Q8Config
    from vramjax.decode.spec import EngineSpec

_GEOMETRIES = flags.DEFINE_list(
    "geometries", ["qwen3-vl-2b", "qwen3-8b", "qwen3-32b", "llama3-70b"], "models whose shapes are taken, by name"
)
_ONLY = flags.DEFINE_list("only", [], "only shapes with one of these in their names, such as gate_up,down")
_REPEATS = flags.DEFINE_integer("repeats", 10, "times that everything is run; the shortest counts", lower_bound=1)
_DISTINCT_MIB = flags.DEFINE_integer("distinct_mib", 192, "data of a chain of calls, more than a cache holds")

ADDED_BYTES_PER_US = 1.3e6  # of partial sums, by a kernel that takes them: SwiGLU of an 8B model took so long

Row = dict[str, Any]


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()

    import jax
    from kernel_cases import models_of
    from kernel_report import line

    from pallas_kernels.tuning import read_table, write_table
    from vramjax.planning import engine_spec

    device = jax.devices()[0]
    models = models_of(_GEOMETRIES.value)
    spec = engine_spec(*next(iter(models.values())), context=None, device=device)
    if spec.backend == "reference":
        raise app.UsageError(f"this is a {device.device_kind}; expected a GPU, which is what the kernel runs on")
    table = read_table(device.device_kind)
    measured = sweeps(models, spec, only=_ONLY.value, repeats=_REPEATS.value, distinct_bytes=_DISTINCT_MIB.value << 20)
    for key, row in measured:
        print(line(row), flush=True)
        table[key] = best(row)
        path = write_table(device.device_kind, table)
        print(f"{key}: {table[key]}; written to {path}, after {time.perf_counter() - start:.0f} s", flush=True)


def sweeps(
    models: dict[str, Model], spec: EngineSpec, *, only: Sequence[str], repeats: int, distinct_bytes: int
) -> Iterator[tuple[str, Row]]:
    """Each key of the table, with what was measured for it. Compiles everything first."""
    from chains import CompilerPool
    from kernel_cases import products
    from kernel_timing import Sweep, wait_and_tell

    from pallas_kernels.tuning import table_key
    from vramjax.progress import progress_bar

    start, by_key = time.perf_counter(), {}
    with CompilerPool() as pool:
        for name, matrix, rows in products(models, [spec.tile_rows, spec.chunk_rows], only=only):
            key = table_key(matrix.n_padded, matrix.k_padded, matrix.group, rows)
            assert key not in by_key, key
            by_key[key] = Sweep(name, matrix, rows, pool, backend=spec.backend, distinct_bytes=distinct_bytes)
        wait_and_tell(pool, len(by_key), since=start)
    with progress_bar("Timing", total=len(by_key), unit="items") as advance:
        for key, sweep in by_key.items():
            yield key, sweep.measure(repeats=repeats)
            advance(1)


def best(row: Row) -> Q8Config:
    """The settings that are best, of a row of `Sweep.measure`."""
    from pallas_kernels.tuning import Q8Config

    chosen = min(row["results"], key=lambda result: result["us"] + result["partial_bytes"] / ADDED_BYTES_PER_US)
    return Q8Config(**chosen["config"])


if __name__ == "__main__":
    app.run(main)
