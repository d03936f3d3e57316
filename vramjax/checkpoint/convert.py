"""Any checkpoint to a packed directory, tensor by tensor.

At any time there are at most one tensor in float32 and one layer (or one embedding) in Q8 in memory. The work is done
in a directory beside the destination, which is renamed at the very end: the destination is absent or complete.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from vramjax.checkpoint.packed import (
    FORMAT,
    HEAD_FILE,
    MANIFEST,
    PARTIAL_NAME,
    VERSION,
    group_names,
    head_bytes,
    head_shapes,
    is_packed,
    layer_file,
    manifest_digest,
)
from vramjax.checkpoint.safetensors_io import WrittenFile, write_safetensors
from vramjax.checkpoint.source import Source
from vramjax.checkpoint.weight_file import Identity, identity_of
from vramjax.errors import BudgetError, CheckpointError, ConfigError
from vramjax.layout import PARTS, LayerLayout, MatrixSpec
from vramjax.progress import progress_bar
from vramjax.quantize import GROUP_SIZES, Q8Matrix, quantize
from vramjax.text.tokenizer import TEXT_FILES, Tokenizer
from vramjax.units import gib

_BLOCK_ELEMENTS = 1 << 20  # floats quantised at a time by one thread
_SPARE_BYTES = 64 << 20  # room for text files, headers and the file system
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, `ulimit -f`
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP)  # what a file system says that has none: nobody holds one there

Advance = Callable[[int], None]


def convert(src: Source, dst: Path, *, group: int = 128, progress: bool = True, wait: bool = False) -> Path:
    """Writes `src` as a packed directory `dst` and returns `dst`.

    A matrix that is stored as Q8 keeps its values, scales and group exactly, and so do, with that group, the matrices
    that it is fused with (q, k, v; gate, up); everything else is quantised in groups of `group` inputs.

    Args:
      src: an opened checkpoint.
      dst: where to; absent or an empty directory. Its parents are made.
      group: inputs that share a scale: 128, 64 or 32.
      progress: whether to show a bar on stderr.
      wait: take what another process wrote to `dst`, and wait for one that is at it.

    Raises:
      ConfigError: `group` is none of these, or `dst` has a name that is kept for unfinished conversions.
      CheckpointError: `dst` is taken, another process is writing it, a tensor cannot be used, or a file that weights
        are read from changes meanwhile.
      TextError: there is a tokenizer, and it cannot be used; noticed before weights are read.
      BudgetError: the disk is too small.
      On any exception, KeyboardInterrupt included, nothing is left at `dst` or beside it.
    """
    if group not in GROUP_SIZES:
        raise ConfigError(f"group is {group}; expected one of {', '.join(map(str, GROUP_SIZES))}")
    dst = Path(os.path.realpath(dst))
    if PARTIAL_NAME.fullmatch(dst.name):
        raise ConfigError(f"{dst} has a name that is kept for unfinished conversions; expected another")
    groups = choose_groups(src, group)
    num_bytes = packed_bytes(src, groups)
    with _only_one_process(dst, wait=wait):
        if wait and is_packed(dst):  # finished while this process waited, or before it got here
            return dst
        if os.path.lexists(dst) and not (dst.is_dir() and not any(dst.iterdir())):
            raise CheckpointError(f"{dst} exists already; expected a new path: choose another, or remove it first")
        for path in list(dst.parent.iterdir()):
            match = PARTIAL_NAME.fullmatch(path.name)
            is_own = match is not None and match[1] == dst.name and path.is_dir() and not path.is_symlink()
            if is_own:  # of a process that was killed
                shutil.rmtree(path)
        _check_free_disk(dst, num_bytes)
        partial = dst.parent / f".{dst.name}.partial-{os.getpid()}"
        try:
            partial.mkdir()
            with progress_bar(f"Converting {src.path.name}", total=num_bytes, enabled=progress) as advance:
                _write_all(src, partial, groups, advance)
            _sync_directory(partial)
            os.rename(partial, dst)
            _sync_directory(dst.parent)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise BudgetError(
                    f"{dst} cannot be written ({error.strerror}); expected room for {gib(num_bytes)}: make room, or "
                    "choose a path on another disk"
                ) from error
            raise
    return dst


def choose_groups(src: Source, group: int) -> dict[str, int]:
    """The group of each fused matrix: that of its parts which are stored as Q8 in any layer, else `group`."""
    names = {f"layers.{i}.{part}.weight": m for i in range(src.config.num_layers) for m in PARTS for part in PARTS[m]}
    names |= {"embed.weight": "embed", "head.weight": "head"}
    groups = dict.fromkeys(group_names(src.config), group)
    for name, info in src.tensors.items():
        if info.q8_group is not None and name in names:
            assert info.q8_group in GROUP_SIZES, info
            groups[names[name]] = info.q8_group
    return groups


def packed_bytes(src: Source, groups: Mapping[str, int]) -> int:
    """Bytes of all arrays that a conversion writes."""
    layers = LayerLayout.of(src.config, groups).num_bytes * src.config.num_layers
    return layers + head_bytes(src.config, groups)


def _write_all(src: Source, partial: Path, groups: dict[str, int], advance: Advance) -> None:
    opened = _identities(src)
    src.write_text_files(partial)  # first, as weights take long
    if (partial / "tokenizer.json").exists():
        Tokenizer.from_dir(partial, name=str(src.path))
    files: dict[str, WrittenFile] = {}
    layout = LayerLayout.of(src.config, groups)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for layer_idx in range(src.config.num_layers):
            arrays = _pack_layer(src, layout, layer_idx, pool, advance)
            name = layer_file(layer_idx)
            files[name] = write_safetensors(partial / name, layout.shapes, iter(arrays.items()))
            del arrays
        shapes = head_shapes(src.config, groups)
        arrays_of_head = _head_arrays(src, groups, pool, advance)
        files[HEAD_FILE] = write_safetensors(partial / HEAD_FILE, shapes, arrays_of_head)
    for file, identity in _identities(src).items():
        if identity != opened[file]:
            raise CheckpointError(
                f"{file} was changed or removed while it was converted; expected no change: convert it again"
            )
    for path in sorted(partial.iterdir()):
        if path.name not in files:
            assert path.name in TEXT_FILES, path
            content = path.read_bytes()
            files[path.name] = WrittenFile(num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
            with path.open("rb") as file:
                os.fsync(file.fileno())
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "config": src.config.to_json(),
        "groups": groups,
        "files": {name: {"bytes": f.num_bytes, "sha256": f.sha256} for name, f in files.items()},
        "source": {"name": src.path.name, "dtypes": sorted({info.dtype for info in src.tensors.values()})},
        "notes": src.notes,
    }
    with (partial / MANIFEST).open("x", encoding="utf-8") as file:
        json.dump(manifest | {"digest": manifest_digest(manifest)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _identities(src: Source) -> dict[Path, Identity | None]:
    """Of each file that weights are read from; None if it is gone."""
    found: dict[Path, Identity | None] = {}
    for file in {info.file for info in src.tensors.values()}:
        try:
            found[file] = identity_of(file.stat())
        except FileNotFoundError:
            found[file] = None
    return found


def _pack_layer(
    src: Source, layout: LayerLayout, layer_idx: int, pool: ThreadPoolExecutor, advance: Advance
) -> dict[str, np.ndarray]:
    layer = f"layers.{layer_idx}."
    matrices: dict[str, Q8Matrix] = {}
    vectors = {norm: _read_vector(src, f"{layer}{norm}.weight") for norm in ("input_norm", "post_norm")}
    for name, spec in layout:
        parts = [f"{layer}{part}" for part in PARTS[name]]
        matrices[name] = _pack_matrix(src, [f"{part}.weight" for part in parts], spec, pool)
        if layout.param(f"{name}_bias") is not None:
            vectors[f"{name}_bias"] = np.concatenate([_read_vector(src, f"{part}.bias") for part in parts])
        advance(matrices[name].values.nbytes)
    for norm in ("q_norm", "k_norm"):
        if layout.param(norm) is not None:
            vectors[norm] = _read_vector(src, f"{layer}{norm}.weight")
    arrays = layout.pack(matrices, vectors)
    advance(arrays["params"].nbytes)
    return arrays


def _head_arrays(
    src: Source, groups: Mapping[str, int], pool: ThreadPoolExecutor, advance: Advance
) -> Iterator[tuple[str, np.ndarray]]:
    config = src.config
    for name in ("embed",) if config.tied_embeddings else ("embed", "head"):
        spec = MatrixSpec(n=config.vocab_size, k=config.hidden_size, group=groups[name])
        matrix = _pack_matrix(src, [f"{name}.weight"], spec, pool)
        yield name, matrix.values
        yield f"{name}_scales", matrix.scales
        advance(matrix.values.nbytes + matrix.scales.nbytes)
        del matrix  # before the next is made
    yield "final_norm", _read_vector(src, "final_norm.weight")


def _read_vector(src: Source, name: str) -> np.ndarray:
    values = src.read(name)
    assert isinstance(values, np.ndarray), name
    return values


def _pack_matrix(src: Source, names: list[str], spec: MatrixSpec, pool: ThreadPoolExecutor) -> Q8Matrix:
    """Reads matrices that share their input and stacks them, in Q8, with rows of zeros below."""
    values = np.zeros(spec.values_shape, np.int8)
    scales = np.zeros(spec.scales_shape, np.float32)
    row = 0
    for name in names:
        part = src.read(name)
        if isinstance(part, Q8Matrix):
            assert (part.group, part.k) == (spec.group, spec.k), name
            values[row : row + part.rows] = part.values
            scales[:, row : row + part.rows] = part.scales
            row += part.rows
        else:
            _quantize_into(values[row : row + len(part)], scales[:, row : row + len(part)], part, spec.group, pool)
            row += len(part)
        del part  # before the next is read
    assert row == spec.n, (names, row, spec)
    return Q8Matrix(values=values, scales=scales, k=spec.k, group=spec.group)


def _quantize_into(
    values: np.ndarray, scales: np.ndarray, weight: np.ndarray, group: int, pool: ThreadPoolExecutor
) -> None:
    """`quantize`, which treats rows alike, a block of rows at a time: its temporaries stay small."""
    step = max(1, _BLOCK_ELEMENTS // weight.shape[1])

    def one_block(start: int) -> None:
        block = quantize(weight[start : start + step], group)
        values[start : start + step] = block.values
        scales[:, start : start + step] = block.scales

    for _ in pool.map(one_block, range(0, len(weight), step)):
        pass


def _check_free_disk(dst: Path, num_bytes: int) -> None:
    free_bytes = shutil.disk_usage(dst.parent).free
    if free_bytes < num_bytes + _SPARE_BYTES:
        raise BudgetError(
            f"{dst} needs {gib(num_bytes + _SPARE_BYTES)} of disk; there are {gib(free_bytes)} free: make room, or "
            "choose a path on another disk"
        )


@contextmanager
def _only_one_process(dst: Path, *, wait: bool) -> Iterator[None]:
    """Holds a lock on `dst` that ends with the process, however it ends."""
    path = dst.parent / f".{dst.name}.lock"
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("a")
        except OSError as error:
            raise CheckpointError(f"{dst} cannot be written: {error.strerror}; choose another path") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise CheckpointError(
                        f"another process is writing {dst}; expected none: wait until it is done"
                    ) from None
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    path.unlink(missing_ok=True)
                raise CheckpointError(
                    f"{path} cannot be locked: {error.strerror}; expected a file system with locks: choose another path"
                ) from error
            if not _is_same_file(path, lock.fileno()):
                continue  # whoever held the lock has removed the file: a lock on what is gone keeps nobody out
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_same_file(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
