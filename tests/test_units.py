"""Sizes as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramjax.errors import ConfigError
from vramjax.units import gib, parse_bytes


@pytest.mark.parametrize(
    ("size", "num_bytes"),
    [
        ("6GiB", 6 << 30),
        ("500MB", 500_000_000),
        ("1.5 GB", 1_500_000_000),
        (" 2 mib ", 2 << 20),
        ("0.5KiB", 512),
        ("3 kB", 3000),
        ("1TiB", 1 << 40),
        ("1TB", 10**12),
        ("77B", 77),
        ("1000", 1000),
        ("1.9", 1),
        (1000, 1000),
        (np.int64(7), 7),
        ("0.1GB", 100_000_000),  # exactly: not by way of a float
    ],
)
def test_sizes(size: Any, num_bytes: int) -> None:
    parsed = parse_bytes(size)
    assert (parsed, type(parsed)) == (num_bytes, int)


BAD: list[Any] = [
    *("", "GiB", "6G", "6 gigs", "-1GiB", "1e9", "1,5GB", "0", "0.4B", "0GiB", "1 2", "٣GB", "auto", "9" * 21, "nan"),
    *(0, -5, True, None, 0.5, 4e9, float("nan"), float("inf"), [6], b"6GiB"),
]


@pytest.mark.parametrize("size", BAD, ids=repr)
def test_what_is_no_size(size: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes(size, name="device_budget")
    assert str(caught.value) == (
        f"device_budget is {size!r}; expected bytes, at least 1, such as '6GiB', '500MB' or 6442450944"
    )


@given(st.integers(1, 2**50))
def test_bytes_of_what_is_printed(num_bytes: int) -> None:
    """What `gib` prints is read back, to the last digit that it prints."""
    assert parse_bytes(str(num_bytes)) == parse_bytes(f"{num_bytes} B") == num_bytes
    if num_bytes >= 2**20:
        assert gib(parse_bytes(gib(num_bytes))) == gib(num_bytes)
