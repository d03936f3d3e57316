"""What can go wrong under a running model, for each place where layers wait: one clear error, and nothing is lost.

After each fault the same model answers again where it can, `close` gives everything back, and a model that is loaded
anew is right.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import pytest
from commands import Run, finish, start
from test_weight_file import CHANGES, cut, overwrite, remove, replace

import vramjax
from vramjax.checkpoint.packed import layer_file
from vramjax.decode import engine
from vramjax.errors import BudgetError, CheckpointError
from vramjax.language_model import LanguageModel
from vramjax.residency import host_store, mapped_store, transfer
from vramjax.residency.host_memory import HostArrays, PinningError

PROMPT, NUM_NEW = [1, 40, 50, 60, 70], 8
TIERS: dict[str, dict[str, Any]] = {
    "pinned": {"host": "pinned", "keep": 1},
    "partly kept": {"host": "pinned", "keep": 3},
    "mapped": {"host": "mapped", "keep": 1},
    "mapped, some resident": {"host": "mapped", "keep": 3},
}
every_tier = pytest.mark.parametrize("tier", TIERS)
mapped_tiers = pytest.mark.parametrize("tier", ["mapped", "mapped, some resident"])
JaxError = jax.errors.JaxRuntimeError
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123456 bytes."


@pytest.fixture(scope="module")
def expected(packed: Path) -> list[int]:
    """What the model answers where nothing is streamed and nothing goes wrong."""
    with vramjax.load(packed, keep=5, progress=False) as model:
        return answer(model)


@pytest.fixture
def own_copy(packed: Path, tmp_path: Path) -> Path:
    """The packed model, to be damaged."""
    return Path(shutil.copytree(packed, tmp_path / "own"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Arrays, threads and open files are as many after a test as before, to the last one."""
    arrays, threads, files = jax.live_arrays(), threading.enumerate(), open_files()
    yield
    sys.settrace(None)
    assert arrays_besides(arrays) == []
    assert [thread.name for thread in threading.enumerate() if thread not in threads and is_ours(thread)] == []
    assert open_files() <= files


def arrays_besides(before: list[jax.Array]) -> list[str]:
    gc.collect()
    arrays = [
        array for array in jax.live_arrays() if array.ndim > 0
    ]  # each device keeps a scalar to be waited for with
    return [f"{array.dtype} {array.shape}" for array in arrays if all(array is not old for old in before)]


def is_ours(thread: threading.Thread) -> bool:
    return not thread.name.startswith("Dummy-")  # of JAX, in which a callback has run


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def load(path: Path, tier: str) -> LanguageModel:
    return vramjax.load(path, progress=False, **TIERS[tier])


def answer(model: LanguageModel) -> list[int]:
    return model.generate(PROMPT, max_new_tokens=NUM_NEW, ignore_stop=True).finish().token_ids


def failure_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
    """What a call raises. A traceback would keep everything alive that the call had in its hands."""
    try:
        function(*args, **kwargs)
    except BaseException as error:
        chain: BaseException | None = error
        while chain is not None:
            chain.__traceback__ = None
            chain = chain.__cause__ or chain.__context__
        return error
    raise AssertionError("nothing was raised")


def assert_streamed(model: LanguageModel) -> None:
    stats = model.residency
    assert stats.last_sweep_uploads >= 3
    assert stats.last_sweep_bytes_uploaded == stats.last_sweep_uploads * model.spec.layout.num_bytes


