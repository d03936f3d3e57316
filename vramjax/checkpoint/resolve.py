"""From what a user calls a model to a packed directory: found, or fetched and converted once into a cache.

A model is a packed directory, a Hugging Face directory, a GGUF file, a Hub id such as `Qwen/Qwen3-8B`, or `demo`.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from vramjax.checkpoint.convert import choose_groups, convert
from vramjax.checkpoint.demo import fetch_demo
from vramjax.checkpoint.gguf import PART, open_gguf
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.json_object import parse_object
from vramjax.checkpoint.packed import VERSION, Packed, group_names, is_packed, open_packed
from vramjax.checkpoint.source import Source, config_errors_name
from vramjax.config import ModelConfig
from vramjax.errors import CheckpointError, ConfigError
from vramjax.progress import print_notes
from vramjax.text.tokenizer import Tokenizer

# Neither a path (../x, ~/x) nor the name of a weights file that is missing.
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*(?<!\.gguf)(?<!\.safetensors)")
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")  # neither pickles nor other formats
_MOST_NAME_BYTES = 128  # of a model, in its conversion's name: file systems allow 255 for all of that


def default_cache_dir() -> Path:
    """$VRAMJAX_CACHE, else vramjax under the user's cache directory.

    Raises:
      ConfigError: the user has no home directory, and no variable says where else the cache is.
    """
    if own := os.environ.get("VRAMJAX_CACHE"):
        return Path(os.path.expanduser(own))
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vramjax"
    except RuntimeError as error:
        raise ConfigError("this user has no home directory; expected one for the cache: set VRAMJAX_CACHE") from error


def open_model(model: str | Path, *, cache_dir: Path | None = None, group: int = 128, progress: bool = True) -> Packed:
    """Opens `model`, whatever it is; what is not packed is converted into the cache first, and found there next time.

    Args:
      model: a path, a Hub id or "demo".
      cache_dir: where conversions and downloads of the demo model are kept; None: `default_cache_dir()`.
      group: inputs per scale of a conversion.
      progress: whether to show downloads and conversions on stderr.

    Raises:
      CheckpointError, ConfigError: there is no such model, or it cannot be used.
      TextError: its tokenizer cannot be used.
      BudgetError: the disk is too small for the conversion.
    """
    cache_dir = cache_dir or default_cache_dir()
    located = locate(model, cache_dir=cache_dir, progress=progress)
    if is_packed(located):
        return open_packed(located)
    cached = _cached_path(located, cache_dir, group)
    if not is_packed(cached):
        source = open_source(located)
        print_notes(source.notes, enabled=progress)
        convert(source, cached, group=group, progress=progress, wait=True)
    return open_packed(cached)


def locate(model: str | Path, *, cache_dir: Path, progress: bool = True) -> Path:
    """The local path of `model`; downloads it if it is a Hub id or the demo model.

    Raises:
      ConfigError: `model` is no text and no path.
      CheckpointError: there is no such model, or it cannot be downloaded.
    """
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model is {model!r}; expected a path, a Hub id such as Qwen/Qwen3-8B, or demo")
    if str(model) == "demo":
        return fetch_demo(cache_dir, progress=progress)
    path = Path(os.path.expanduser(model))
    if str(model) and path.exists():
        return path
    if HUB_ID.fullmatch(str(model)):
        return _from_hub(str(model), HUB_FILES)
    raise CheckpointError(
        f"model {str(model)!r} does not exist; expected a packed directory, a directory with safetensors, a .gguf "
        "file, a Hub id such as Qwen/Qwen3-8B, or demo"
    )


def open_source(path: Path) -> Source:
    """Opens a checkpoint that is not packed, by what it is: a directory, or a GGUF file.

    Raises:
      CheckpointError: it is neither, or its headers show that it cannot be used.
    """
    if is_packed(path):
        raise CheckpointError(f"{path} is packed already; expected a checkpoint to convert: use it as it is")
    if path.is_dir():
        return open_hf(path)
    if path.suffix != ".gguf":
        raise CheckpointError(f"{path} is no directory and does not end in .gguf; expected one of the two")
    return open_gguf(path)


def read_geometry(
    model: str | Path, *, cache_dir: Path | None = None, group: int = 128, progress: bool = True
) -> tuple[ModelConfig, dict[str, int]]:
    """The config of `model` and the groups of its matrices, from headers alone.

    A config.json is enough: the file, or a directory that holds it and no weights. Of a Hub id nothing else is read.

    Raises:
      CheckpointError, ConfigError: there is no such model, or it cannot be used.
    """
    cache_dir = cache_dir or default_cache_dir()
    if (config_path := _config_without_weights(model)) is not None:
        try:
            values = parse_object(config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{config_path} is not a JSON object: {error}") from error
        with config_errors_name(config_path):
            config = ModelConfig.from_hf(values)
        return config, dict.fromkeys(group_names(config), group)
    located = locate(model, cache_dir=cache_dir, progress=progress)
    if is_packed(located):
        packed = open_packed(located)
        return packed.config, packed.groups
    source = open_source(located)
    return source.config, choose_groups(source, group)


def read_tokenizer(model: str | Path, *, cache_dir: Path | None = None) -> Tokenizer | None:
    """The tokenizer of `model`, or None where it has none, or none is beside a config.json that is alone.

    Raises:
      CheckpointError, ConfigError: there is no such model, or it cannot be used.
      TextError: its tokenizer cannot be used.
    """
    config_path = _config_without_weights(model)
    path = config_path.parent if config_path else locate(model, cache_dir=cache_dir or default_cache_dir())
    with tempfile.TemporaryDirectory() as scratch:
        directory = path
        if not path.is_dir():
            directory = Path(scratch)
            open_source(path).write_text_files(directory)
        return Tokenizer.from_dir(directory, name=str(path)) if (directory / "tokenizer.json").is_file() else None


def _config_without_weights(model: str | Path) -> Path | None:
    """The config.json that stands for `model`, if there are no weights beside it; of a Hub id it is downloaded."""
    path = Path(os.path.expanduser(model))
    if str(model) != "demo" and not path.exists() and HUB_ID.fullmatch(str(model)):
        config_path = _from_hub(str(model), ("config.json",)) / "config.json"
        if not config_path.is_file():
            raise CheckpointError(f"{model} on huggingface.co has no config.json; expected a model with one")
        return config_path
    if str(model) and path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors")):
        return path / "config.json"
    return path if path.suffix == ".json" and path.is_file() else None


def _from_hub(repo_id: str, patterns: Sequence[str]) -> Path:
    """A directory with the files of a repository that match `patterns`; the Hub's many errors become one sentence."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    local_copy = "give the path of a local copy"
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(patterns)))
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{repo_id} is gated; accept its terms on huggingface.co and log in first") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo_id} is neither a local path nor a repository on huggingface.co; expected one of the two: check "
            "its name, or log in if it is private"
        ) from error
    except errors.HFValidationError as error:
        raise CheckpointError(
            f"{repo_id} is not a local path and cannot be a repository on huggingface.co: {str(error).splitlines()[0]}"
        ) from error
    except Exception as error:  # what an HTTP client raises is its own affair
        if constants.HF_HUB_OFFLINE:
            raise CheckpointError(
                f"{repo_id} is neither a local path nor in the cache of huggingface_hub, and HF_HUB_OFFLINE forbids to "
                f"download it; unset that, or {local_copy}"
            ) from error
        raise CheckpointError(
            f"{repo_id} is not a local path and could not be downloaded from huggingface.co "
            f"({_first_line(error)}); check the network and the free disk, or {local_copy}"
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _cached_path(source: Path, cache_dir: Path, group: int) -> Path:
    """Where the conversion of `source` is kept: a name that changes with any of the files that a conversion reads."""
    if source.is_dir():
        files = sorted(f for f in source.iterdir() if f.is_file() and any(f.match(pattern) for pattern in HUB_FILES))
    elif part := PART.fullmatch(source.name):
        siblings = ((file, PART.fullmatch(file.name)) for file in source.parent.iterdir())
        files = sorted(file for file, match in siblings if match and match.group(1, 3) == part.group(1, 3))
    else:
        files = [source]
    stamps = [f"{VERSION} {group} {source.resolve()}"]
    for file in files:
        status = file.stat()
        stamps.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
    digest = hashlib.sha256("\n".join(stamps).encode(errors="surrogateescape")).hexdigest()[:16]
    name = os.fsencode(source.resolve().name.removesuffix(".gguf"))[:_MOST_NAME_BYTES]
    return cache_dir / "packed" / f"{name.decode(errors='ignore')}-{digest}"  # not half a character
