"""The table of measured settings: what is written is found again, and what it has fits the kernel."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.q8_matmul import COLUMN_MULTIPLE
from pallas_kernels.tuning import DEFAULT, Q8Config, q8_config, table_file, write_table


def test_a_device_without_a_table_has_the_default() -> None:
    assert q8_config(6144, 4096) == DEFAULT


def test_what_is_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    kind = jax.devices()[0].device_kind
    table = {"128x256": Q8Config(num_stages=5), "64x64": Q8Config(block_columns=64, num_programs=7)}
    tuning._table.cache_clear()
    try:
        assert write_table(kind, table) == table_file(kind)
        assert q8_config(128, 256) == table["128x256"] and q8_config(64, 64) == table["64x64"]
        assert q8_config(256, 128) == DEFAULT
    finally:
        tuning._table.cache_clear()


def test_every_table_fits_its_shapes() -> None:
    for path in tuning.TABLES.glob("*.json"):
        for shape, config in tuning._table(path.stem).items():
            n, k = map(int, shape.split("x"))
            assert n % config.block_columns == 0 and config.block_columns % COLUMN_MULTIPLE == 0, (path, shape)
            assert k % 16 == 0
