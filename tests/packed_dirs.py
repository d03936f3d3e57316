"""Packed directories as tests look at them: whole or not, the same model or not, and what is left beside them."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

from vramjax.checkpoint.packed import open_packed


def assert_intact(path: Path) -> None:
    """Every file is there, with the size and the checksum that the manifest has."""
    packed = open_packed(path)
    for layer_idx in range(packed.config.num_layers):
        packed.load_layer(layer_idx)
    packed.load_head()


def assert_same_weights(first: Path, second: Path) -> None:
    """Config, groups and all weights are equal, bit for bit."""
    files = sorted(path.name for path in first.glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(path.name for path in second.glob("*.safetensors"))
    assert filecmp.cmpfiles(first, second, files, shallow=False)[0] == files
    a, b = (json.loads((path / "vramjax.json").read_text()) for path in (first, second))
    assert a["groups"] == b["groups"]
    for manifest in (a, b):
        manifest["config"]["eos_token_ids"] = sorted(manifest["config"]["eos_token_ids"])
    assert a["config"] == b["config"]


def assert_nothing_left(directory: Path, *allowed: str) -> None:
    """There is nothing in `directory` that was not allowed, hidden or not."""
    assert {p.name for p in directory.iterdir()} <= set(allowed)