class Trap:
    """Lets some calls pass and makes one fail: of whatever it is put around, all taken together."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._make: Callable[[], BaseException] = AssertionError
        self._is_after = False

    def set(self, num_passing: int, make: Callable[[], BaseException], *, is_after: bool = False) -> None:
        """`is_after`: the call does its work, memory that it was given is used up, and then it fails."""
        self._left, self._make, self._is_after = num_passing, make, is_after

    def take_off(self) -> bool:
        """Whether it had caught a call."""
        sprung, self._left = self._left is None, None
        return sprung

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_caught = self._left == 0
            if self._left is not None:
                self._left = None if is_caught else self._left - 1
            if is_caught and not self._is_after:
                raise self._make()
            result = function(*args, **kwargs)
            if is_caught:
                del result
                raise self._make()
            return result

        return call


@pytest.fixture
def traps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Trap]:
    """Traps in the programs that a device runs: layer steps alone, those with an upload in them, and mere uploads."""
    traps = {"step": Trap(), "step with an upload": Trap(), "upload": Trap()}
    for name, trap in (("_jitted", traps["step"]), ("_carrying", traps["step with an upload"])):
        make = getattr(transfer, name)
        monkeypatch.setattr(transfer, name, lambda *args, make=make, trap=trap: trap.around(make(*args)))
    monkeypatch.setattr(transfer, "_copy_into", traps["upload"].around(transfer._copy_into))
    return traps


# The device fails


@every_tier
def test_a_call_that_fails_in_the_middle_of_a_sweep(
    packed: Path, expected: list[int], traps: dict[str, Trap], tier: str
) -> None:
    """Whichever call of a prompt or of a token it is: the error comes out, and the model goes on."""
    caught: Counter[str] = Counter()
    with load(packed, tier) as model:
        for (place, trap), is_after in itertools.product(traps.items(), (False, True)):
            for num_passing in (0, 1, 2, 6, 11, 17):
                message = "INTERNAL: the link is down" if num_passing in (1, 11) else OUT_OF_MEMORY
                trap.set(num_passing, lambda message=message: JaxError(message), is_after=is_after)
                error = None
                with contextlib.suppress(AssertionError):  # so often it is not called
                    error = failure_of(answer, model)
                assert trap.take_off() == (error is not None), (place, num_passing, is_after)
                if error is not None:
                    caught[place] += 1
                    # An upload by itself says so in our words, and a step in those of JAX.
                    is_ours = isinstance(error, BudgetError) and "no memory left for a layer" in str(error)
                    assert (isinstance(error, JaxError) and str(error) == message) or is_ours, error
                assert answer(model) == expected, (place, num_passing, is_after)
                assert_streamed(model)
        assert caught["step"] == 12 and caught["upload"] >= 4
        assert (caught["step with an upload"] >= 8) == (TIERS[tier]["keep"] > 1)  # a ring of one slot has none
        assert model.residency.sweeps_aborted == caught.total()
    again(packed, tier, expected)


def again(path: Path, tier: str, expected: list[int]) -> None:
    with load(path, tier) as model:
        assert answer(model) == expected
        assert_streamed(model)


@every_tier
def test_no_memory_while_a_model_is_loaded(
    packed: Path, expected: list[int], traps: dict[str, Trap], tier: str
) -> None:
    before = jax.live_arrays()
    for place, trap in traps.items():
        num_failures = 0
        while True:
            trap.set(num_failures, lambda: JaxError(OUT_OF_MEMORY))
            try:
                load(packed, tier).close()
            except BudgetError as error:
                assert re.search("has no memory left for .*; keep fewer layers on the device or free", str(error))
                error.__traceback__ = None
            if not trap.take_off():
                break
            assert arrays_besides(before) == []
            num_failures += 1
        assert num_failures >= (place == "step"), place
    again(packed, tier, expected)


@every_tier
def test_a_program_that_fails_while_it_runs(
    packed: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tier: str
) -> None:
    """Long after its call has returned; what was computed from its results fails with it."""
    trap, layer_step = Trap(), engine.layer_step

    def fail_late() -> BaseException:
        time.sleep(0.05)
        return RuntimeError("the device fell off")

    check = trap.around(lambda x: x)

    # The record of what a callback raised would keep whatever the caller has in its hands.
    caplog.set_level(logging.CRITICAL + 1, "jax._src.callback")

    def step(*args: Any, **kwargs: Any) -> Any:
        h, kv = layer_step(*args, **kwargs)
        return jax.pure_callback(check, jax.ShapeDtypeStruct(h.shape, h.dtype), h), kv

    monkeypatch.setattr(engine, "layer_step", step)
    for num_passing in (3, 17):
        with load(packed, tier) as model:
            trap.set(num_passing, fail_late)
            assert "the device fell off" in str(failure_of(answer, model))
            assert trap.take_off()
            assert answer(model) == expected  # nothing of it is left in the cache or in a slot
        with load(packed, tier) as model:
            assert answer(model) == expected


@every_tier
def test_the_command_says_in_one_line_that_memory_is_short(
    packed: Path, run: Run, traps: dict[str, Trap], tier: str
) -> None:
    args = [f"--model={packed}", "--prompt_ids=1,40", "--ignore_stop", "--max_new_tokens=30", "--noprogress"]
    args += [f"--{name}={value}" for name, value in TIERS[tier].items()]
    assert run(*args).code == 0
    place = "step" if TIERS[tier]["keep"] == 1 else "step with an upload"
    traps[place].set(20, lambda: JaxError(OUT_OF_MEMORY))
    done = run(*args)
    assert traps[place].take_off()
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert re.match(r"error: .*no memory left", line), line


# Ctrl-C


class Interrupts:
    """Ctrl-C as the n-th call of a function of this project begins, in this thread: there Python looks for signals."""

    def __init__(self, at: int) -> None:
        self._left = at
        self.num_calls = 0

    def __enter__(self) -> Interrupts:
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: Any) -> None:
        if "/vramjax/" in frame.f_code.co_filename:
            self.num_calls += 1
            if self.num_calls == self._left:
                sys.settrace(None)
                raise KeyboardInterrupt


def moments(function: Callable[[], Any], count: int) -> list[int]:
    """Some of the calls that a call makes, spread over all of it."""
    with Interrupts(at=0) as calls:
        function()
    assert calls.num_calls > 2 * count
    return [1 + calls.num_calls * i // count for i in range(count)]


@every_tier
def test_interrupts_of_a_decode(packed: Path, expected: list[int], tier: str) -> None:
    num_interrupted = 0
    with load(packed, tier) as model:
        answer(model)
        for at in moments(lambda: answer(model), 24):
            with Interrupts(at):
                try:
                    answer(model)
                except KeyboardInterrupt:
                    num_interrupted += 1
            assert answer(model) == expected, at
            assert_streamed(model)
    assert num_interrupted >= 20  # a moment more or less of waiting for a reader makes them differ


@every_tier
def test_interrupts_of_a_load(packed: Path, expected: list[int], tier: str) -> None:
    before, num_interrupted = jax.live_arrays(), 0

    def load_and_close() -> None:
        with load(packed, tier):
            pass

    load_and_close()
    for at in moments(load_and_close, 20):
        with Interrupts(at):
            try:
                load_and_close()
            except KeyboardInterrupt as error:
                num_interrupted += 1
                error.__traceback__ = None
        assert arrays_besides(before) == [], at
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("vramjax-read")], at
    assert num_interrupted >= 18
    again(packed, tier, expected)


@pytest.mark.parametrize("num_bytes", [0, 1, 400])
def test_an_interrupted_command_on_the_mapped_tier(packed: Path, num_bytes: int) -> None:
    """Before the first token, at it, and in the middle."""
    process = start(
        f"--model={packed}", "--prompt=Hi", "--ignore_stop", "--max_new_tokens=4000", "--host=mapped", "--keep=1"
    )
    assert process.stdout
    if num_bytes:
        assert process.stdout.read(num_bytes)
    else:
        time.sleep(1.3)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert (done.code, done.err.strip()) == (130, "interrupted")


# Files


@mapped_tiers
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_file_that_changes_under_a_decode_from_disk(
    own_copy: Path, expected: list[int], tier: str, change: Callable[[Path], None]
) -> None:
    with load(own_copy, tier) as model:
        assert answer(model) == expected
        (layer_idx, *_) = model.schedule.streamed_layers
        file = own_copy / layer_file(layer_idx)
        content = file.read_bytes()
        tokens = model.generate(PROMPT, max_new_tokens=200, ignore_stop=True)
        ids = [next(tokens).id for _ in range(3)]
        assert ids == expected[:3]
        change(file)
        for failing in (tokens.finish, lambda: answer(model)):  # which stays so
            error = failure_of(failing)
            assert type(error) is CheckpointError
            assert re.search(CHANGES[change], str(error)) and str(file) in str(error) and "\n" not in str(error)
        assert tokens.token_ids[: len(expected)] == expected[: len(tokens.token_ids)]
        assert len(tokens.token_ids) < 20  # what had been read ahead, and no more
    file.write_bytes(content)
    again(own_copy, tier, expected)


@every_tier
@pytest.mark.parametrize("change", [cut, overwrite, remove, replace], ids=lambda change: change.__name__)
def test_files_that_change_when_they_are_no_longer_needed(
    own_copy: Path, expected: list[int], tier: str, change: Callable[[Path], None]
) -> None:
    """What is kept in memory, here or there, is not read again."""
    with load(own_copy, tier) as model:
        assert answer(model) == expected
        streamed = model.schedule.streamed_layers if TIERS[tier]["host"] == "mapped" else ()
        for layer_idx in set(range(model.config.num_layers)) - set(streamed):
            change(own_copy / layer_file(layer_idx))
        change(own_copy / "head.safetensors")
        assert answer(model) == expected
        assert_streamed(model)


def test_a_directory_that_is_deleted_under_a_pinned_model(own_copy: Path, expected: list[int]) -> None:
    with load(own_copy, "pinned") as model:
        shutil.rmtree(own_copy)
        assert answer(model) == expected
        assert_streamed(model)
        for _ in itertools.islice(model.generate(PROMPT, max_new_tokens=50, ignore_stop=True), 3):
            pass  # a sweep that is left, and begun again
        assert answer(model) == expected


def test_a_layer_that_was_not_kept_is_missing_after_an_aborted_sweep(
    own_copy: Path, expected: list[int], traps: dict[str, Trap]
) -> None:
    """It has to come from disk once more, and the error says what is wrong there."""
    with load(own_copy, "partly kept") as model:
        assert answer(model) == expected
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
    packed: Path, expected: list[int], bad_disk: Trap, tier: str
) -> None:
    def load_and_answer() -> None:
        with load(packed, tier) as model:
            assert answer(model) == expected

    before = jax.live_arrays()
    for num_passing in (0, 2, 9, 16, 30):  # the head's arrays, then six reads a layer
        bad_disk.set(num_passing, io_error)
        error = failure_of(load_and_answer)
        assert bad_disk.take_off()
        assert type(error) is CheckpointError
        assert re.fullmatch(r".*\.safetensors cannot be read: Input/output error", str(error))
        assert arrays_besides(before) == []
    load_and_answer()


@mapped_tiers
def test_a_disk_that_fails_now_and_then(packed: Path, expected: list[int], bad_disk: Trap, tier: str) -> None:
    """The error comes out once; the model goes on as soon as the disk does."""
    with load(packed, tier) as model:
        assert answer(model) == expected
        for num_passing in (0, 1, 5, 14, 23, 61):
            bad_disk.set(num_passing, io_error)
            error = failure_of(answer, model)
            assert bad_disk.take_off()
            assert type(error) is CheckpointError and "cannot be read: Input/output error" in str(error)
            assert answer(model) == expected
            assert_streamed(model)


# Pinned memory


class Refusal(HostArrays):
    """Pinned memory for so many layers, and no more."""

    num_left = 0

    def __init__(self, *args: Any) -> None:
        Refusal.num_left -= 1
        if Refusal.num_left < 0:
            raise PinningError("RESOURCE_EXHAUSTED: cuMemHostRegister: out of memory")
        super().__init__(*args)


@every_tier
@pytest.mark.parametrize("num_pinned", [0, 1])
def test_pinning_is_refused(
    packed: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch, tier: str, num_pinned: int
) -> None:
    """One warning for each kind of memory, which names the cost; everything works all the same."""
    for module in (host_store, mapped_store, transfer):
        monkeypatch.setattr(module, "HostArrays", Refusal)
    monkeypatch.setattr(Refusal, "num_left", num_pinned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(packed, tier)
    with model:
        assert answer(model) == answer(model) == expected
        assert_streamed(model)
        assert model.stats()["host"] == "pageable"
    kinds = [re.sub(r" for .*| of .*", "", str(warning.message)) for warning in caught]
    assert len(caught) == (2 if tier == "partly kept" else 1), kinds
    for warning in caught:
        assert re.search(
            r"could not be put in pinned host memory \(RESOURCE_EXHAUSTED: cuMemHostRegister: out of memory\).*"
            r"2 to 10 times slower.*`ulimit -l`",
            str(warning.message),
        )
