"""Writes random weights of a model's shapes as a packed directory, for benchmarks of what is read from disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vramjax.checkpoint.packed import FORMAT, HEAD_FILE, MANIFEST, VERSION, head_shapes, layer_file, manifest_digest
from vramjax.checkpoint.random_weights import RandomWeights
from vramjax.checkpoint.safetensors_io import WrittenFile, write_safetensors


def write_random_packed(
    weights: RandomWeights, path: Path, *, num_threads: int = 8, progress: Callable[[int], None] = lambda _: None
) -> None:
    """Writes `weights` to the new directory `path`, which `open_packed` then opens like a conversion.

    Args:
      weights: what to write.
      path: where to; it must not exist.
      num_threads: files that are written at the same time; each takes the memory of a layer.
      progress: told the bytes of each file that has been written.
    """
    path.mkdir(parents=True)
    num_layers = weights.config.num_layers

    def write(layer_idx: int) -> tuple[str, WrittenFile]:
        if layer_idx == num_layers:
            name, shapes, arrays = HEAD_FILE, head_shapes(weights.config, weights.groups), weights.load_head()
        else:
            name, shapes, arrays = layer_file(layer_idx), weights.layout.shapes, weights.load_layer(layer_idx)
        return name, write_safetensors(path / name, shapes, ((key, arrays[key]) for key in shapes))

    files = {}
    with ThreadPoolExecutor(num_threads) as pool:
        for name, written in pool.map(write, reversed(range(num_layers + 1))):  # the head, which takes longest, first
            files[name] = {"bytes": written.num_bytes, "sha256": written.sha256}
            progress(written.num_bytes)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "config": weights.config.to_json(),
        "groups": weights.groups,
        "files": files,
        "source": {"name": "random", "dtypes": ["I8"]},
        "notes": ["the weights are random"],
    }
    text = json.dumps(manifest | {"digest": manifest_digest(manifest)}, indent=1)
    (path / MANIFEST).write_text(text, encoding="utf-8")
