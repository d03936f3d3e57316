"""Safetensors files by plain reads and writes: headers checked to the byte, memory bounded, bfloat16 exact.

A file is 8 bytes of header length, a JSON header, then the tensors. Reading goes through ordinary file reads, so that
what a process holds is what it asked for, and a file that shrinks meanwhile is an error; the safetensors library maps
files, where that kills the process. Writing goes tensor by tensor and hashes on the way, where the library wants all
of a file's tensors at once. Tests compare both with the library. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vramjax.checkpoint.json_object import parse_object
from vramjax.errors import CheckpointError

FLOAT_DTYPES = ("F32", "F16", "BF16")
_NUMPY_DTYPE = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "I8": np.dtype("i1")}
_DTYPE_NAME = {np.dtype(np.float32): "F32", np.dtype(np.int8): "I8"}

_MAX_HEADER_BYTES = 100_000_000
_DATA_ALIGNMENT = 64
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One entry of a header: `num_bytes` bytes from byte `start` of the file on."""

    name: str
    dtype: str  # as the header says it: F32, BF16, F8_E4M3, ...
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name, in the order they lie in the file.

    Raises:
      CheckpointError: the file is no safetensors file, is cut short, or contradicts its own header.
    """
    try:
        actual = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} has {actual} bytes; expected at least 8: download it again")
            header_bytes = int.from_bytes(prefix, "little")
            if header_bytes > _MAX_HEADER_BYTES:
                raise CheckpointError(_not_safetensors(path, prefix))
            if 8 + header_bytes > actual:
                raise CheckpointError(
                    f"{path} has {actual} bytes; expected more than {8 + header_bytes}, as its header alone takes "
                    "those: download it again"
                )
            text = file.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    tensors = _parse_header(path, text)
    data_start = 8 + header_bytes
    end = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.num_bytes)):
        if data_start + tensor.start != end:
            raise CheckpointError(
                f"{path}: tensor {tensor.name} begins at byte {data_start + tensor.start}; expected {end}, where the "
                "one before it ends"
            )
        end += tensor.num_bytes
    if end != actual:
        raise CheckpointError(f"{path} has {actual} bytes; expected {end}: download it again")
    return {
        name: StoredTensor(
            name=name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            start=data_start + tensor.start,
            num_bytes=tensor.num_bytes,
        )
        for name, tensor in tensors.items()
    }


def _not_safetensors(path: Path, prefix: bytes) -> str:
    if prefix == b"version ":
        return f"{path} is a Git LFS pointer; expected the weights themselves: run `git lfs pull`"
    return f"{path} does not begin with the length of a header; expected a safetensors file"


def _parse_header(path: Path, text: bytes) -> dict[str, StoredTensor]:
    def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a name stands in it twice")
        return table

    try:
        header = parse_object(text, object_of=no_duplicates)
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            dtype = entry["dtype"]
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)) or not isinstance(dtype, str):
                raise ValueError(f"the entry of tensor {name} is {entry!r}")
            if dtype in _NUMPY_DTYPE and end - begin != math.prod(shape) * _NUMPY_DTYPE[dtype].itemsize:
                raise ValueError(f"tensor {name}, {dtype} {list(shape)}, has {end - begin} bytes")
            tensors[name] = StoredTensor(name=name, dtype=dtype, shape=shape, start=begin, num_bytes=end - begin)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} has a header that cannot be used: {error}; download it again") from error
    return tensors


def read_float32_chunks(path: Path, tensor: StoredTensor) -> Iterator[np.ndarray]:
    """A float tensor as consecutive flat float32 pieces of one bounded size; F32, F16 and BF16 are exact.

    Raises:
      CheckpointError: the file can no longer be read, or has become too short.
    """
    dtype = _NUMPY_DTYPE[tensor.dtype]
    try:
        with path.open("rb") as file:
            file.seek(tensor.start)
            left = tensor.num_bytes
            while left:
                raw = file.read(min(left, _CHUNK_ELEMENTS * dtype.itemsize))
                if not raw or len(raw) % dtype.itemsize:
                    raise CheckpointError(f"{path} was cut short while tensor {tensor.name} was read; get it again")
                left -= len(raw)
                piece = np.frombuffer(raw, dtype)
                if tensor.dtype == "BF16":  # the upper half of a float32
                    yield (piece.astype(np.uint32) << np.uint32(16)).view(np.float32)
                else:
                    yield piece.astype(np.float32)
    except OSError as error:
        raise CheckpointError(f"tensor {tensor.name} in {path} cannot be read: {error.strerror}") from error


def read_float32(path: Path, tensor: StoredTensor) -> np.ndarray:
    """A float tensor in float32."""
    result = np.empty(math.prod(tensor.shape), np.float32)
    position = 0
    for piece in read_float32_chunks(path, tensor):
        result[position : position + piece.size] = piece
        position += piece.size
    return result.reshape(tensor.shape)


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """Size and checksum of a finished file."""

    num_bytes: int
    sha256: str


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]],
    arrays: Iterable[tuple[str, np.ndarray]],
) -> WrittenFile:
    """Writes one file, array by array, and syncs it to disk.

    Args:
      path: a new file.
      shapes: name -> (shape, dtype float32 or int8), in the order of the file.
      arrays: the same names in the same order; each is asked for when the one before it is written.
    """
    header: dict[str, Any] = {}
    offset = 0
    for name, (shape, dtype) in shapes.items():
        num_bytes = math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _DTYPE_NAME[dtype],
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _DATA_ALIGNMENT)

    digest = hashlib.sha256()
    with path.open("xb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            file.write(block)
            digest.update(block)
        for (name, array), (expected_name, (shape, dtype)) in zip(arrays, shapes.items(), strict=True):
            assert (name, array.shape, array.dtype) == (expected_name, shape, dtype), (name, array.shape, array.dtype)
            block = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            file.write(block)
            digest.update(block)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(num_bytes=8 + len(text) + offset, sha256=digest.hexdigest())
