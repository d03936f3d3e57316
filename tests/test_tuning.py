"""The table of measured settings: what is written is found again, and what it has fits the kernel."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import pytest

from pallas_kernels import tuning
from pallas_kernels.q8_matmul import COLUMN_MULTIPLE
from pallas_kernels.tuning import DEFAULT_FEW, DEFAULT_MANY, Q8Config, q8_config, table_file, write_table


def test_a_device_without_a_table_has_the_default() -> None:
    assert q8_config(6144, 4096, 128, 64) == DEFAULT_FEW
    assert q8_config(6144, 4096, 128, 65) == DEFAULT_MANY


def test_what_is_written_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    kind = jax.devices()[0].device_kind
    table = {"128x256/64 few": Q8Config(num_stages=5), "128x256/64 many": Q8Config(block_rows=128, joined=True)}
    tuning._table.cache_clear()
    try:
        assert write_table(kind, table) == table_file(kind)
        assert [q8_config(128, 256, 64, num_rows) for num_rows in (16, 256)] == list(table.values())
        assert q8_config(128, 256, 32, 1) == q8_config(256, 128, 64, 1) == DEFAULT_FEW
    finally:
        tuning._table.cache_clear()


def test_every_table_fits_its_shapes() -> None:
    for path in tuning.TABLES.glob("*.json"):
        for key, config in tuning.read_table(path.stem).items():
            shape, rows = key.split()
            n, k, group = map(int, re.split("[x/]", shape))
            assert rows in ("few", "many") and k % group == 0, (path, key)
            assert n % config.block_columns == 0 and config.block_columns % COLUMN_MULTIPLE == 0, (path, key)
