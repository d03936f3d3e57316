"""Runs the cases of the kernel benchmark: compiles all of them side by side, then times one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
from chains import LONG, SHORT, Chains, CompilerPool, lower_chain, num_calls, repeated, seconds_alone
from kernel_cases import Case

from vramjax.progress import progress_bar

Row = dict[str, Any]


def wait_and_tell(pool: CompilerPool, num_shapes: int, *, since: float) -> None:
    """Until all that was lowered for so many shapes is compiled; `since` is when that began."""
    print(f"{num_shapes} shapes: lowered after {time.perf_counter() - since:.0f} s", flush=True)
    with progress_bar("Compiling", total=pool.num_programs, unit="items") as advance:
        pool.wait(advance)
    print(f"{pool.num_programs} programs: compiled after {time.perf_counter() - since:.0f} s", flush=True)


class Prepared:
    """A case whose programs are being compiled.

    Example: `with CompilerPool() as pool: row = Prepared(case, pool, distinct_bytes=192 << 20).measure(repeats=10)`.
    """

    def __init__(self, case: Case, pool: CompilerPool, *, distinct_bytes: int) -> None:
        """Lowers the programs, and begins to compile them; calls of a chain have so many bytes of data together."""
        self.case = case
        example = case.example()
        self._pool, self._links = pool, [example] * num_calls(case.num_bytes, distinct_bytes)
        self._chains = {arm: self._both(function) for arm, function in case.arms.items()}
        self._alone = pool.compile(jax.jit(next(iter(case.arms.values()))).lower(*example))
        self._make = pool.compile(jax.jit(case.make).lower(jax.random.key(0)))

    def measure(self, *, repeats: int) -> Row:
        """The case's row: times of all arms in microseconds, and errors; what cannot be compiled has the reason."""
        links, case = self._data(), self.case
        row: Row = {**case.row, "bytes": case.num_bytes, "flops": case.flops, "calls": len(links)}
        for i, arm in enumerate(case.arms):
            try:
                if i == 0:
                    row["us_alone"] = seconds_alone(self._alone.result(), links, repeats=repeats) * 1e6
                chains = self._both_of(arm)
                row[f"us_{arm}"] = chains.seconds_per_call(links, repeats=repeats) * 1e6
            except jax.errors.JaxRuntimeError as error:
                row[f"failed_{arm}"] = str(error).splitlines()[0]
                continue
            row[f"error_{arm}"] = case.error(links[0], chains.short(links)[0])
        return row

    def _data(self) -> list[Any]:
        """Arguments of all calls of a chain, on the device."""
        make = self._make.result()
        return [make(key) for key in jax.random.split(jax.random.key(1), len(self._links))]

    def _both_of(self, arm: str) -> Chains:
        """The chain of one arm; waits for the compiler."""
        short, *long = (program.result() for program in self._chains[arm])
        if not long:
            return Chains(short=repeated(short, SHORT), long=repeated(short, LONG))
        return Chains(short=short, long=long[0])

    def _both(self, function: Callable[..., jax.Array]) -> list[Future[Any]]:
        turns = (1,) if jax.default_backend() == "cpu" else (SHORT, LONG)
        return [self._pool.compile(lower_chain(function, self._links, each)) for each in turns]
