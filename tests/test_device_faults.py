"""A device that fails, runs out of memory or pins none: one clear error or warning, and nothing is lost."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import pytest
from commands import Run
from faults import (
    OUT_OF_MEMORY,
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
)

from vramjax.decode import layer_loop
from vramjax.errors import BudgetError
from vramjax.residency import fused_transfer, host_store, mapped_buffers
from vramjax.residency.host_memory import HostArrays, PinningError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@every_tier
def test_a_call_that_fails_in_the_middle_of_a_sweep(
    packed: Path, right_answer: list[int], traps: dict[str, Trap], tier: str
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
                assert answer(model) == right_answer, (place, num_passing, is_after)
                assert_streamed(model)
        assert caught["step"] == 12 and caught["upload"] >= 4
        assert (caught["step with an upload"] >= 8) == (TIERS[tier]["keep"] > 1)  # a ring of one slot has none
        assert model.residency.sweeps_aborted == caught.total()
    again(packed, tier, right_answer)


@every_tier
def test_no_memory_while_a_model_is_loaded(
    packed: Path, right_answer: list[int], traps: dict[str, Trap], tier: str
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
            assert arrays_left(before) == []
            num_failures += 1
        assert num_failures >= (place == "step"), place
    again(packed, tier, right_answer)


@every_tier
def test_a_program_that_fails_while_it_runs(
    packed: Path, right_answer: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tier: str
) -> None:
    """Long after its call has returned; what was computed from its results fails with it."""
    trap, layer_steps = Trap(), layer_loop.layer_steps

    def fail_late() -> BaseException:
        time.sleep(0.05)
        return RuntimeError("the device fell off")

    check = trap.around(lambda x: x)

    # The record of what a callback raised would keep whatever the caller has in its hands.
    caplog.set_level(logging.CRITICAL + 1, "jax._src.callback")

    def step(*args: Any, **kwargs: Any) -> Any:
        h, kv = layer_steps(*args, **kwargs)
        return jax.pure_callback(check, jax.ShapeDtypeStruct(h.shape, h.dtype), h), kv

    monkeypatch.setattr(layer_loop, "layer_steps", step)
    for num_passing in (3, 17):
        with load(packed, tier) as model:
            trap.set(num_passing, fail_late)
            assert "the device fell off" in str(failure_of(answer, model))
            assert trap.take_off()
            assert answer(model) == right_answer  # nothing of it is left in the cache or in a slot
        with load(packed, tier) as model:
            assert answer(model) == right_answer


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
    packed: Path, right_answer: list[int], monkeypatch: pytest.MonkeyPatch, tier: str, num_pinned: int
) -> None:
    """One warning for each kind of memory, which names the cost; everything works all the same."""
    for module in (host_store, mapped_buffers, fused_transfer):
        monkeypatch.setattr(module, "HostArrays", Refusal)
    monkeypatch.setattr(Refusal, "num_left", num_pinned)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = load(packed, tier)
    with model:
        assert answer(model) == answer(model) == right_answer
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
