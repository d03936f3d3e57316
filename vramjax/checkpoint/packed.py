"""The packed directory: what weights are streamed from. Its layout on disk, and opening and verifying it.

    vramjax.json               format, version, config, groups, size and SHA-256 of every other file, notes, and the
                               digest of all that
    layer-00000.safetensors    one per layer: the five arrays of `LayerLayout`
    head.safetensors           embed, final_norm and, where it is not the embedding, head
    tokenizer.json ...         the text files, as they came

Sizes, and the checksums of the text files, are checked on opening, those of weights when a file is first read.
`convert` writes it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vramjax.checkpoint.json_object import parse_object
from vramjax.checkpoint.weight_file import WeightFile, check_sha256
from vramjax.config import ModelConfig
from vramjax.errors import CheckpointError, ConfigError
from vramjax.layout import MATRICES, LayerLayout, MatrixSpec
from vramjax.quantize import GROUP_SIZES

FORMAT = "vramjax-q8"
VERSION = 2
MANIFEST = "vramjax.json"
HEAD_FILE = "head.safetensors"
# The name of a directory that a conversion has not finished: a hidden one, of the destination and a process id.
PARTIAL_NAME = re.compile(r"\.(.+)\.partial-\d{1,10}", re.DOTALL)

Shapes = dict[str, tuple[tuple[int, ...], np.dtype]]


def layer_file(layer_idx: int) -> str:
    return f"layer-{layer_idx:05d}.safetensors"


def group_names(config: ModelConfig) -> tuple[str, ...]:
    """The Q8 matrices that a packed model has: those of a layer, the embedding, and lm_head where it is its own."""
    return (*MATRICES, "embed") if config.tied_embeddings else (*MATRICES, "embed", "head")


def head_shapes(config: ModelConfig, groups: Mapping[str, int]) -> Shapes:
    """Name -> (shape, dtype) of head.safetensors.

    Example: a vocabulary of 49152 and hidden 576 at group 128, tied, give `embed` int8 [49152, 640],
    `embed_scales` float32 [5, 49152] and `final_norm` float32 [576].
    """
    int8, float32 = np.dtype(np.int8), np.dtype(np.float32)
    shapes: Shapes = {}
    for name in ("embed",) if config.tied_embeddings else ("embed", "head"):
        spec = MatrixSpec(n=config.vocab_size, k=config.hidden_size, group=groups[name])
        shapes[name] = (spec.values_shape, int8)
        shapes[f"{name}_scales"] = (spec.scales_shape, float32)
    return shapes | {"final_norm": ((config.hidden_size,), float32)}


def head_bytes(config: ModelConfig, groups: Mapping[str, int]) -> int:
    """Bytes of the arrays of head.safetensors."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in head_shapes(config, groups).values())


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256, in hex, of everything that a manifest says but `digest` itself, however it is laid out as text."""
    said = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(said, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def is_packed(path: Path) -> bool:
    """Whether `path` looks like a packed directory, finished and named as one."""
    return (path / MANIFEST).is_file() and not PARTIAL_NAME.fullmatch(path.absolute().name)


def open_packed(path: Path) -> Packed:
    """Opens a packed directory: reads its manifest, and checks that every file is there and has its size.

    What is no weight, such as the tokenizer, is read as well, and compared with its checksum.

    Raises:
      CheckpointError: it is no packed directory, of another version, unfinished, or a file is missing or damaged.
    """
    path = Path(path)
    manifest_path = path / MANIFEST
    if PARTIAL_NAME.fullmatch(path.absolute().name):
        raise CheckpointError(f"{path} is what an interrupted conversion left; expected a finished one: convert again")
    if not manifest_path.is_file():
        raise CheckpointError(f"{path} has no {MANIFEST}; expected a directory that `vramjax convert` wrote")
    try:
        manifest = parse_object(manifest_path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{manifest_path} is not readable: {error}") from error
    if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{manifest_path} is {manifest.get('format')!r} version {manifest.get('version')!r}; expected {FORMAT!r} "
            f"version {VERSION}: convert the checkpoint again"
        )
    digest = manifest_digest(manifest)
    if manifest.get("digest") != digest:
        raise CheckpointError(
            f"{manifest_path} has digest {digest}; expected {manifest.get('digest')}, which stands in it: it changed "
            "since it was written, convert the checkpoint again"
        )
    try:
        config = ModelConfig.from_json(manifest["config"])
        groups = {str(name): int(group) for name, group in manifest["groups"].items()}
        files = {str(name): (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
        notes = [str(note) for note in manifest["notes"]]
        source = dict(manifest["source"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, ConfigError) as error:
        raise CheckpointError(f"{manifest_path} is damaged ({error!r}): convert the checkpoint again") from error
    if set(groups) != set(group_names(config)) or not set(groups.values()) <= set(GROUP_SIZES):
        raise CheckpointError(f"{manifest_path} has groups {groups}; expected {', '.join(group_names(config))}")

    needed = [HEAD_FILE, *(layer_file(i) for i in range(config.num_layers))]
    if unlisted := [name for name in needed if name not in files]:
        raise CheckpointError(f"{manifest_path} does not list {unlisted[0]}; expected it: convert the checkpoint again")
    if unused := [name for name in files if name.endswith(".safetensors") and name not in needed]:
        raise CheckpointError(
            f"{manifest_path} lists {unused[0]}, which a model of {config.num_layers} layers does not use; expected no "
            "such file: convert the checkpoint again"
        )
    for name, (num_bytes, sha256) in files.items():
        if Path(name).name != name:
            raise CheckpointError(f"{manifest_path} lists {name!r}; expected a file beside it")
        if not (path / name).is_file():
            raise CheckpointError(f"{path / name} is missing; {MANIFEST} lists it: convert the checkpoint again")
        if (actual := (path / name).stat().st_size) != num_bytes:
            raise CheckpointError(
                f"{path / name} has {actual} bytes; expected {num_bytes}: convert the checkpoint again"
            )
        if name not in needed:
            check_sha256(path / name, hashlib.sha256((path / name).read_bytes()).hexdigest(), sha256)
    return Packed(path, config, groups, notes, source, files, digest)


class Packed:
    """An opened packed directory.

    Every array handed out is what was written, bit for bit: the first read of a file checks its SHA-256, later ones
    that nobody has written to it. Reading from several threads is fine. Nothing is kept in memory.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        groups: dict[str, int],
        notes: list[str],
        source: dict[str, Any],
        files: dict[str, tuple[int, str]],
        digest: str,
    ) -> None:
        self.path = path
        self.config = config
        self.groups = groups
        self.notes = notes
        self.source = source  # what it was converted from, for display
        self.digest = digest  # hex; two packed models of one digest are the same, down to every byte of every file
        self.layout = LayerLayout.of(config, groups)  # the same for every layer
        self._layers = [
            WeightFile(path / layer_file(i), files[layer_file(i)][1], self.layout.shapes)
            for i in range(config.num_layers)
        ]
        self._head = WeightFile(path / HEAD_FILE, files[HEAD_FILE][1], head_shapes(config, groups))

    @property
    def layer_nbytes(self) -> int:
        """Bytes of one layer's arrays."""
        return self.layout.num_bytes

    @property
    def head_nbytes(self) -> int:
        """Bytes of the arrays that never leave the device: embedding, final norm, lm_head."""
        return head_bytes(self.config, self.groups)

    def load_layer(self, layer_idx: int) -> dict[str, np.ndarray]:
        """The five arrays of a layer: qkv, o, gate_up, down int8 [Npad, Kpad], params float32 [F].

        Raises:
          CheckpointError: the file changed since it was written.
        """
        return self._layers[layer_idx].load()

    def read_layer_into(self, layer_idx: int, arrays: Mapping[str, np.ndarray], *, drop_pages: bool = False) -> None:
        """Fills the five arrays of a layer, given as in `load_layer`; takes no other memory.

        Args:
          layer_idx: which layer.
          arrays: writable, row-major and dense.
          drop_pages: whether the system's copy of the file is dropped from its memory afterwards: for a model that is
            read over and over and would not fit there.

        Raises:
          CheckpointError: the file changed since it was written, or since the model was loaded.
        """
        self._layers[layer_idx].read_into(arrays, drop_pages=drop_pages)

    def will_need_layer(self, layer_idx: int) -> None:
        """Asks the system to begin reading a layer's file; returns at once."""
        self._layers[layer_idx].will_need()

    def load_head(self) -> dict[str, np.ndarray]:
        """The arrays of `head_shapes`: embed, embed_scales, final_norm and, where untied, head, head_scales.

        Raises:
          CheckpointError: the file changed since it was written.
        """
        return self._head.load()

    def read_head_into(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Fills the arrays of `load_head`; see `read_layer_into`."""
        self._head.read_into(arrays)
