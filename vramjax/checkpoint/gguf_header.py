"""What a GGUF file says about itself before its weights begin: metadata and where each tensor lies.

Every length is checked against the size of the file before it is used, so that a damaged file gives one error that
says where it ends and where it should. (The `gguf` package's own reader has no such checks, and takes seconds for
the token lists that this one reads in a fraction of one; its tables of types are used here.) Knows no model.

    magic "GGUF", version u32, number of tensors u64, number of metadata entries u64
    metadata entries: key, type u32, value; a string is a u64 length and UTF-8
    tensors: name, number of dimensions u32, dimensions u64 (fastest first), type u32, offset u64
    padding to general.alignment, then the data that the offsets count from
"""

from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from vramjax.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a GGUF file, which holds all its bytes."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first: [N, K] for a matrix, which GGUF counts as K, N
    type: gguf.GGMLQuantizationType
    file: Path
    offset: int  # bytes from the beginning of the file
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """All that comes before the weights. Metadata values are int, float, bool, str, or a list of one of them."""

    path: Path
    metadata: dict[str, Any]
    tensors: list[StoredTensor]


def read_header(path: Path) -> GgufHeader:
    """Reads metadata and tensor table of one GGUF file; its weights are not touched.

    Raises:
      CheckpointError: there is no such file, it is no GGUF file of version 2 or 3, it is damaged or cut short, or it
        has a tensor type that the installed `gguf` package does not know.
    """
    if path.is_dir():
        raise CheckpointError(f"{path} is a directory; expected a GGUF file")
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size == 0:
                raise CheckpointError(f"{path} is empty (0 bytes); expected a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, path, size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Cursor:
    """Reads a file front to back and never past its end."""

    def __init__(self, data: mmap.mmap, path: Path, size: int) -> None:
        self.data = data
        self.path = path
        self.size = size
        self.position = 0
        self.reading = "the header"  # what the bytes at `position` belong to, for messages

    def advance(self, nbytes: int) -> int:
        """The position before skipping `nbytes`, all of which the file has."""
        start, end = self.position, self.position + nbytes
        if end > self.size:
            raise CheckpointError(
                f"{self.path} is {self.size} bytes, which end within {self.reading}; expected at least {end} bytes: "
                "it is cut short or damaged, get it again"
            )
        self.position = end
        return start

    def scalar(self, code: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.advance(struct.calcsize(layout)))[0]

    def string(self) -> str:
        length = self.scalar("Q")
        start = self.advance(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{self.reading} holds text that is not UTF-8 at byte {start}") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"{self.reading} has value type {kind}, but there are types 0 to 12")
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            self._check_room(count * 8)
            return [self.string() for _ in range(count)]
        if kind in _SCALARS:
            self._check_room(count * struct.calcsize(_SCALARS[kind]))
            layout = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack_from(layout, self.data, self.advance(struct.calcsize(layout))))
        raise self.damaged(f"{self.reading} is an array of value type {kind}; expected strings or numbers")

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged: {what}; get it again")

    def _check_room(self, nbytes: int) -> None:
        position = self.position
        self.advance(nbytes)
        self.position = position


def _parse(cursor: _Cursor) -> GgufHeader:
    magic = cursor.data[:4]
    if magic != MAGIC:
        raise CheckpointError(f"{cursor.path} begins with {magic!r}; expected {MAGIC!r}: it is not a GGUF file")
    cursor.advance(4)
    version = cursor.scalar("I")
    if version not in VERSIONS:
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{cursor.path} is a big-endian GGUF file; expected a little-endian one")
        raise CheckpointError(f"{cursor.path} has GGUF version {version}; expected version 2 or 3")
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")

    metadata: dict[str, Any] = {}
    for i in range(num_entries):
        cursor.reading = f"metadata entry {i + 1} of {num_entries}"
        key = cursor.string()
        cursor.reading = f"metadata entry {key!r}"
        if key in metadata:
            raise cursor.damaged(f"it has {cursor.reading} twice")
        metadata[key] = cursor.value(cursor.scalar("I"))

    entries = []
    for i in range(num_tensors):
        cursor.reading = f"tensor entry {i + 1} of {num_tensors}"
        entries.append(_tensor_entry(cursor))
    return GgufHeader(path=cursor.path, metadata=metadata, tensors=_place(cursor, metadata, entries))


def _tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]:
    name = cursor.string()
    cursor.reading = f"the entry of tensor {name}"
    num_dims = cursor.scalar("I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.damaged(f"tensor {name} has {num_dims} dimensions, but there are 1 to {_MAX_DIMS}")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    number, offset = cursor.scalar("I"), cursor.scalar("Q")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        known = ", ".join(t.name for t in gguf.GGMLQuantizationType)
        raise CheckpointError(
            f"tensor {name} in {cursor.path} has type number {number}; expected one that the installed gguf package "
            f"knows ({known}): update that package, or take a file of another type"
        ) from None
    return name, shape, kind, offset


def _place(
    cursor: _Cursor,
    metadata: dict[str, Any],
    entries: list[tuple[str, tuple[int, ...], gguf.GGMLQuantizationType, int]],
) -> list[StoredTensor]:
    """Checks that every tensor lies where tensors can, within the file."""
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.damaged(f"general.alignment is {alignment!r}, but it is always a power of two")
    data_start = -(-cursor.position // alignment) * alignment

    tensors: dict[str, StoredTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise cursor.damaged(f"it has tensor {name} twice")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_elements = 1
        for dim in shape:
            num_elements *= dim
        if num_elements == 0 or shape[-1] % block:
            raise cursor.damaged(
                f"tensor {name} of type {kind.name} has shape {list(shape)}, but rows of that type are a multiple of "
                f"{block} long and never empty"
            )
        if offset % alignment:
            raise cursor.damaged(f"tensor {name} is at offset {offset}, but offsets are multiples of {alignment}")
        tensors[name] = StoredTensor(
            name=name,
            shape=shape,
            type=kind,
            file=cursor.path,
            offset=data_start + offset,
            nbytes=num_elements // block * block_bytes,
        )
    by_position = sorted(tensors.values(), key=lambda t: t.offset)
    for before, after in itertools.pairwise(by_position):
        if before.offset + before.nbytes > after.offset:
            raise cursor.damaged(f"tensors {before.name} and {after.name} overlap")
    for tensor in by_position:
        if tensor.offset + tensor.nbytes > cursor.size:
            end = by_position[-1].offset + by_position[-1].nbytes
            raise CheckpointError(
                f"{cursor.path} is {cursor.size} bytes; expected {end} bytes, as tensor {tensor.name} ends at byte "
                f"{tensor.offset + tensor.nbytes}: it is cut short or damaged, get it again"
            )
    return list(tensors.values())
