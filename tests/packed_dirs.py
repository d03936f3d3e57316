"""Packed directories as tests look at them: whether all is as it was written, and whether two hold the same model."""

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
