"""Commands as processes of their own: the scripts, an interrupt, a reader that goes away."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import IDS, PROJECT, finish, start, write_chat_model

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.hf import open_hf

# What XLA's libraries log as they start on a GPU; not of this project's making.
_NATIVE_LOG = re.compile(r"[IWEF]\d{4} |WARNING: All log messages before")


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


@pytest.mark.parametrize("delay_s", [0.15, 0.4, 0.8, 1.2, 1.7, 2.3])
def test_interrupt_at_any_time(long_model: Path, delay_s: float) -> None:
    """While packages are imported, the model is loaded, programs are compiled, tokens come."""
    process = start(f"--model={long_model}", "--prompt=Hi", "--ignore_stop", "--max_new_tokens=60000", "--keep=1")
    time.sleep(delay_s)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    said = [line for line in done.err.splitlines() if line.strip() and not _NATIVE_LOG.match(line)]
    assert (done.code, said) == (130, ["interrupted"])


def test_a_lost_interrupt_comes_again() -> None:
    """As one that is raised in a callback of the garbage collector, where nothing can be raised."""
    code = """
import gc, signal, time
import vramjax.cli
from vramjax.__main__ import run

def interrupt_once(phase, info):
    if phase == "stop":  # what is to be seen as lost comes at once after it
        gc.callbacks.clear()
        signal.raise_signal(signal.SIGINT)

def main(argv):
    gc.callbacks.append(interrupt_once)
    gc.collect()
    print("lost", flush=True)
    time.sleep(60)

vramjax.cli.main = main
run()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "lost\n", "interrupted")


@pytest.mark.parametrize(
    "delicate",
    [
        "import slow",
        "exec(compile(open(SLOW).read(), 'jax/_src/xla_bridge.py', 'exec'))",
    ],
    ids=["import", "start of a device"],
)
def test_what_may_not_survive_it_is_not_interrupted(tmp_path: Path, delicate: str) -> None:
    """What comes meanwhile is raised afterwards."""
    (tmp_path / "slow.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\nprint('done', flush=True)\n")
    code = """
import time
import vramjax.cli
from vramjax.__main__ import run

def main(argv):
    DELICATE
    time.sleep(60)

vramjax.cli.main = main
run()
"""
    environment = os.environ | {"PYTHONPATH": f"{PROJECT}:{tmp_path}"}
    command = [
        sys.executable,
        "-c",
        code.replace("DELICATE", delicate.replace("SLOW", repr(str(tmp_path / "slow.py")))),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "done\n", "interrupted")


def test_an_error_that_an_interrupt_became() -> None:
    code = """
import signal
import vramjax.cli
from vramjax.__main__ import run
from vramjax.errors import CheckpointError

def decode(args):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ERROR("of an extension that was not imported")

vramjax.cli._decode = decode
run([])
"""
    for error in ("ImportError", "CheckpointError", "OSError"):
        command = [sys.executable, "-c", code.replace("ERROR", error)]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr.strip()) == (130, "interrupted")


def test_an_interrupted_conversion_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    code = """
import signal, sys
import vramjax.checkpoint.convert
from vramjax.__main__ import run

vramjax.checkpoint.convert._pack_layer = lambda *args: signal.raise_signal(signal.SIGINT)
run(sys.argv[1:])
"""
    command = [sys.executable, "-c", code, "convert", checkpoint, tmp_path / "packed"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")
    assert not list(tmp_path.iterdir())


def test_closed_streams(long_model: Path, tmp_path: Path) -> None:
    """What would be printed there goes nowhere else: not to the other stream, not into a file."""
    stats = tmp_path / "stats.json"
    command = f"--model={long_model} --prompt=Hi --max_new_tokens=2 --stats_json={stats}"
    for closed in ("1>&-", "2>&-", "1>&- 2>&-"):
        done = subprocess.run(
            f"{sys.executable} -m vramjax {command} {closed}",
            shell=True,
            cwd=PROJECT,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0
        assert "tokens/s" not in done.stdout
        assert ("tokens/s" in done.stderr) == ("2" not in closed)
        assert len(json.loads(stats.read_text())["token_ids"]) == 2


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_statistics_do_not_replace_what_is_printed(long_model: Path, tmp_path: Path, stream: str) -> None:
    command = [sys.executable, "-m", "vramjax", f"--model={long_model}", "--prompt=Hi", "--max_new_tokens=2"]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with (tmp_path / "printed").open("w") as file:
        streams[stream] = file
        done = subprocess.run([*command, f"--stats_json=/dev/{stream}"], cwd=PROJECT, **streams, timeout=60)
    said = done.stderr or (tmp_path / "printed").read_bytes()
    assert (done.returncode, done.stdout or b"") == (1, b"")
    assert f"error: --stats_json and {stream} are the same file, /dev/{stream}; expected two" in said.decode()


def test_statistics_may_be_all_that_is_printed(long_model: Path, tmp_path: Path) -> None:
    """Answers of a file's prompts go elsewhere."""
    (tmp_path / "prompts.txt").write_text("Hi")
    files = [
        f"--prompts_file={tmp_path / 'prompts.txt'}",
        f"--out={tmp_path / 'out.jsonl'}",
        "--stats_json=/dev/stdout",
    ]
    command = [sys.executable, "-m", "vramjax", f"--model={long_model}", "--max_new_tokens=2", *files]
    with (tmp_path / "stats.json").open("w") as file:
        subprocess.run(command, cwd=PROJECT, stdout=file, timeout=60, check=True)
    assert json.loads((tmp_path / "stats.json").read_text())["num_answers"] == 1


@pytest.mark.parametrize("args", [["--prompt=Hi", "--noprogress"], ["--plan"], ["--version"]])
def test_a_full_disk_is_named(long_model: Path, args: list[str]) -> None:
    command = [sys.executable, "-m", "vramjax", f"--model={long_model}", *args]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=PROJECT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if not _NATIVE_LOG.match(line)]
    assert (done.returncode, len(said)) == (1, 1), done.stderr
    assert said[0].startswith("error: stdout cannot be written: No space left on device; expected room")


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
