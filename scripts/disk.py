"""The disk's ceiling: the rate at which files can be read that the system holds nothing of in its memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_CHUNK_BYTES = 8 << 20


def read_gb_per_s(paths: Sequence[Path], *, num_threads: int, repeats: int = 2) -> float:
    """The best rate of reading all of `paths` from disk, by so many threads, each a file at a time from its beginning.

    The system's page cache is dropped before each time.
    """
    num_bytes = sum(path.stat().st_size for path in paths)
    seconds = []
    for _ in range(repeats):
        drop_page_cache(paths)
        start = time.perf_counter()
        with ThreadPoolExecutor(num_threads) as pool:
            assert sum(pool.map(_read, paths)) == num_bytes
        seconds.append(time.perf_counter() - start)
    return num_bytes / min(seconds) / 1e9


def drop_page_cache(paths: Sequence[Path]) -> None:
    """Writes to disk what is not there yet, and has the system forget it."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_fraction(paths: Sequence[Path]) -> float | None:
    """The share of the files that is in the system's page cache; None where it does not say."""
    libc = ctypes.CDLL(None, use_errno=True)
    cached = pages = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            num_pages = -(-len(mapped) // mmap.PAGESIZE)
            seen = np.zeros(num_pages, np.uint8)
            address = np.frombuffer(mapped, np.uint8).ctypes.data
            failed = libc.mincore(
                ctypes.c_void_p(address), ctypes.c_size_t(len(mapped)), seen.ctypes.data_as(ctypes.c_void_p)
            )
            if failed:
                return None
            cached, pages = cached + int((seen & 1).sum()), pages + num_pages
    return cached / pages


def _read(path: Path) -> int:
    """Reads a file once, into memory that is used over and over; returns its bytes."""
    block = memoryview(bytearray(_CHUNK_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        position = 0
        while num_bytes := os.preadv(descriptor, [block], position):
            position += num_bytes
        return position
    finally:
        os.close(descriptor)
