"""Finds the best settings of the Q8 product on this GPU, and writes them into the table that the kernel looks in.

    python scripts/autotune.py
    python scripts/autotune.py --geometries=qwen3-8b --only=gate_up,down

Goes through the matrices of a layer of each model, for a tile of decode with one row in use, and for the longest block
of a prompt. Of each it tries about thirty settings in a program of whole layers, where all other products have the best
settings so far, and takes the time of a layer from the profiler (`layer_timing.py`). Settings that a shape has are only
replaced by those with which a layer is faster by more than 0.5 %. The table is written after each shape, so that what
was found stays when this is interrupted.

Other shapes of the table stay as they are; so does the output projection, which is in no layer.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from absl import app, flags, logging

if TYPE_CHECKING:
    from layer_timing import LayerTimer

    from pallas_kernels.tuning import Q8Config
    from vramjax.decode.spec import EngineSpec
    from vramjax.layout import MatrixSpec
    from vramjax.model.layer import Weights

_GEOMETRIES = flags.DEFINE_list(
    "geometries", ["qwen3-vl-2b", "qwen3-8b", "qwen3-32b", "llama3-70b"], "models whose shapes are taken, by name"
)
_ONLY = flags.DEFINE_list("only", [], "only shapes with one of these in their names, such as gate_up,down")

MIN_GAIN = 0.005  # of the time of a layer: what is less may be noise
_NUM_REFINED = 2  # of the first round, that others are tried around in the second
_NUM_TOLD = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A product whose settings are looked for."""

    model: str
    name: str  # of the matrix
    matrix: MatrixSpec
    num_rows: int

    @property
    def key(self) -> str:
        """Under which the table has it."""
        from pallas_kernels.tuning import table_key

        return table_key(self.matrix.n_padded, self.matrix.k_padded, self.matrix.group, self.num_rows)


# A shape, the table that is in force, settings of the shape -> microseconds of a layer, of those that run.
TimeSettings = Callable[[Shape, "Mapping[str, Q8Config]", "Sequence[Q8Config]"], "dict[Q8Config, float]"]


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()

    import jax
    from kernel_cases import models_of

    from pallas_kernels.tuning import read_table, write_table
    from vramjax.planning import engine_spec

    device = jax.devices()[0]
    models = models_of(_GEOMETRIES.value)
    specs = {name: engine_spec(*model, context=None, device=device) for name, model in models.items()}
    if any(spec.backend == "reference" for spec in specs.values()):
        raise app.UsageError(f"this is a {device.device_kind}; expected a GPU, which is what the kernel runs on")
    shapes = shapes_of(specs, _ONLY.value)
    table = read_table(device.device_kind)
    for i, text in enumerate(tune(shapes, table, in_layers(specs))):
        path = write_table(device.device_kind, table)
        print(f"{text} [{i + 1} of {len(shapes)}, {time.perf_counter() - start:.0f} s]", flush=True)
        if i + 1 == len(shapes):
            print(f"written to {path}")


def shapes_of(specs: Mapping[str, EngineSpec], only: Sequence[str]) -> list[Shape]:
    """Each different product of a layer of these models that is chosen by name, with few rows and with many."""
    from kernel_cases import is_chosen

    from vramjax.planning import LONG_BLOCKS

    distinct: dict[str, Shape] = {}
    for model, spec in specs.items():
        for num_rows in (spec.tile_rows, spec.chunk_rows * LONG_BLOCKS[0]):
            for name, matrix in spec.layout:
                shape = Shape(model=model, name=name, matrix=matrix, num_rows=num_rows)
                if is_chosen(f"{model} {name}", only):
                    distinct.setdefault(shape.key, shape)
    return list(distinct.values())


def in_layers(specs: Mapping[str, EngineSpec]) -> TimeSettings:
    """Times settings in layers of the model of the shape; holds those of one model on the device."""
    from layer_timing import LayerTimer, random_layers

    @functools.lru_cache(maxsize=1)
    def layers(model: str) -> list[Weights]:
        return random_layers(specs[model].layout)

    @functools.lru_cache(maxsize=1)
    def timer(model: str, num_rows: int) -> LayerTimer:
        return LayerTimer(specs[model], layers(model), num_rows=num_rows)

    return lambda shape, table, tried: timer(shape.model, shape.num_rows).us(table, shape.key, tried)


def tune(shapes: Sequence[Shape], table: dict[str, Q8Config], time_settings: TimeSettings) -> Iterator[str]:
    """Puts the settings of each shape into `table`, and then yields a line about them."""
    from tilings import cuts, runs

    from pallas_kernels.tuning import default_config

    for shape in shapes:
        now = table.get(shape.key, default_config(shape.num_rows))
        first = cuts(shape.matrix, shape.num_rows, now=now)
        times = time_settings(shape, table, first)
        second = runs(
            shape.matrix, shape.num_rows, best=sorted(times, key=times.__getitem__)[:_NUM_REFINED], tried=first
        )
        times |= time_settings(shape, table, second)
        table[shape.key] = best(now, times)
        yield line(shape, now, table[shape.key], times, num_tried=len(first) + len(second))


def best(now: Q8Config, times: Mapping[Q8Config, float]) -> Q8Config:
    """The settings with which a layer is fastest, or those of now where that gains too little to be sure of."""
    fastest = min(times, key=times.__getitem__, default=now)
    gains_little = now in times and times[fastest] >= times[now] * (1 - MIN_GAIN)
    return now if gains_little else fastest


def line(shape: Shape, now: Q8Config, chosen: Q8Config, times: Mapping[Q8Config, float], *, num_tried: int) -> str:
    """What was found for a shape: a layer with the settings of now, and with the best, the fastest first."""
    before = f"{times[now]:.2f} us" if now in times else "failed"
    told = [f"{brief(config)} {times[config]:.2f}" for config in sorted(times, key=times.__getitem__)[:_NUM_TOLD]]
    done = "stays" if chosen == now else f"becomes {brief(chosen)}"
    failed = f", {num_tried - len(times)} failed" if len(times) < num_tried else ""
    return (
        f"{shape.model} {shape.name} {shape.key}: a layer with {brief(now)} {before}, {done}; "
        f"best of {num_tried}{failed}: {', '.join(told)}"
    )


def brief(config: Q8Config) -> str:
    """Settings in a word: c64 r64 w4 s3 p384, and j where digits are joined."""
    numbers = {
        "c": config.block_columns,
        "r": config.block_rows,
        "w": config.num_warps,
        "s": config.num_stages,
        "p": config.num_programs,
    }
    return "".join(f"{letter}{number}" for letter, number in numbers.items()) + "j" * config.joined


if __name__ == "__main__":
    app.run(main)
