"""Whether a sweep is still under way: what is right whatever interrupts it."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator
from typing import Any, TypeVar

GeneratorT = TypeVar("GeneratorT", bound=Generator[Any, None, None])


class Run:
    """One run of a generator: it is under way until that has ended, however it did.

    A flag that the generator takes back at its end would stay for ever if Ctrl-C came at the wrong moment, say while
    what an earlier Ctrl-C had broken off was being cleaned up. This asks Python whether there is anything left to run.

    Example: `run = Run()`, `sweep = run.of(self._sweep(run))`, and `_sweep` begins with `self._run = run`. From then on
    it is true that `self._run.is_under_way`, until `sweep` is at its end, has failed, was closed or is gone. A run of
    no generator is never under way.
    """

    def __init__(self) -> None:
        self._generator: weakref.ref[Generator[Any, None, None]] | None = None  # which refers to this in turn

    def of(self, generator: GeneratorT) -> GeneratorT:
        """`generator`, whose run this is."""
        self._generator = weakref.ref(generator)
        return generator

    @property
    def is_under_way(self) -> bool:
        generator = self._generator() if self._generator is not None else None
        return generator is not None and inspect.getgeneratorstate(generator) != inspect.GEN_CLOSED
