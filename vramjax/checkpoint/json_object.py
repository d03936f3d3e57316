"""JSON objects out of files that anybody may have written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def parse_object(
    text: str | bytes, *, object_of: Callable[[list[tuple[str, Any]]], dict[str, Any]] = dict
) -> dict[str, Any]:
    """The JSON object that `text` is, each object in it made by `object_of` from its pairs.

    Raises:
      ValueError: it is no JSON, no object, or is nested too deeply to be read.
    """
    try:
        value = json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}")
    return value
