"""Commands as processes of their own: the scripts, an interrupt, a reader that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import IDS, PROJECT, finish, start, write_chat_model

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers can be long enough to be interrupted."""
    directory = tmp_path_factory.mktemp("long")
    checkpoint = write_chat_model(directory / "hf")
    config = json.loads((checkpoint / "config.json").read_text()) | {"max_position_embeddings": 1 << 16}
    (checkpoint / "config.json").write_text(json.dumps(config))
    return convert(open_hf(checkpoint), directory / "packed", progress=False)


def test_scripts(checkpoint: Path, tmp_path: Path, decode: Any) -> None:
    packed = tmp_path / "packed"
    convert_script = [sys.executable, "scripts/convert.py", str(checkpoint), str(packed)]
    done = subprocess.run(convert_script, cwd=PROJECT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"{packed}\n"), done.stderr
    # Text of any kind comes out, whatever the terminal can show.
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    args = [f"--model={packed}", f"--prompt_ids={IDS}", "--max_new_tokens=12"]
    done = subprocess.run(
        [sys.executable, "scripts/decode.py", *args, "--ignore_stop"],
        cwd=PROJECT,
        capture_output=True,
        check=False,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    expected = decode(f"--prompt_ids={IDS}", "--ignore_stop")[1]["text"] + "\n"
    assert done.stdout == expected.encode("ascii", "replace")


def test_hub_id_offline(tmp_path: Path) -> None:
    done = finish(start("--model=some/model", "--prompt=Hi", env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}))
    assert "some/model is neither a local path nor in the cache" in done.error()


def test_interrupt(long_model: Path) -> None:
    process = start(f"--model={long_model}", "--prompt=Hi", "--ignore_stop", "--max_new_tokens=60000", "--keep=1")
    assert process.stdout
    first = process.stdout.read(8)  # it is decoding
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert first
    assert (done.code, done.err.strip()) == (130, "interrupted")


@pytest.mark.parametrize("args", [["--prompt=Hi", "--ignore_stop", "--max_new_tokens=60000"], ["--plan"], ["--help"]])
def test_broken_pipe_is_quiet(long_model: Path, args: list[str]) -> None:
    process = start(f"--model={long_model}", "--noprogress", *args)
    assert process.stdout and process.stderr
    first = process.stdout.read(5)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=60)
    assert len(first) == 5
    assert err == b""
