"""Hugging Face checkpoints: a directory of config.json, safetensors files and tokenizer files.

One file or many shards, f32, f16 and bf16 in any mixture. Everything that headers tell is checked on opening.
A quantised checkpoint is refused: its scales change what the weights mean.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from vramjax.checkpoint.json_object import parse_object
from vramjax.checkpoint.names import canonical_from_hf, hf_from_canonical, is_quantised_name, skip_reason
from vramjax.checkpoint.safetensors_io import (
    FLOAT_DTYPES,
    StoredTensor,
    read_float32,
    read_float32_chunks,
    read_header,
)
from vramjax.checkpoint.source import TensorInfo, check_finite, config_errors_name, match_tensors
from vramjax.config import ModelConfig
from vramjax.errors import CheckpointError
from vramjax.text.tokenizer import TEXT_FILES, unread_tokenizer

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def open_hf(path: Path) -> HfSource:
    """Opens a checkpoint directory and checks its config and the headers of its weight files.

    If the config ties the embedding and lm_head but the files hold an lm_head as well, the config wins: the stored
    lm_head is not used, and a note says so where it is not equal to the embedding. Only for that comparison are
    weights read.

    Raises:
      CheckpointError: a file is missing, damaged or quantised, or the tensors are not those that the config calls for.
      ConfigError: config.json is of a model that vramjax cannot run.
    """
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; expected a Hugging Face checkpoint")
    config_json = _read_json(path / "config.json")
    if config_json is None:
        raise CheckpointError(f"{path} has no config.json; expected a Hugging Face checkpoint")
    notes: list[str] = []
    with config_errors_name(path):
        config = ModelConfig.from_hf(config_json, _read_json(path / "generation_config.json"), notes=notes)

    headers = _read_headers(path, notes)
    stored: list[TensorInfo] = []
    entries: dict[tuple[Path, str], StoredTensor] = {}
    skipped: Counter[str] = Counter()
    for file, header in headers.items():
        for name, entry in header.items():
            info = TensorInfo(
                name=canonical_from_hf(name) or "", stored_name=name, shape=entry.shape, dtype=entry.dtype, file=file
            )
            if is_quantised_name(name):
                raise CheckpointError(f"{info} is of a quantised checkpoint; expected only f32, f16 or bf16 weights")
            if (reason := skip_reason(name, config.family)) is not None:
                skipped[reason] += 1
                continue
            if entry.dtype not in FLOAT_DTYPES:
                raise CheckpointError(
                    f"{info} is stored as {entry.dtype}; expected one of {', '.join(FLOAT_DTYPES)}: save it in one "
                    "of them, or, if it is quantised, take the original checkpoint"
                )
            stored.append(info)
            entries[file, name] = entry
    if unread := unread_tokenizer(path):
        notes.append(unread)
    notes.extend(f"{count} tensors skipped: {reason}" for reason, count in skipped.items())

    surplus_head = [info for info in stored if config.tied_embeddings and info.name == "head.weight"]
    prefix = next(
        (i.stored_name.removesuffix("norm.weight") for i in stored if i.name == "final_norm.weight"), "model."
    )
    tensors = match_tensors(
        config,
        [info for info in stored if info not in surplus_head],
        where=path,
        stored_name_of=lambda name: hf_from_canonical(name, prefix),
    )
    source = HfSource(path, config, tensors, notes, entries)
    notes.extend(
        f"{head.stored_name} is stored and differs from the embedding, but config.json ties the two: the stored one is "
        "ignored"
        for head in surplus_head
        if not source.equal(head, tensors["embed.weight"])
    )
    return source


class HfSource:
    """An opened Hugging Face checkpoint; see `vramjax.checkpoint.source.Source`."""

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        tensors: dict[str, TensorInfo],
        notes: list[str],
        entries: dict[tuple[Path, str], StoredTensor],
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors
        self.notes = notes
        self._entries = entries

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32, exactly; no NaN and no infinity."""
        info = self.tensors[name]
        values = read_float32(info.file, self._entry(info))
        check_finite(values, info)
        return values

    def equal(self, a: TensorInfo, b: TensorInfo) -> bool:
        """Whether two tensors hold the same numbers, whatever their dtypes; memory stays bounded."""
        if a.shape != b.shape:
            return False
        pieces = zip(
            read_float32_chunks(a.file, self._entry(a)), read_float32_chunks(b.file, self._entry(b)), strict=True
        )
        return all(np.array_equal(x, y) for x, y in pieces)

    def write_text_files(self, dst: Path) -> None:
        """Copies tokenizer and generation files, those that there are, into the directory `dst`."""
        for name in TEXT_FILES:
            if (self.path / name).is_file():
                shutil.copyfile(self.path / name, dst / name)
        # Processors of multimodal models keep the template in a JSON file of its own.
        template = _read_json(self.path / "chat_template.json")
        if template and isinstance(template.get("chat_template"), str) and not (dst / "chat_template.jinja").exists():
            (dst / "chat_template.jinja").write_text(template["chat_template"], encoding="utf-8")

    def _entry(self, info: TensorInfo) -> StoredTensor:
        return self._entries[info.file, info.stored_name]


def _read_headers(path: Path, notes: list[str]) -> dict[Path, dict[str, StoredTensor]]:
    """The headers of all weight files, each file whole and each tensor of an index where the index says."""
    found = sorted(p for p in path.glob("*.safetensors") if p.is_file())
    index = _read_json(path / _INDEX)
    if path / _SINGLE in found:
        if index is not None:
            notes.append(f"{path} has both {_SINGLE} and {_INDEX}: used {_SINGLE}")
        return {path / _SINGLE: read_header(path / _SINGLE)}
    if index is not None:
        return _read_indexed(path, index)
    if not found:
        pickled = any(path.glob("*.bin"))
        hint = "; PyTorch .bin files are not read: convert them with save_pretrained first" if pickled else ""
        raise CheckpointError(f"no safetensors weights in {path}{hint}")
    if len(found) > 1 or _NUMBERED.fullmatch(found[0].name):
        _check_numbered(path, found)
    return {file: read_header(file) for file in found}


def _read_indexed(path: Path, index: dict[str, Any]) -> dict[Path, dict[str, StoredTensor]]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path / _INDEX} has no weight_map; expected tensor names and their files")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise CheckpointError(f"{path / _INDEX} puts tensor {name} into {shard!r}; expected a file beside it")
    shards = [path / shard for shard in sorted(set(weight_map.values()))]
    for shard in shards:
        if not shard.is_file():
            raise CheckpointError(f"{shard} is missing; {_INDEX} calls for it: download it again")
    headers = {shard: read_header(shard) for shard in shards}
    for name, shard in weight_map.items():
        if name not in headers[path / shard]:
            raise CheckpointError(f"{path / shard} has no tensor {name}, which {_INDEX} puts there")
    return headers


def _check_numbered(path: Path, found: list[Path]) -> None:
    """Files without an index are one checkpoint only if they are numbered and complete, or a single one of any name."""
    matches = [_NUMBERED.fullmatch(file.name) for file in found]
    if not all(matches) or len({(m[1], m[3]) for m in matches if m}) != 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{path} has {names} and no {_INDEX}; expected one file, or an index")
    first = matches[0]
    assert first is not None
    for number in range(1, int(first[3]) + 1):
        name = f"{first[1]}-{number:0{len(first[2])}d}-of-{first[3]}.safetensors"
        if not (path / name).is_file():
            raise CheckpointError(
                f"{path / name} is missing; {found[0].name} is one of {int(first[3])} files: download it again"
            )


def _read_json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        return parse_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable JSON object: {error}") from error
