"""How the Q8 product is cut up, for each shape of weights on each GPU: a small measured table, and a default.

`tuned/` has a file for each kind of GPU, as JAX names it: {"NxK/group few": {"block_columns": ..., ...}, ...}, which
`python scripts/autotune.py` writes: those with which a whole layer is fastest, not the product by itself. A GPU or a
shape that is not there gets the default.

What is chosen depends on the rows in one way only: there are few of them, as in a decode tile, where the time is that
of reading the weights, or many, as in a prompt. Among few, or among many, a row's result is the same to the last bit.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax

TABLES = Path(__file__).parent / "tuned"
MOST_FEW = 64  # rows


@dataclass(frozen=True, kw_only=True)
class Q8Config:
    """Settings of the kernel of the Q8 product.

    Example: N = 6144, K = 4096, the default of few rows: 96 programs compute 64 columns each, so K is cut into 4 splits
    of 8 turns of 128 inputs, and there are 384 programs.
    """

    block_columns: int = 64  # of a program: at least what a Hopper tensor core multiplies at once; divides N
    block_rows: int = 64  # of a program, if there are so many
    num_warps: int = 4  # of a program
    num_stages: int = 3  # of the pipeline that loads; a deeper one leaves room for fewer programs at once
    step_inputs: int = 128  # of a turn of the loop: a cache line of each column's weights
    num_programs: int = 384  # at least, if K can be cut into so many splits: about three for each multiprocessor
    joined: bool = False  # both digits in one product of twice the rows, or in two


DEFAULT_FEW = Q8Config()
DEFAULT_MANY = Q8Config(num_programs=1)


def q8_config(n: int, k: int, group: int, num_rows: int) -> Q8Config:
    """What is best for int8 [N, K] in groups of `group` inputs, on the first of JAX's devices."""
    table = _tried.get()
    if table is None:
        table = _table(jax.devices()[0].device_kind)
    return table.get(table_key(n, k, group, num_rows), default_config(num_rows))


def default_config(num_rows: int) -> Q8Config:
    """The settings of a shape that was not measured."""
    return DEFAULT_FEW if num_rows <= MOST_FEW else DEFAULT_MANY


@contextlib.contextmanager
def use_table(table: Mapping[str, Q8Config]) -> Iterator[None]:
    """What is traced while this lasts, by this thread, has the settings of `table`, whatever the GPU.

    JAX forgets all that it has traced and compiled, before and after: it would take the same shapes for the same
    programs. Programs that someone holds (`jax.stages.Compiled`) stay as they are.
    """
    token = _tried.set(table)
    jax.clear_caches()
    try:
        yield
    finally:
        _tried.reset(token)
        jax.clear_caches()


def table_key(n: int, k: int, group: int, num_rows: int) -> str:
    """Under what a table has the settings of a shape: "6144x4096/128 few"."""
    return f"{n}x{k}/{group} {'few' if num_rows <= MOST_FEW else 'many'}"


def table_file(device_kind: str) -> Path:
    """Where the measured settings of a kind of GPU are: "NVIDIA H200" has tuned/nvidia-h200.json."""
    return TABLES / f"{device_kind.lower().replace(' ', '-')}.json"


def read_table(device_kind: str) -> dict[str, Q8Config]:
    """The measured settings of a kind of GPU; of one that was not measured there are none."""
    path = table_file(device_kind)
    entries = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: Q8Config(**settings) for key, settings in entries.items()}


def write_table(device_kind: str, table: dict[str, Q8Config]) -> Path:
    """Replaces the measured settings of a kind of GPU."""
    path = table_file(device_kind)
    lines = [f" {json.dumps(key)}: {json.dumps(dataclasses.asdict(config))}" for key, config in table.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return path


_tried: contextvars.ContextVar[Mapping[str, Q8Config] | None] = contextvars.ContextVar("_tried", default=None)
_table = functools.cache(read_table)  # a kernel looks in it each time that it is traced
