"""The environment that the Makefile makes: the right JAX, nothing installed twice, nobody's directory removed."""

from __future__ import annotations

import ast
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_env.py"


class MakeEnv:
    """The script with a pretended driver, and with a pip that only notes what it is asked for."""

    def __init__(self, driver: str | None = None) -> None:
        self.names = runpy.run_path(str(SCRIPT))
        self.driver = driver  # what nvidia-smi prints; None: there is no nvidia-smi
        self.code = 0  # of nvidia-smi and of pip
        self.installed: list[str] = []
        self.made: list[Path] = []
        names = self.names["main"].__globals__
        names["shutil"] = SimpleNamespace(
            which=lambda _: self.driver and "/bin/nvidia-smi", rmtree=names["shutil"].rmtree
        )
        names["subprocess"] = SimpleNamespace(run=self._run, CalledProcessError=subprocess.CalledProcessError)
        names["venv"] = SimpleNamespace(create=self._create)

    def main(self, *arguments: object) -> None:
        self.names["main"]([str(argument) for argument in arguments])

    def _run(self, command: list[str], *, check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        if check and self.code:
            raise subprocess.CalledProcessError(self.code, command)
        if command[0] != "nvidia-smi":
            assert command[1:4] == ["-m", "pip", "install"] and Path(command[0]).parent.parent.is_dir()
            self.installed.append(command[-1].removeprefix(str(SCRIPT.parent.parent)))
        return subprocess.CompletedProcess(command, self.code, self.driver or "", "")

    def _create(self, target: Path, *, with_pip: bool) -> None:
        assert with_pip
        self.made.append(target)
        (target / "pyvenv.cfg").touch()


@pytest.mark.parametrize(
    ("printed", "extra"),
    [
        ("580.65.06\n", "cuda13"),
        ("590.1\n590.1\n", "cuda13"),
        ("579.99\n", "cuda12"),
        ("525.60.13\n", "cuda12"),
        ("524.1\n", None),
        ("470.223.02\n", None),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", None),
        ("", None),
        (None, None),
    ],
)
def test_cuda_extra(printed: str | None, extra: str | None) -> None:
    assert MakeEnv(printed).names["cuda_extra"]() == extra


def test_a_driver_that_fails() -> None:
    env = MakeEnv("580.65.06\n")
    env.code = 9
    assert env.names["cuda_extra"]() is None


def test_only_what_is_missing_is_installed(tmp_path: Path) -> None:
    env, target = MakeEnv(), tmp_path / "new" / "venv"
    env.main(target)
    env.main(target)
    assert env.installed == [""]
    env.main(target, "test")
    env.main(target, "test")
    env.main(target)
    assert env.installed == ["", "[test]"]
    env.main(target, "lint", "test", "plot")
    env.main(target, "plot")
    assert env.installed == ["", "[test]", "[lint,plot,test]"]
    assert env.made == [target]


def test_another_driver_makes_it_anew(tmp_path: Path) -> None:
    env, target = MakeEnv("570.1"), tmp_path / "venv"
    env.main(target, "test")
    (target / "old").touch()
    env.driver = "571.2"  # takes the same wheels
    env.main(target, "test")
    assert env.installed == ["[cuda12,test]"]
    env.driver = "580.1"
    env.main(target)
    assert env.installed == ["[cuda12,test]", "[cuda13]"]
    assert env.made == [target, target] and not (target / "old").exists()


def test_what_pip_did_not_finish_is_done_again(tmp_path: Path) -> None:
    env, target = MakeEnv(), tmp_path / "venv"
    env.code = 1
    with pytest.raises(SystemExit, match=r"error: .*/bin/python -m pip install failed with exit code 1; what it said"):
        env.main(target)
    env.code = 0
    env.main(target)
    env.code = 1
    with pytest.raises(SystemExit):
        env.main(target, "test")
    env.code = 0
    env.main(target)
    env.main(target, "test")
    assert env.installed == ["", "[test]"]


def test_an_empty_directory_will_do(tmp_path: Path) -> None:
    env = MakeEnv()
    env.main(tmp_path)
    assert env.made == [tmp_path]


def _a_file(path: Path) -> None:
    path.write_text("precious")


def _a_directory_of_environments(path: Path) -> None:
    (path / "one").mkdir(parents=True)


def _an_environment_of_somebody_else(path: Path) -> None:
    path.mkdir()
    (path / "pyvenv.cfg").touch()


@pytest.mark.parametrize("make", [_a_file, _a_directory_of_environments, _an_environment_of_somebody_else])
def test_what_others_made_is_never_removed(tmp_path: Path, make: Callable[[Path], None]) -> None:
    env, target = MakeEnv(), tmp_path / "envs"
    make(target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit, match=r"error: .*envs is not an environment that make made; expected VENV to be"):
        env.main(target, "test")
    assert sorted(tmp_path.rglob("*")) == before and not env.installed


def test_an_empty_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="is not an environment that make made"):
        MakeEnv().main("")
    assert (tmp_path / "file").exists()


