"""Reading a packed file into given memory: the same bytes, no other memory, and every change is noticed."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from own_process import run_python

from vramjax.checkpoint import weight_file
from vramjax.checkpoint.safetensors_io import write_safetensors
from vramjax.checkpoint.weight_file import WeightFile
from vramjax.errors import CheckpointError

SHAPES = {
    "w": ((300, 512), np.dtype(np.int8)),
    "none": ((0, 4), np.dtype(np.int8)),
    "s": ((3, 300), np.dtype(np.float32)),
}


def content_of(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(-127, 128, shape).astype(dtype) for name, (shape, dtype) in SHAPES.items()}


def write(path: Path, seed: int) -> WeightFile:
    path.unlink(missing_ok=True)
    written = write_safetensors(path, SHAPES, content_of(seed).items())
    return WeightFile(path, written.sha256, SHAPES)


def empty() -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, dtype) for name, (shape, dtype) in SHAPES.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "layer.safetensors"


@pytest.mark.parametrize("drop_pages", [False, True])
@pytest.mark.parametrize("chunk_bytes", [8 << 20, 1000])
def test_the_bytes_arrive(path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, drop_pages: bool) -> None:
    monkeypatch.setattr(weight_file, "_CHUNK_BYTES", chunk_bytes)
    file = write(path, 1)
    arrays = empty()
    for _ in range(2):  # with the checksum, and without
        for array in arrays.values():
            array[...] = 0
        file.read_into(arrays, drop_pages=drop_pages)
        for name, array in content_of(1).items():
            np.testing.assert_array_equal(arrays[name], array)
    assert {name: (array.shape, array.dtype) for name, array in file.load().items()} == SHAPES


def test_short_reads_are_gone_on_with(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give less than was asked for."""
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:777]], offset))
    for name, array in write(path, 2).load().items():
        np.testing.assert_array_equal(array, content_of(2)[name])


def test_threads_read_at_once(path: Path) -> None:
    file = write(path, 3)
    with ThreadPoolExecutor(8) as pool:
        for arrays in pool.map(lambda i: file.load(), range(32)):
            for name, array in content_of(3).items():
                np.testing.assert_array_equal(arrays[name], array)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def cut_to_nothing(path: Path) -> None:
    os.truncate(path, 0)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        file.write(b"xxxxx")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # coarse clocks would not show it so soon


def replace(path: Path) -> None:
    """Another file of the same size and, as a copy may be made, of the same time."""
    status = path.stat()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(path)


def remove(path: Path) -> None:
    path.unlink()


CHANGES: dict[Callable[[Path], None], str] = {
    cut: "bytes and had [0-9]+; expected no change while the model is in use: load it again",
    cut_to_nothing: "has 0 bytes and had",
    overwrite: "was written to or replaced; expected no change",
    replace: "was written to or replaced; expected no change",
    remove: "cannot be read: No such file or directory",
}


@pytest.mark.parametrize(("change", "message"), CHANGES.items(), ids=lambda case: getattr(case, "__name__", ""))
def test_a_change_after_the_first_read_is_noticed(path: Path, change: Callable[[Path], None], message: str) -> None:
    file = write(path, 4)
    file.load()
    change(path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message) as caught:
            file.load()
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("change", [cut, cut_to_nothing, overwrite])
def test_a_change_in_the_middle_of_a_read_is_noticed(
    path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], is_first: bool
) -> None:
    file = write(path, 5)
    if not is_first:
        file.load()
    monkeypatch.setattr(weight_file, "_CHUNK_BYTES", 10_000)
    preadv, calls = os.preadv, []

    def changing(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 6:
            change(path)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", changing)
    with pytest.raises(CheckpointError, match=str(path)) as caught:
        file.load()
    assert len(calls) >= 6 and "\n" not in str(caught.value)


def test_a_file_written_anew_with_the_same_bytes_is_fine_for_who_opens_it_anew(path: Path) -> None:
    write(path, 6).load()
    replace(path)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    WeightFile(path, sha256, SHAPES).load()


def test_what_is_damaged_is_not_taken_for_checked(path: Path) -> None:
    file = write(path, 7)
    overwrite(path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"has SHA-256 .*; expected .*: it changed since it was written"):
            file.load()


def test_an_input_output_error_is_one_sentence(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    file = write(path, 8)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError, match=r"layer\.safetensors cannot be read: Input/output error$"):
        file.load()


def pages_in_cache(path: Path) -> int:
    """Pages of a file that the system has in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        flags = (ctypes.c_ubyte * -(-len(mapped) // mmap.PAGESIZE))()
        anchor = ctypes.c_char.from_buffer(mapped)
        result = libc.mincore(ctypes.c_void_p(ctypes.addressof(anchor)), ctypes.c_size_t(len(mapped)), flags)
        del anchor
        assert result == 0
    return sum(flag & 1 for flag in flags)


def test_pages_are_dropped_when_they_are_consumed_and_read_ahead_when_asked(path: Path) -> None:
    file = write(path, 9)
    num_pages = -(-path.stat().st_size // mmap.PAGESIZE)
    file.read_into(empty())
    assert pages_in_cache(path) == num_pages
    file.read_into(empty(), drop_pages=True)
    if pages_in_cache(path) == num_pages:
        pytest.skip("this file system lives in memory")
    assert pages_in_cache(path) <= 1
    file.will_need()
    file.load()
    assert pages_in_cache(path) == num_pages
    path.unlink()
    file.will_need()  # who reads it will notice


def test_reading_takes_no_memory_beyond_the_arrays(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
import numpy as np
from own_process import peak_bytes
from vramjax.checkpoint.safetensors_io import write_safetensors
from vramjax.checkpoint.weight_file import WeightFile
path, size = Path(sys.argv[1]), 200 << 20
array = np.ones(size, np.int8)
shapes = {"w": (array.shape, array.dtype)}
sha256 = write_safetensors(path, shapes, [("w", array)]).sha256
before = peak_bytes()
WeightFile(path, sha256, shapes).read_into({"w": array}, drop_pages=True)
print(peak_bytes() - before)
"""
    assert int(run_python(code, tmp_path / "big")) < 8 << 20
