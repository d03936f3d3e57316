"""How much of the rate of reads each kernel reaches, at the shapes of models, and XLA beside it.

    python scripts/bench_kernels.py
    python scripts/bench_kernels.py --geometries=qwen3-8b --only=gate_up,attention

Measures how fast the device reads its memory and multiplies bfloat16 matrices, compiles everything, many programs at a
time, and then times each kernel within a program, among calls of its own kind over other data (`chains.py`):

- "q8": a product with a Q8 matrix, from float32 activations to a float32 result; also as a program of its own, again
  and again ("alone").
- "kernel": the kernel of that product by itself, as it runs in a layer; "int8": with activations in one digit (W8A8).
- "jax_triton", if asked for by `--arms`: the same kernel through jax_triton (extra `triton`).
- "xla": the same product as XLA does it, in bfloat16, by converting the matrix and multiplying.
- attention of a decode tile, with one row and with all rows in use, each in a sequence of its own.

Bytes are those of the matrix with its scales, or of the keys and values. Every result is compared: products with
float64, attention with the reference.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from absl import app, flags, logging

if TYPE_CHECKING:
    from collections.abc import Iterator

    import jax
    from kernel_cases import Model

_GEOMETRIES = flags.DEFINE_list(
    "geometries", ["qwen3-vl-2b", "qwen3-8b", "qwen3-32b"], "models whose shapes are taken, by name"
)
_MODEL = flags.DEFINE_string("model", "", "the shapes of a real model instead: anything that `vramjax --model` takes")
_ROWS = flags.DEFINE_list("rows", ["1", "16", "256"], "rows of products")
_CONTEXTS = flags.DEFINE_list("contexts", ["512", "4096", "32768"], "positions of attention")
_ONLY = flags.DEFINE_list("only", [], "only shapes with one of these in their names, such as gate_up,attention")
_ARMS = flags.DEFINE_list("arms", ["q8", "kernel", "int8", "xla"], "ways to compute a product")
_REPEATS = flags.DEFINE_integer("repeats", 10, "times that everything is run; the shortest counts", lower_bound=1)
_DISTINCT_MIB = flags.DEFINE_integer("distinct_mib", 192, "data of a chain of calls, more than a cache holds")
_OUT = flags.DEFINE_string("out", None, "directory for the result file; default benchmarks/results/DEVICE")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # of the backends that JAX looks for and does not find
    start = time.perf_counter()
    name, models = chosen_models()

    import jax
    from benchmarking import announce_result, write_result
    from ceilings import tell_ceilings
    from kernel_report import line, metrics_of, with_rates

    device = jax.devices()[0]
    ceilings = tell_ceilings(device, since=start)
    rows = []
    for row in measure(models, device):
        rows.append(with_rates(row, ceilings))
        print(line(rows[-1]), flush=True)
    path = write_result(
        f"kernels-{name}",
        device,
        ceilings=ceilings,
        metrics=metrics_of(rows),
        rows=rows,
        out=_OUT.value,
    )
    announce_result(path, seconds=time.perf_counter() - start)


def chosen_models() -> tuple[str, dict[str, Model]]:
    """Models by name, and a name for all of them together."""
    if _MODEL.value:
        from benchmarking import open_weights

        name, weights = open_weights(_MODEL.value, "")
        return name, {name: (weights.config, weights.groups)}
    from kernel_cases import models_of

    models = models_of(_GEOMETRIES.value)
    return "all" if len(models) > 1 else next(iter(models)), models


def measure(models: dict[str, Model], device: jax.Device) -> Iterator[dict[str, Any]]:
    """A row for each case, as soon as it is measured. Compiles everything first."""
    from chains import CompilerPool
    from kernel_cases import attention_case, is_chosen, product_case, products
    from kernel_timing import Prepared, wait_and_tell

    from vramjax.planning import engine_spec
    from vramjax.progress import progress_bar

    start = time.perf_counter()
    specs = {
        name: engine_spec(config, groups, context=None, device=device) for name, (config, groups) in models.items()
    }
    backend = next(iter(specs.values())).backend
    cases = [
        product_case(*product, backend=backend, arms=_ARMS.value)
        for product in products(models, list(map(int, _ROWS.value)), only=_ONLY.value)
    ]
    for name, spec in specs.items():
        if is_chosen(f"{name} attention", _ONLY.value):
            tiles = [(int(context), in_use) for context in _CONTEXTS.value for in_use in (1, spec.tile_rows)]
            cases += [attention_case(name, spec, *tile) for tile in tiles]
    with CompilerPool() as pool:
        prepared = [Prepared(case, pool, distinct_bytes=_DISTINCT_MIB.value << 20) for case in cases]
        wait_and_tell(pool, len(prepared), since=start)
    with progress_bar("Timing", total=len(prepared), unit="items") as advance:
        for each in prepared:
            yield each.measure(repeats=_REPEATS.value)
            advance(1)


if __name__ == "__main__":
    app.run(main)
