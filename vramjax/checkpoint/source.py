"""What every checkpoint format offers to whoever converts it, and the checks that all formats share.

Knows no format. Nothing here reads a file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from vramjax.checkpoint.names import expected_tensors
from vramjax.config import ModelConfig
from vramjax.errors import CheckpointError, ConfigError
from vramjax.quantize import Q8Matrix

_CHECK_ELEMENTS = 1 << 22  # elements looked at together, which bounds the memory that a check takes


@contextlib.contextmanager
def config_errors_name(path: Path) -> Iterator[None]:
    """Around what makes a config of what a file says: the file is named."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One stored tensor, as far as headers tell."""

    name: str  # vramjax's name; "" for a tensor that the format cannot place
    stored_name: str  # what the file calls it
    shape: tuple[int, ...]  # [N, K] for a matrix, whatever order the file counts dimensions in
    dtype: str  # as the file says it, for messages
    file: Path
    q8_group: int | None = None  # the group of a tensor that is stored as Q8 and carried over exactly

    def __str__(self) -> str:
        return f"tensor {self.stored_name} in {self.file}"


class Source(Protocol):
    """An opened checkpoint whose headers have all been checked: every tensor of the config is there, and no other.

    Opening reads no weights, so that whatever is wrong with names, shapes and sizes is said before any work.
    """

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By vramjax's name; exactly the keys of `expected_tensors(config)`."""
        ...

    @property
    def notes(self) -> list[str]:
        """Sentences for the user: what was skipped, ignored or requantised."""
        ...

    def read(self, name: str) -> np.ndarray | Q8Matrix:
        """One tensor by vramjax's name: float32 of the tensor's shape, or a Q8Matrix where `q8_group` is set.

        Raises:
          CheckpointError: it has a NaN or an infinity, or can no longer be read.
        """
        ...

    def write_text_files(self, dst: Path) -> None:
        """Puts those of `text.tokenizer.TEXT_FILES` that there are, or that can be made, into the directory `dst`."""
        ...


def match_tensors(
    config: ModelConfig,
    stored: Iterable[TensorInfo],
    *,
    where: Path,
    stored_name_of: Callable[[str], str] = lambda name: name,
) -> dict[str, TensorInfo]:
    """Pairs what a checkpoint stores with what its config calls for, exactly.

    Args:
      config: the model.
      stored: all tensors of the checkpoint that are not on its skip list; name "" for those with no place.
      where: the checkpoint, for messages.
      stored_name_of: vramjax's name -> the name that the format would use, for messages.

    Returns:
      vramjax's name -> tensor, in the order of `expected_tensors`.

    Raises:
      CheckpointError: a tensor is stored twice, misshapen, missing, or not part of the model; the first is named.
    """
    stored = list(stored)
    if config.num_layers > len(stored):  # before anything is made for each of them
        raise CheckpointError(
            f"{where} has {len(stored)} tensors; expected those of {config.num_layers} layers, which its config calls "
            "for"
        )
    expected = expected_tensors(config)
    found: dict[str, TensorInfo] = {}
    unused: list[TensorInfo] = []
    for info in stored:
        if info.name not in expected:
            unused.append(info)
            continue
        if (other := found.get(info.name)) is not None:
            raise CheckpointError(f"{other} and {info} are both {info.name}; expected it once")
        if info.shape != expected[info.name]:
            raise CheckpointError(_shape_message(info, expected[info.name]))
        found[info.name] = info
    missing = [name for name in expected if name not in found]
    if missing:
        also = f" ({len(missing)} tensors are missing)" if len(missing) > 1 else ""
        near = f"; it has {unused[0].stored_name}, which has no place" if unused else ""
        raise CheckpointError(
            f"{where} has no tensor {stored_name_of(missing[0])} of shape {list(expected[missing[0]])}, which its "
            f"config calls for{also}{near}"
        )
    if unused:
        also = f" ({len(unused)} such tensors)" if len(unused) > 1 else ""
        raise CheckpointError(
            f"{unused[0]}, of shape {list(unused[0].shape)}, is not part of a {config.family} model with this config"
            f"{also}; expected every tensor to be used"
        )
    return {name: found[name] for name in expected}


def _shape_message(info: TensorInfo, expected: tuple[int, ...]) -> str:
    message = f"{info} has shape {list(info.shape)}; expected {list(expected)}"
    if len(expected) == 2 and info.shape == expected[::-1]:
        message += ", of which it is the transpose"
    return message


def check_finite(values: np.ndarray, info: TensorInfo) -> None:
    """Raises CheckpointError if a float tensor has a NaN or an infinity; the message says where the first one is."""
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHECK_ELEMENTS):
        finite = np.isfinite(flat[start : start + _CHECK_ELEMENTS])
        if not finite.all():
            position = start + int(np.argmin(finite))
            index = [int(i) for i in np.unravel_index(position, values.shape)]
            raise CheckpointError(f"{info} has {flat[position]} at {index}; expected finite numbers")
