"""Packed directories: tiny ones, and what tests look at: all there, the same model, nothing left beside them."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path
from typing import Any

from tiny import write_tiny

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.packed import Packed, open_packed


def pack_tiny(directory: Path, variant: str, *, group: int = 128, **options: Any) -> Packed:
    """A tiny model in `directory`, packed beside its Hugging Face form, for which the options are."""
    source = open_hf(write_tiny(directory / f"{variant}-hf", variant, **options))
    return open_packed(convert(source, directory / variant, group=group, progress=False))


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
