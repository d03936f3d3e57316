"""Finds the best settings of the Q8 product on this GPU, and writes them into the table that the kernel looks in.

    python scripts/autotune.py
    python scripts/autotune.py --geometries=qwen3-8b --only=gate_up,down

Times the kernel with many settings at the shapes of models, for a tile of decode and for a chunk of a prompt, each
within a program, among calls of its own kind over other data (`chains.py`). What is chosen is the same for any number
of rows: the best for a tile, and of what is nearly as good for it the best for a chunk. Other shapes of the table stay.
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

NEARLY = 0.02  # times of a tile that differ by less of the shortest are alike

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
    for shape, rows in measured:
        for row in rows:
            print(line(row), flush=True)
        table[shape] = best(rows)
        path = write_table(device.device_kind, table)
        print(f"{shape}: {table[shape]}; written to {path}, after {time.perf_counter() - start:.0f} s", flush=True)


def sweeps(
    models: dict[str, Model], spec: EngineSpec, *, only: Sequence[str], repeats: int, distinct_bytes: int
) -> Iterator[tuple[str, list[Row]]]:
    """Each shape, as the table has it, with what was measured for a tile and for a chunk. Compiles everything first."""
    from chains import CompilerPool
    from kernel_cases import products
    from kernel_timing import Sweep, wait_and_tell

    from vramjax.progress import progress_bar

    start, by_shape = time.perf_counter(), {}
    with CompilerPool() as pool:
        for name, matrix, rows in products(models, [spec.tile_rows, spec.chunk_rows], only=only):
            sweep = Sweep(name, matrix, rows, pool, backend=spec.backend, distinct_bytes=distinct_bytes)
            by_shape.setdefault(f"{matrix.n_padded}x{matrix.k_padded}", []).append(sweep)
        wait_and_tell(pool, len(by_shape), since=start)
    with progress_bar("Timing", total=len(by_shape), unit="items") as advance:
        for shape, both in by_shape.items():
            yield shape, [sweep.measure(repeats=repeats) for sweep in both]
            advance(1)


def best(rows: Sequence[Row]) -> Q8Config:
    """The settings that are best for a tile; of what is nearly as good for it those best for a chunk, if there is one.

    Args:
      rows: of `Sweep.measure`, for a tile and for a chunk, or for a tile alone.
    """
    from pallas_kernels.tuning import Q8Config

    tile, *chunks = ({Q8Config(**result["config"]): result["us"] for result in row["results"]} for row in rows)
    lowest = min(tile.values())
    nearly = [config for config, us in tile.items() if us - lowest <= NEARLY * abs(lowest)]
    chunk = chunks[0] if chunks else {}
    # What cannot be compiled for a chunk cannot be chosen.
    possible = [config for config in nearly if config in chunk] if chunk else nearly
    return min(possible or nearly, key=lambda config: (chunk.get(config, 0.0), tile[config]))


if __name__ == "__main__":
    app.run(main)
