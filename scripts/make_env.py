"""Makes the environment that the Makefile's commands run in: a venv with vramjax and the right JAX for this machine.

Standard library only, as nothing is installed yet. Usage: python3 scripts/make_env.py VENV [EXTRA ...]

What is installed stands in a file in the venv, its stamp. An extra that is missing is added to what there is; a
change of pyproject.toml, of Python or of the GPU driver's generation makes the venv anew.
"""

from __future__ import annotations  # which an older Python reads as well, to be told in `main` that it is one

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
STAMP = "vramjax-ready"
# The first driver whose CUDA each set of wheels runs on.
CUDA_EXTRAS = ((580, "cuda13"), (525, "cuda12"))


def cuda_extra() -> str | None:
    """The extra with JAX for this machine's NVIDIA driver, or None where there is no (recent) one."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.match(r"\d+", done.stdout)
    if done.returncode or match is None:
        return None
    return next((extra for first, extra in CUDA_EXTRAS if int(match[0]) >= first), None)


def make_env(target: Path, extras: set[str]) -> None:
    """Sees to it that `target` is a venv with vramjax and at least `extras`; quick where it is already."""
    target, gpu = target.resolve(), cuda_extra()
    basis = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes() + f"{sys.version} {PROJECT} {gpu}".encode())
    stamp = target / STAMP
    first_line, *installed = (stamp.read_text(errors="replace").split() if stamp.is_file() else []) or [""]
    if first_line == basis.hexdigest():
        if extras <= set(installed):
            return
        extras = extras | set(installed)
    else:
        make_venv(target)
    names = [*filter(None, [gpu]), *sorted(extras)]
    print(
        f"installing vramjax with {', '.join(names) or 'no extras'} into {target}: takes minutes at first", flush=True
    )
    pip = [str(target / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    if not sys.stdout.isatty():  # elsewhere it says only what goes wrong
        pip.append("--quiet")
    subprocess.run([*pip, "--editable", f"{PROJECT}[{','.join(names)}]" if names else str(PROJECT)], check=True)
    stamp.write_text("\n".join([basis.hexdigest(), *sorted(extras)]))


def make_venv(target: Path) -> None:
    """A new venv at `target`, in place of an older one that this made; nothing else is ever removed."""
    if target.exists():
        if not target.is_dir() or (any(target.iterdir()) and not (target / STAMP).is_file()):
            sys.exit(f"error: {target} is not an environment that make made; expected VENV to be one, or a new path")
        shutil.rmtree(target)
    target.mkdir(parents=True)
    (target / STAMP).touch()  # from now on it is known as ours, also when it stays unfinished
    venv.create(target, with_pip=True)


@contextlib.contextmanager
def one_at_a_time(target: Path) -> Iterator[None]:
    """Waits until no other process makes `target`, as it would remove what is half made; where there are locks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def main(arguments: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever runs this may have an older one)
        sys.exit(
            f"error: python {sys.version.split()[0]} runs this; expected 3.11 or newer: make PYTHON=python3.12 ..."
        )
    if not arguments or any(argument.startswith("-") for argument in arguments):
        sys.exit(f"error: the arguments are {arguments}; expected the path of a venv and names of extras, no flags")
    try:
        with one_at_a_time(Path(arguments[0]).resolve()):
            make_env(Path(arguments[0]), set(arguments[1:]))
    except subprocess.CalledProcessError as error:
        print((error.output or b"").decode(errors="replace"), end="", file=sys.stderr)  # of ensurepip; pip wrote itself
        sys.exit(f"error: {' '.join(error.cmd[:4])} failed with exit code {error.returncode}; what it said is above")
    except OSError as error:
        sys.exit(f"error: {arguments[0]} cannot be made: {error}; expected VENV to be a path that can be written")
    except KeyboardInterrupt:
        sys.exit(130)  # the next make does it again


if __name__ == "__main__":
    main(sys.argv[1:])
