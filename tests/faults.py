"""What tests of faults share: a model in each place where layers wait, its answer, and traps that make calls fail.

After each fault the same model answers again where it can, `close` gives everything back, and a model that is loaded
anew is right.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from waiting import eventually

import vramjax
from vramjax.language_model import LanguageModel

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


def again(path: Path, tier: str, expected: list[int]) -> None:
    """A model that is loaded anew is right."""
    with load(path, tier) as model:
        assert answer(model) == expected
        assert_streamed(model)


def arrays_besides(before: list[jax.Array]) -> list[str]:
    """Those that have come since, as texts. Scalars do not count: each device keeps one to be waited for with."""
    gc.collect()
    arrays = [array for array in jax.live_arrays() if array.ndim > 0]
    return [f"{array.dtype} {array.shape}" for array in arrays if all(array is not old for old in before)]


def arrays_left(before: list[jax.Array]) -> list[str]:
    """`arrays_besides` that stay: what interrupted calls asked of other threads may be done a little later."""
    return [] if eventually(lambda: not arrays_besides(before)) else arrays_besides(before)


class Trap:
    """Lets some calls pass and makes one fail: of whatever it is put around, all taken together."""

    def __init__(self) -> None:
        self.num_calls = 0  # since it was made
        self._left: int | None = None
        self._make: Callable[[], BaseException] = AssertionError
        self._is_after = False

    def set(self, num_passing: int, make: Callable[[], BaseException], *, is_after: bool = False) -> None:
        """`is_after`: the call does its work, memory that it was given is used up, and then it fails."""
        self._left, self._make, self._is_after = num_passing, make, is_after

    def count(self, work: Callable[[], Any]) -> int:
        """The calls that `work` takes, none of which fails."""
        before = self.num_calls
        work()
        return self.num_calls - before

    def take_off(self) -> bool:
        """Whether it had caught a call."""
        sprung, self._left = self._left is None, None
        return sprung

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.num_calls += 1
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
