"""Reads GGUF files: one file, or all parts of a split one.

Q8_0 matrices are carried over exactly, as Q8 at group 32. F32, F16 and BF16 are read as float32. Every other type is
dequantised by the `gguf` package, with a note, and will be quantised again by whoever converts it.

Architecture "llama" stores the rows of q and k in the order of interleaved RoPE (pairs next to each other);
everything here is in the order of split halves, so those rows are put back. The qwen architectures need nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from vramjax.checkpoint.gguf_header import GgufHeader, StoredTensor, read_header
from vramjax.checkpoint.source import TensorInfo, check_finite, config_errors_name, match_tensors
from vramjax.config import ModelConfig
from vramjax.config_gguf import model_config_from_gguf
from vramjax.errors import CheckpointError
from vramjax.quantize import Q8Matrix
from vramjax.text.gguf_tokenizer import build_tokenizer

_TYPE = gguf.GGMLQuantizationType
_FLOAT_TYPES = (_TYPE.F32, _TYPE.F16, _TYPE.BF16)
_Q8_0_GROUP = 32
_ROPE_FACTORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd.weight": "embed.weight",
    "output_norm.weight": "final_norm.weight",
    "output.weight": "head.weight",
}
_MODULES = {
    "attn_norm": "input_norm",
    "ffn_norm": "post_norm",
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_output": "o",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_MODULE_OF = {name: stored for stored, name in _MODULES.items()}
_TOP_NAME_OF = {name: stored for stored, name in _TOP_NAMES.items()}
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.([^.]+)\.(weight|bias)")
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")  # of a split file: name, number from 1, how many


def open_gguf(path: Path | str) -> GgufSource:
    """Opens a GGUF file of architecture llama, qwen2, qwen3 or qwen3vl; for a split one, any of its parts.

    Raises:
      CheckpointError: the file is damaged or cut short, is no GGUF file, a part is missing, a tensor is missing,
        misshapen or not part of the model, or its type cannot be read.
      ConfigError: its metadata describes a model that vramjax cannot run.
    """
    return GgufSource(Path(path))


class GgufSource:
    """An opened GGUF file; see `vramjax.checkpoint.source.Source`, which this is.

    Invariant: `tensors` has exactly the tensors of `config`, each lies within its file and has a readable type.

    Example: of SmolLM2-135M as Q4_1, `read("embed.weight")` is a Q8Matrix, as the embedding is stored as Q8_0, and
    `read("layers.0.q.weight")` a float32 array [576, 576].
    """

    path: Path
    config: ModelConfig
    tensors: Mapping[str, TensorInfo]
    notes: list[str]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes = []
        headers = _read_parts(path)
        self.metadata: dict[str, Any] = headers[0].metadata
        stored = [tensor for header in headers for tensor in header.tensors]
        self._stored = _by_name(stored)

        factors = self._read_rope_factors()
        with config_errors_name(path):
            self.config = model_config_from_gguf(
                self.metadata, {t.name: t.shape for t in stored}, freq_factors=factors, notes=self.notes
            )
        infos = [_info(tensor) for tensor in stored if tensor.name != _ROPE_FACTORS]
        self.tensors = match_tensors(self.config, infos, where=path, stored_name_of=gguf_from_canonical)
        self._check_types()

    def read(self, name: str) -> np.ndarray | Q8Matrix:
        """One tensor by vramjax's name: a Q8Matrix at group 32 for a Q8_0 matrix, float32 for everything else.

        Raises:
          CheckpointError: it has a NaN or an infinity, or can no longer be read.
        """
        info = self.tensors[name]
        tensor = self._stored[info.stored_name]
        rows = self._row_order(name)
        if info.q8_group is not None:
            return _read_q8_0(tensor, info, rows)
        values = _read_float(tensor)
        check_finite(values, info)
        return values if rows is None else values[rows]

    def write_text_files(self, dst: Path) -> None:
        """Writes the tokenizer, rebuilt from the metadata, as Hugging Face files into the directory `dst`.

        A file without a tokenizer leaves nothing there.

        Raises:
          TextError: the tokenizer is of a kind that cannot be rebuilt.
        """
        if self.metadata.get("tokenizer.ggml.model") in (None, "none", "no_vocab"):
            return
        for filename, text in build_tokenizer(self.metadata).items():
            (dst / filename).write_text(text, encoding="utf-8")

    def _read_rope_factors(self) -> list[float] | None:
        tensor = self._stored.get(_ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.type != _TYPE.F32 or len(tensor.shape) != 1:
            raise CheckpointError(
                f"tensor {tensor.name} in {tensor.file} has type {tensor.type.name} and shape {list(tensor.shape)}; "
                "expected F32 and [head_dim / 2]"
            )
        return _read_float(tensor).tolist()

    def _row_order(self, name: str) -> np.ndarray | None:
        """int [N]: which stored row is row n of tensor `name`; None where they are in order."""
        match = re.fullmatch(r"layers\.\d+\.([qk])\.(?:weight|bias)", name)
        if self.config.family != "llama" or match is None:
            return None
        heads = self.config.num_heads if match[1] == "q" else self.config.num_kv_heads
        half = self.config.head_dim // 2
        # Stored: head, pair, (first, second). Wanted: head, (first, second), pair.
        return np.arange(heads * half * 2).reshape(heads, half, 2).swapaxes(1, 2).reshape(-1)

    def _check_types(self) -> None:
        counts = Counter(self._stored[info.stored_name].type for info in self.tensors.values())
        for kind, count in counts.items():
            if kind in _FLOAT_TYPES or kind == _TYPE.Q8_0:
                continue
            if not _can_dequantise(kind):
                info = next(i for i in self.tensors.values() if i.dtype == kind.name)
                raise CheckpointError(
                    f"{info} has type {kind.name}, which the installed gguf package cannot dequantise; expected F32, "
                    "F16, BF16, Q8_0 or one that it can: update that package, or take a file of another type"
                )
            self.notes.append(
                f"tensors stored as {kind.name} ({count} of {len(self.tensors)}) are dequantised, and quantised again "
                "to Q8"
            )


def canonical_from_gguf(stored: str) -> str | None:
    """vramjax's name of a tensor that GGUF calls `stored`, or None where it has no place in a decoder.

    Example: `blk.3.ffn_up.weight` is `layers.3.up.weight`.
    """
    if stored in _TOP_NAMES:
        return _TOP_NAMES[stored]
    match = _LAYER.fullmatch(stored)
    if match is None or match[2] not in _MODULES:
        return None
    return f"layers.{match[1]}.{_MODULES[match[2]]}.{match[3]}"


def gguf_from_canonical(name: str) -> str:
    """What GGUF calls the tensor `name`."""
    if name in _TOP_NAME_OF:
        return _TOP_NAME_OF[name]
    _, layer_idx, module, kind = name.split(".")
    return f"blk.{layer_idx}.{_MODULE_OF[module]}.{kind}"


def _read_parts(path: Path) -> list[GgufHeader]:
    """The headers of all parts, the one with the metadata first."""
    header = read_header(path)
    num_parts = header.metadata.get("split.count", 1)
    if type(num_parts) is not int or num_parts <= 1:
        return [header]
    match = PART.fullmatch(path.name)
    if match is None or int(match[3]) != num_parts:
        raise CheckpointError(
            f"{path} is one of {num_parts} parts of a split GGUF file, so it should be called "
            f"NAME-00001-of-{num_parts:05d}.gguf and so on; expected the names that it was split into"
        )
    headers = []
    for number in range(1, num_parts + 1):
        file = path.with_name(f"{match[1]}-{number:05d}-of-{num_parts:05d}.gguf")
        if not file.exists():
            raise CheckpointError(
                f"{file} does not exist; expected all {num_parts} parts of the split GGUF file in one directory"
            )
        part = header if file == path else read_header(file)
        if part.metadata.get("split.no") != number - 1 or part.metadata.get("split.count") != num_parts:
            raise CheckpointError(
                f"{file} says that it is part {part.metadata.get('split.no')} (from 0) of "
                f"{part.metadata.get('split.count')}; expected {number - 1} of {num_parts}"
            )
        headers.append(part)
    total = headers[0].metadata.get("split.tensors.count")
    found = sum(len(part.tensors) for part in headers)
    if total is not None and total != found:
        raise CheckpointError(
            f"the parts of {headers[0].path} have {found} tensors together; expected {total}, as it says"
        )
    return headers


def _by_name(stored: list[StoredTensor]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for tensor in stored:
        if (other := found.get(tensor.name)) is not None:
            raise CheckpointError(
                f"tensor {tensor.name} is in {other.file} and in {tensor.file}; expected it in one part"
            )
        found[tensor.name] = tensor
    return found


def _info(tensor: StoredTensor) -> TensorInfo:
    exact = tensor.type == _TYPE.Q8_0 and len(tensor.shape) == 2
    return TensorInfo(
        name=canonical_from_gguf(tensor.name) or "",
        stored_name=tensor.name,
        shape=tensor.shape,
        dtype=tensor.type.name,
        file=tensor.file,
        q8_group=_Q8_0_GROUP if exact else None,
    )


def _can_dequantise(kind: gguf.GGMLQuantizationType) -> bool:
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _read_bytes(tensor: StoredTensor) -> np.ndarray:
    """uint8 [nbytes]."""
    try:
        raw = np.fromfile(tensor.file, np.uint8, count=tensor.nbytes, offset=tensor.offset)
    except OSError as error:
        raise CheckpointError(
            f"tensor {tensor.name} in {tensor.file} cannot be read: {error.strerror or error}"
        ) from error
    if raw.size != tensor.nbytes:
        raise CheckpointError(
            f"tensor {tensor.name} in {tensor.file} has {raw.size} bytes; expected {tensor.nbytes}: the file has "
            "changed since it was opened"
        )
    return raw


def _read_float(tensor: StoredTensor) -> np.ndarray:
    """float32 of the tensor's shape."""
    raw = _read_bytes(tensor)
    if tensor.type == _TYPE.F32:
        return raw.view("<f4").astype(np.float32, copy=False).reshape(tensor.shape)
    if tensor.type == _TYPE.F16:
        return raw.view("<f2").astype(np.float32).reshape(tensor.shape)
    rows = raw.reshape(-1, tensor.nbytes * tensor.shape[-1] // _num_elements(tensor))
    # Damaged scales may be infinite; what comes of them is checked by whoever calls.
    with np.errstate(all="ignore"):
        values = gguf.dequantize(rows, tensor.type)
    return values.astype(np.float32, copy=False).reshape(tensor.shape)


def _read_q8_0(tensor: StoredTensor, info: TensorInfo, rows: np.ndarray | None) -> Q8Matrix:
    """Blocks of a float16 scale and 32 int8 values, along K."""
    n, k = tensor.shape
    blocks = _read_bytes(tensor).reshape(n, k // _Q8_0_GROUP, 2 + _Q8_0_GROUP)  # [N, G, 34]
    if rows is not None:
        blocks = blocks[rows]
    scales = np.ascontiguousarray(blocks[:, :, :2]).view("<f2")[:, :, 0].astype(np.float32)  # [N, G]
    check_finite(scales, info)
    values = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(n, k)
    return Q8Matrix(values=values, scales=np.ascontiguousarray(scales.T), k=k, group=_Q8_0_GROUP)


def _num_elements(tensor: StoredTensor) -> int:
    return int(np.prod(tensor.shape, dtype=np.int64))
