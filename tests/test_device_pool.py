"""What JAX is told to reserve of a GPU, before it starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from commands import IDS, Run

from vramjax import device_pool
from vramjax.device_pool import VARIABLE, pool_fraction, reserve_pool
from vramjax.memory_request import MemoryRequest

GIB = 1 << 30
VARIABLES = (
    VARIABLE,
    *(f"XLA_PYTHON_CLIENT_{name}" for name in ("MEM_FRACTION", "PREALLOCATE", "ALLOCATOR")),
)


@pytest.mark.parametrize(
    ("asked", "free", "fraction"),
    [
        ({"device_budget": "4GiB"}, 79 * GIB, 4.25 / 80),
        ({"device_budget": "4GiB"}, None, 4.25 / 80),
        ({"device_budget": "1TiB"}, 79 * GIB, 0.95),
        ({}, 60 * GIB, 59.5 / 80),
        ({"device_budget": "auto"}, 79.9 * GIB, 0.95),
        ({}, None, None),
        ({}, GIB // 4, None),  # JAX will say it
        ({"keep": 4}, 60 * GIB, None),
    ],
)
def test_the_part_of_a_device(asked: dict[str, Any], free: float | None, fraction: float | None) -> None:
    free_bytes = None if free is None else int(free)
    assert pool_fraction(MemoryRequest(**asked), free_bytes=free_bytes, total_bytes=80 * GIB) == fraction


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what the test sets is gone afterwards
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("no_variables")
def test_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {0: (60 * GIB, 80 * GIB), 1: (30 * GIB, 80 * GIB), 2: (20 * GIB, 40 * GIB), 3: (None, 80 * GIB), 4: None}
    monkeypatch.setattr(device_pool, "driver_memory", there.__getitem__)
    for asked, ordinals, expected in (
        ("auto", [0], "0.7438"),
        ("auto", [0, 1], "0.3688"),
        ("4GiB", [0, 2], "0.1062"),
        ("4GiB", [0, 3], "0.0531"),
        ("auto", [0, 3], None),
        ("4GiB", [0, 4], None),
    ):
        reserve_pool(MemoryRequest(device_budget=asked), ordinals)
        assert os.environ.pop(VARIABLE, None) == expected


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize("name", VARIABLES)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(device_pool, "driver_memory", lambda ordinal: (60 * GIB, 80 * GIB))
    monkeypatch.setenv(name, "x")
    reserve_pool(MemoryRequest(device_budget="4GiB"), [0])
    assert [os.environ.get(variable) for variable in VARIABLES if variable != name] == [None] * 3
    assert os.environ[name] == "x"


@pytest.mark.usefixtures("no_variables")
@pytest.mark.parametrize("command", [("plan",), ()])
def test_the_command_reserves_its_budget(
    run: Run, packed: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    for name in VARIABLES:  # the command's own fixture sets one
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(device_pool, "driver_memory", lambda ordinal: (60 * GIB, 80 * GIB) if ordinal == 0 else None)
    asked = (*command, f"--model={packed}", f"--prompt_ids={IDS}", "--max_new_tokens=2", "--noprogress")
    for flags, expected in ((["--device_budget=4GiB"], "0.0531"), ([], "0.7438"), (["--keep=1"], None)):
        assert run(*asked, *flags).code == 0
        assert os.environ.pop(VARIABLE, None) == expected
    assert run(*asked, "--release=free").code == 0
    assert VARIABLE not in os.environ and os.environ.pop("XLA_PYTHON_CLIENT_ALLOCATOR") == "platform"
