"""Fixtures that many tests share: the real demo model, a tiny model that chats, running commands on it, making it fail.

JAX is imported by those that need it: it reads the environment as it starts, and some tests are about that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

# Several processes may share a GPU here; JAX would give three quarters of its memory to the first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from commands import Done, Run, run_here, write_chat_model

from vramjax.checkpoint.convert import convert
from vramjax.checkpoint.demo import fetch_demo
from vramjax.checkpoint.hf import open_hf
from vramjax.checkpoint.packed import Packed
from vramjax.checkpoint.resolve import default_cache_dir, open_model

if TYPE_CHECKING:
    from faults import Trap


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct.Q4_1.gguf, downloaded once into the cache of vramjax."""
    return fetch_demo(default_cache_dir())


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Packed:
    """The same model, packed once in the cache."""
    return open_model("demo", progress=False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer and a chat template, as a Hugging Face directory."""
    return write_chat_model(tmp_path_factory.mktemp("hf") / "chat")


@pytest.fixture(scope="session")
def packed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model, packed."""
    return convert(open_hf(checkpoint), tmp_path_factory.mktemp("packed") / "chat", progress=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a command in this process; whatever it leaves in the process or in the cache is gone afterwards."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("VRAMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default"))
    return partial(run_here, capsys)


@pytest.fixture
def decode(run: Run, packed: Path, tmp_path: Path) -> Any:
    """Decodes with the tiny model, a token a sweep; returns what was printed and the stats."""

    def decode(*args: object) -> tuple[Done, dict[str, Any]]:
        path = tmp_path / "stats.json"
        fixed = (f"--model={packed}", "--max_new_tokens=12", "--speculate=off", "--noprogress")
        done = run(*fixed, f"--stats_json={path}", *args)
        assert done.code == 0, done.err
        return done, json.loads(path.read_text(encoding="utf-8"))

    return decode


@pytest.fixture
def no_array_is_left() -> Iterator[None]:
    """Nothing that a command loaded outlives it."""
    import jax

    before = {id(a) for a in jax.live_arrays()}
    yield
    left = [a for a in jax.live_arrays() if id(a) not in before and a.nbytes > np.dtype(np.float32).itemsize * 256]
    assert not left, left


@pytest.fixture
def own_copy(packed: Path, tmp_path: Path) -> Path:
    """The packed tiny model, to be damaged."""
    return Path(shutil.copytree(packed, tmp_path / "own"))


@pytest.fixture(scope="session")
def right_answer(packed: Path) -> list[int]:
    """What the tiny model answers to tests of faults where nothing is streamed and nothing goes wrong."""
    from faults import answer

    import vramjax

    with vramjax.load(packed, keep=5, progress=False) as model:
        return answer(model)


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Arrays, threads and open files are as many after a test as before, to the last one."""
    import jax
    from faults import arrays_left

    def num_open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    arrays, threads, num_files = jax.live_arrays(), threading.enumerate(), num_open_files()
    yield
    sys.settrace(None)
    assert arrays_left(arrays) == []
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert [name for name in left if not name.startswith("Dummy-")] == []  # those of JAX, which a callback has run in
    assert num_open_files() <= num_files


@pytest.fixture
def pack(tmp_path: Path) -> Callable[..., Packed]:
    """Makes a packed directory of a tiny model; see `pack_tiny`."""
    from packed_dirs import pack_tiny

    return partial(pack_tiny, tmp_path)


@pytest.fixture
def override(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Changes what every engine is compiled for; a float32 KV cache, unless a test says otherwise."""
    from vramjax import planning

    original = planning.engine_spec

    def override(**changes: Any) -> None:
        changes = {"kv_dtype": np.dtype(np.float32)} | changes
        monkeypatch.setattr(
            planning, "engine_spec", lambda *args, **kwargs: dataclasses.replace(original(*args, **kwargs), **changes)
        )

    override()
    return override


@pytest.fixture
def traps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Trap]:
    """Traps in the programs that a device runs: layer steps alone, those with an upload in them, and mere uploads."""
    from faults import Trap

    from vramjax.decode import layer_loop
    from vramjax.residency import programs

    traps = {"step": Trap(), "step with an upload": Trap(), "upload": Trap()}
    for name, trap in (("jitted", traps["step"]), ("carrying", traps["step with an upload"])):
        make = getattr(programs, name)
        monkeypatch.setattr(programs, name, lambda *args, make=make, trap=trap: trap.around(make(*args)))
    for name in ("tile_sweep", "tile_turns"):
        monkeypatch.setattr(layer_loop, name, traps["step"].around(getattr(layer_loop, name)))
    monkeypatch.setattr(programs, "copy_into", traps["upload"].around(programs.copy_into))
    return traps
