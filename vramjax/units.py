"""Bytes for people. GiB and MiB are powers of two, and memory and disks are always counted in them here."""

from __future__ import annotations

import operator
import re
from decimal import Decimal

from vramjax.errors import ConfigError

_BYTES_OF = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES_OF |= {f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}


def gib(num_bytes: float) -> str:
    """Bytes as GiB, or as MiB below one GiB. Example: 1.5 * 2**30 is "1.50 GiB", 3 << 20 is "3.0 MiB"."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def gib_or_more(num_bytes: int) -> str:
    """The same rounded up, so that what is printed is enough. Example: 2**30 + 1 is "1.01 GiB"."""
    if num_bytes >= 2**30:
        return f"{-(-num_bytes * 100 // 2**30) / 100:.2f} GiB"
    return f"{-(-num_bytes * 10 // 2**20) / 10:.1f} MiB"


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """The bytes that a user means; a fraction of a byte in a text is dropped.

    Example: "6GiB" is 6 * 2**30, "1.5 GB" is 1_500_000_000, "500mb" is 500_000_000, "1000" and 1000 are 1000. "6G" is
    refused: it means either, to different people.

    Args:
      size: a whole number, or a text of any number and B, kB, MB, GB, TB (powers of 1000), KiB, MiB, GiB, TiB (1024).
      name: what the size is for, in the error.

    Raises:
      ConfigError: `size` is none of these, or less than one byte.
    """
    num_bytes = _number_of_bytes(size)
    if num_bytes is None or num_bytes < 1:
        raise ConfigError(f"{name} is {size!r}; expected bytes, at least 1, such as '6GiB', '500MB' or 6442450944")
    return num_bytes


def _number_of_bytes(size: object) -> int | None:
    if isinstance(size, str):
        # So many digits and no more: what is longer is no size, and turning it into a number takes long.
        match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([a-z]*)\s*", size, re.ASCII | re.IGNORECASE)
        unit = _BYTES_OF.get(match[2].lower()) if match else None
        return int(Decimal(match[1]) * unit) if match and unit else None
    if isinstance(size, bool):
        return None
    try:
        return operator.index(size)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None
