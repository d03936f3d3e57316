"""Makes the environment that the Makefile's commands run in: a venv with vramjax and the right JAX for this machine.

Standard library only, as nothing is installed yet. Usage: python3 scripts/make_env.py VENV [EXTRA ...]
"""

import hashlib
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
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


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (whoever runs this may have an older one)
        sys.exit(
            f"error: python {sys.version.split()[0]} runs this; expected 3.11 or newer: make PYTHON=python3.12 ..."
        )
    target, extras = Path(sys.argv[1]), sys.argv[2:]
    if (gpu := cuda_extra()) is not None:
        extras.append(gpu)
    wanted = hashlib.sha256((PROJECT / "pyproject.toml").read_bytes() + str((sys.version, extras)).encode()).hexdigest()
    stamp = target / "vramjax-ready"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"making {target} with {', '.join(extras) or 'no extras'} (the first time takes a few minutes)", flush=True)
    venv.create(target, with_pip=True, clear=target.exists())
    python = str(target / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "--editable", f"{PROJECT}[{','.join(extras)}]"], check=True)
    stamp.write_text(wanted)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: pip failed with exit code {error.returncode}; what it said is above")