def test_what_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    for target, reason in (("/proc/no/venv", "No such file"), (tmp_path / ("v" * 300), "File name too long")):
        with pytest.raises(SystemExit, match=f"^error: {target} cannot be made: .*{reason}.*; expected VENV"):
            MakeEnv().main(target)


def test_an_interrupt_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = MakeEnv()

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(env.names["main"].__globals__["subprocess"], "run", interrupt)
    with pytest.raises(SystemExit) as info:
        env.main(tmp_path / "venv")
    assert info.value.code == 130
    monkeypatch.undo()
    env.main(tmp_path / "venv")
    assert len(env.installed) == 1


def test_an_older_python_is_told_so(tmp_path: Path) -> None:
    """It has to read all of the file for that, where annotations would fail if they were evaluated."""
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 7))
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"]
    assert [name.name for node in imported for name in node.names] == ["annotations"]
    env = MakeEnv()
    names = env.names["main"].__globals__
    names["sys"] = SimpleNamespace(version_info=(3, 9), version="3.9.1 of old", exit=sys.exit)
    with pytest.raises(SystemExit, match=r"^error: python 3\.9\.1 runs this; expected 3\.11 or newer: make PYTHON="):
        env.main(tmp_path / "venv")


def test_two_at_a_time_wait_for_each_other(tmp_path: Path) -> None:
    """The second one finds what the first has made, and does not remove it half made."""
    first, second, started = MakeEnv(), MakeEnv(), threading.Event()
    pretended = first.names["main"].__globals__["venv"]
    create = pretended.create

    def create_slowly(target: Path, *, with_pip: bool) -> None:
        started.set()
        time.sleep(0.2)
        create(target, with_pip=with_pip)

    pretended.create = create_slowly
    with ThreadPoolExecutor() as pool:
        making = pool.submit(first.main, tmp_path / "venv", "test")
        assert started.wait(10)
        second.main(tmp_path / "venv", "test")
        making.result()
    assert first.made == [tmp_path / "venv"] and second.made == second.installed == []


def test_a_damaged_stamp_is_another_one(tmp_path: Path) -> None:
    env = MakeEnv()
    (tmp_path / "vramjax-ready").write_bytes(b"\xff")
    env.main(tmp_path)
    assert env.made == [tmp_path]


@pytest.mark.parametrize("arguments", [(), ("-v",), ("--help",), ("venv", "--test")])
def test_flags_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="expected the path of a venv and names of extras, no flags"):
        MakeEnv().main(*arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["it's", 'say "hi" to $5 $(shell echo x) $(', "a  b \\n `id` ; #"])
def test_a_prompt_may_be_any_text(tmp_path: Path, text: str) -> None:
    command = tmp_path / "bin" / "vramjax"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nprintf "%s" "$2"\n')
    command.chmod(0o755)
    make = ["make", "--silent", "demo", "PYTHON=true", f"VENV={tmp_path}", f"PROMPT={text}"]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # of an outer make
    done = subprocess.run(make, cwd=SCRIPT.parent.parent, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"--prompt={text}"), done.stderr
