"""One file of a packed directory, read straight into memory that is given, and watched for changes.

Knows bytes and their checksum, and how to keep the system's page cache out of the way; not what the arrays mean.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vramjax.checkpoint.safetensors_io import StoredTensor, read_header
from vramjax.errors import CheckpointError

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype]]

_CHUNK_BYTES = 8 << 20  # hashed while it is still in the processor's cache
_DTYPE_OF = {"F32": "float32", "I8": "int8"}

Identity = tuple[int, int, int, int]  # device, inode, bytes, nanoseconds of the last change


class WeightFile:
    """A safetensors file whose arrays are read into given arrays, by any number of threads.

    Invariant: arrays that `read_into` has filled are what was written when the directory was made. The first read
    checks the SHA-256 of the whole file; a later one that it is the same file and that nobody has written to it since.

    Example: `file.read_into({"w": np.empty((64, 32), np.int8)})` fills w, or raises and says which file is damaged.
    """

    def __init__(self, path: Path, sha256: str, shapes: Shapes) -> None:
        """The file at `path`, which is expected to hold arrays of `shapes` and nothing else. Reads nothing yet."""
        self.path = path
        self.shapes = shapes
        self._sha256 = sha256
        self._verified: tuple[Identity, dict[str, StoredTensor]] | None = None

    def read_into(self, arrays: Mapping[str, np.ndarray], *, drop_pages: bool = False) -> None:
        """Fills `arrays`, which have the file's names, shapes and dtypes, and are row-major and dense.

        Args:
          arrays: where to.
          drop_pages: whether the system's copy of the file is dropped from memory afterwards, as it is for whoever
            reads more than fits there, over and over.

        Raises:
          CheckpointError: the file is missing, damaged, or has changed; what is in `arrays` then is undefined.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._read(descriptor, arrays)
                if drop_pages:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror}") from error

    def will_need(self) -> None:
        """Asks the system to begin reading the file into its memory. Returns at once, and never fails."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # who reads it will say so
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(descriptor)

    def load(self) -> dict[str, np.ndarray]:
        """The arrays in new memory; see `read_into`."""
        arrays = {name: np.empty(shape, dtype) for name, (shape, dtype) in self.shapes.items()}
        self.read_into(arrays)
        return arrays

    def _read(self, descriptor: int, arrays: Mapping[str, np.ndarray]) -> None:
        identity = identity_of(os.fstat(descriptor))
        if self._verified is None:
            tensors, digest = self._checked(read_header(self.path)), hashlib.sha256()
        else:
            known, tensors = self._verified
            self._check_unchanged(known, identity)
            digest = None
        blocks = sorted(((tensor.start, arrays[name]) for name, tensor in tensors.items()), key=lambda block: block[0])
        if digest is not None:
            header = np.empty(blocks[0][0] if blocks else identity[2], np.uint8)
            blocks.insert(0, (0, header))
        for start, array in blocks:
            assert array.flags.c_contiguous and array.flags.writeable
            if not _read_block(descriptor, start, array.reshape(-1).view(np.uint8).data, digest):
                self._check_unchanged(identity, identity_of(os.fstat(descriptor)))
                raise CheckpointError(f"{self.path} ends before its last array; expected {identity[2]} bytes in it")
        if digest is None:
            self._check_unchanged(identity, identity_of(os.fstat(descriptor)))
            return
        check_sha256(self.path, digest.hexdigest(), self._sha256)
        self._check_unchanged(identity, identity_of(os.stat(self.path)))  # the header came from the same file
        self._verified = identity, tensors

    def _checked(self, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
        for name in dict.fromkeys([*self.shapes, *tensors]):
            expected, actual = "no such array", "absent"
            if name in self.shapes:
                shape, dtype = self.shapes[name]
                expected = f"{dtype} {list(shape)}"
            if name in tensors:
                stored = tensors[name]
                actual = f"{_DTYPE_OF.get(stored.dtype, stored.dtype)} {list(stored.shape)}"
            if actual != expected:
                raise CheckpointError(
                    f"{self.path}: {name} is {actual}; expected {expected}: convert the checkpoint again"
                )
        return tensors

    def _check_unchanged(self, known: Identity, now: Identity) -> None:
        if known != now:
            what = f"has {now[2]} bytes and had {known[2]}" if known[2] != now[2] else "was written to or replaced"
            raise CheckpointError(f"{self.path} {what}; expected no change while the model is in use: load it again")


def check_sha256(path: Path, actual: str, expected: str) -> None:
    """Raises CheckpointError if the checksum of a file, in hex, is not the one that was written down for it."""
    if actual != expected:
        raise CheckpointError(
            f"{path} has SHA-256 {actual}; expected {expected}: it changed since it was written, convert the "
            "checkpoint again"
        )


def _read_block(descriptor: int, start: int, block: memoryview, digest: hashlib._Hash | None) -> bool:
    """Fills `block` with what is in the file from byte `start` on; False if that ends before."""
    while block:
        num_bytes = os.preadv(descriptor, [block[:_CHUNK_BYTES]], start)
        if not num_bytes:
            return False
        if digest is not None:
            digest.update(block[:num_bytes])
        start += num_bytes
        block = block[num_bytes:]
    return True


def identity_of(status: os.stat_result) -> Identity:
    """What differs if a file was written to or replaced in between."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
