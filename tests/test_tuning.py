"""The table of measured settings: what is written is found again, and what it has fits the kernel."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.q8_kernel import COLUMN_MULTIPLE
from pallas_kernels.tuning import DEFAULT_FEW, DEFAULT_MANY, Q8Config, q8_config, table_file, use_table, write_table


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


def test_a_table_for_a_while() -> None:
    """What is traced in it has its settings, though JAX has seen the same shapes before; what comes after has not."""
    config = Q8Config(num_stages=5)
    settings = jax.jit(lambda x: x * q8_config(128, 256, 64, 1).num_stages)
    x = jnp.ones((128, 256))
    assert settings(x)[0, 0] == DEFAULT_FEW.num_stages
    with use_table({"128x256/64 few": config}):
        assert q8_config(128, 256, 64, 1) == config and q8_config(256, 128, 64, 1) == DEFAULT_FEW
        assert settings(x)[0, 0] == 5
        with pytest.raises(ZeroDivisionError), use_table({}):
            assert q8_config(128, 256, 64, 1) == DEFAULT_FEW
            _ = 1 / 0
        assert settings(x)[0, 0] == 5
    assert settings(x)[0, 0] == DEFAULT_FEW.num_stages


def test_every_table_fits_its_shapes() -> None:
    for path in tuning.TABLES.glob("*.json"):
        for key, config in tuning.read_table(path.stem).items():
            shape, rows = key.split()
            n, k, group = map(int, re.split("[x/]", shape))
            assert rows in ("few", "many") and k % group == 0, (path, key)
            assert n % config.block_columns == 0 and config.block_columns % COLUMN_MULTIPLE == 0, (path, key)
