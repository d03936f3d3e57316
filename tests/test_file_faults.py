"""Files that change under a running model, and disks that fail: one clear error where they are needed, else none."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from commands import finish, start
from faults import (
    OUT_OF_MEMORY,
    PROMPT,
    TIERS,
    JaxError,
    Trap,
    again,
    answer,
    arrays_left,
    assert_streamed,
    every_tier,
    failure_of,
    load,
    mapped_tiers,
)
from test_weight_file import CHANGES, cut, overwrite, remove, replace

from vramjax.checkpoint.packed import layer_file
from vramjax.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@mapped_tiers
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_changes_under_a_decode_from_disk(
    own_copy: Path, right_answer: list[int], tier: str, change: Callable[[Path], None]
) -> None:
    with load(own_copy, tier) as model:
        assert answer(model) == right_answer
        (layer_idx, *_) = model.schedule.streamed_layers
        file = own_copy / layer_file(layer_idx)
        content = file.read_bytes()
        tokens = model.generate(PROMPT, max_new_tokens=200, ignore_stop=True)
        ids = [next(tokens).id for _ in range(3)]
        assert ids == right_answer[:3]
        change(file)
        for failing in (tokens.finish, lambda: answer(model)):  # which stays so
            error = failure_of(failing)
            assert type(error) is CheckpointError
            assert re.search(CHANGES[change], str(error)) and str(file) in str(error) and "\n" not in str(error)
        assert tokens.token_ids[: len(right_answer)] == right_answer[: len(tokens.token_ids)]
        assert len(tokens.token_ids) < 20  # what had been read ahead, and no more
    file.write_bytes(content)
    again(own_copy, tier, right_answer)


@every_tier
@pytest.mark.parametrize("change", [cut, overwrite, remove, replace], ids=lambda change: change.__name__)
def test_files_that_change_when_they_are_no_longer_needed(
    own_copy: Path, right_answer: list[int], tier: str, change: Callable[[Path], None]
) -> None:
    """What is kept in memory, here or there, is not read again."""
    with load(own_copy, tier) as model:
        assert answer(model) == right_answer
        streamed = model.schedule.streamed_layers if TIERS[tier]["host"] == "mapped" else ()
        for layer_idx in set(range(model.config.num_layers)) - set(streamed):
            change(own_copy / layer_file(layer_idx))
        change(own_copy / "head.safetensors")
        assert answer(model) == right_answer
        assert_streamed(model)


def test_a_directory_that_is_deleted_under_a_pinned_model(own_copy: Path, right_answer: list[int]) -> None:
    with load(own_copy, "pinned") as model:
        shutil.rmtree(own_copy)
        assert answer(model) == right_answer
        assert_streamed(model)
        for _ in itertools.islice(model.generate(PROMPT, max_new_tokens=50, ignore_stop=True), 3):
            pass  # a sweep that is left, and begun again
        assert answer(model) == right_answer


def test_a_layer_that_was_not_kept_is_missing_after_an_aborted_sweep(
    own_copy: Path, right_answer: list[int], traps: dict[str, Trap]
) -> None:
    """It has to come from disk once more, and the error says what is wrong there."""
    with load(own_copy, "partly kept") as model:
        assert answer(model) == right_answer
        (resident, *_) = set(range(model.config.num_layers)) - set(model.schedule.streamed_layers)
        cut(own_copy / layer_file(resident))
        traps["step"].set(7, lambda: JaxError(OUT_OF_MEMORY))
        failure_of(answer, model)
        assert traps["step"].take_off()
        for _ in range(2):
            error = failure_of(answer, model)
            assert type(error) is CheckpointError
            assert layer_file(resident) in str(error) and "load it again" in str(error)


@pytest.mark.parametrize("change", [cut, remove], ids=lambda change: change.__name__)
def test_the_command_says_in_one_line_which_file_changed(own_copy: Path, change: Callable[[Path], None]) -> None:
    process = start(
        f"--model={own_copy}", "--prompt=Hi", "--ignore_stop", "--max_new_tokens=4000", "--host=mapped", "--keep=1"
    )
    assert process.stdout
    assert process.stdout.read(300)
    change(own_copy / layer_file(4))
    done = finish(process)
    assert done.code == 1
    lines = [line for line in done.err.splitlines() if line.strip()]
    assert len(lines) == 1 and re.match(f"error: .*{layer_file(4)} .*{CHANGES[change]}", lines[0]), done.err


@pytest.fixture
def bad_disk(monkeypatch: pytest.MonkeyPatch) -> Trap:
    trap = Trap()
    monkeypatch.setattr(os, "preadv", trap.around(os.preadv))
    return trap


def io_error() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


@every_tier
def test_a_disk_that_fails_while_a_model_is_loaded_or_first_read(
    packed: Path, right_answer: list[int], bad_disk: Trap, tier: str
) -> None:
    def load_and_answer() -> None:
        with load(packed, tier) as model:
            assert answer(model) == right_answer

    before = jax.live_arrays()
    for num_passing in (0, 2, 9, 16, 30):  # the head's arrays, then six reads a layer
        bad_disk.set(num_passing, io_error)
        error = failure_of(load_and_answer)
        assert bad_disk.take_off()
        assert type(error) is CheckpointError
        assert re.fullmatch(r".*\.safetensors cannot be read: Input/output error", str(error))
        assert arrays_left(before) == []
    load_and_answer()


@mapped_tiers
def test_a_disk_that_fails_now_and_then(packed: Path, right_answer: list[int], bad_disk: Trap, tier: str) -> None:
    """The error comes out once; the model goes on as soon as the disk does."""
    with load(packed, tier) as model:
        assert answer(model) == right_answer
        for num_passing in (0, 1, 5, 14, 23, 61):
            bad_disk.set(num_passing, io_error)
            error = failure_of(answer, model)
            assert bad_disk.take_off()
            assert type(error) is CheckpointError and "cannot be read: Input/output error" in str(error)
            assert answer(model) == right_answer
            assert_streamed(model)
