"""Runs the cases of the kernel benchmark: compiles all of them side by side, then times one after the other."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax
from chains import LONG, SHORT, Chains, CompilerPool, lower_chain, num_calls, seconds_alone, shortest
from kernel_cases import Case, product_case
from tilings import configs

from pallas_kernels import Backend, q8_partial_sums
from pallas_kernels.tuning import Q8Config
from vramjax.layout import MatrixSpec
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
        links, case = self.data(), self.case
        row: Row = {**case.row, "bytes": case.num_bytes, "flops": case.flops, "calls": len(links)}
        for i, arm in enumerate(case.arms):
            try:
                if i == 0:
                    row["us_alone"] = seconds_alone(self._alone.result(), links, repeats=repeats) * 1e6
                chains = self.chains(arm)
                row[f"us_{arm}"] = chains.seconds_per_call(links, repeats=repeats) * 1e6
            except jax.errors.JaxRuntimeError as error:
                row[f"failed_{arm}"] = str(error).splitlines()[0]
                continue
            row[f"error_{arm}"] = case.error(links[0], chains.short(links)[0])
        return row

    def data(self) -> list[Any]:
        """Arguments of all calls of a chain, on the device."""
        make = self._make.result()
        return [make(key) for key in jax.random.split(jax.random.key(1), len(self._links))]

    def chains(self, arm: str) -> Chains:
        """The chain of one arm; waits for the compiler."""
        short, long = self._chains[arm]
        return Chains(short=short.result(), long=long.result())

    def long_chain(self, function: Callable[..., jax.Array]) -> Future[Any]:
        """The chain with many turns of another function of the same arguments, as it is being compiled."""
        return self._pool.compile(lower_chain(function, self._links, LONG))

    def _both(self, function: Callable[..., jax.Array]) -> list[Future[Any]]:
        return [self._pool.compile(lower_chain(function, self._links, turns)) for turns in (SHORT, LONG)]


class Sweep:
    """A product whose kernel is being compiled with many settings.

    Only programs of many turns of these are timed: what starting and waiting for one takes is known from the kernel as
    it is.
    """

    def __init__(
        self,
        name: str,
        matrix: MatrixSpec,
        rows: int,
        pool: CompilerPool,
        *,
        backend: Backend,
        distinct_bytes: int,
        tried: Sequence[Q8Config] | None = None,
    ) -> None:
        """`tried` are the settings; by default all that make sense for the shape."""
        case = product_case(name, matrix, rows, backend=backend, arms=("kernel",))
        self._prepared = Prepared(case, pool, distinct_bytes=distinct_bytes)
        self._programs: dict[Q8Config, Future[Any]] = {}
        for config in configs(matrix, rows) if tried is None else tried:
            kernel = functools.partial(q8_partial_sums, config=config)
            arm = product_case(name, matrix, rows, backend=backend, arms=("kernel",), kernel=kernel).arms["kernel"]
            self._programs[config] = self._prepared.long_chain(arm)

    def measure(self, *, repeats: int) -> Row:
        """The kernel as it is, and with the settings that can be compiled, the fastest first."""
        links = self._prepared.data()
        chains = self._prepared.chains("kernel")
        as_it_is = chains.seconds_per_call(links, repeats=repeats)
        (long,) = shortest([lambda: chains.long(links)], repeats=repeats)
        overhead = long - as_it_is * LONG * len(links)
        expected = chains.short(links)[0]
        results, failed = [], 0
        for config, program in self._programs.items():
            try:
                run = program.result()
                (seconds,) = shortest([lambda run=run: run(links)], repeats=repeats)
                sums = run(links)[0]
            except jax.errors.JaxRuntimeError:  # it takes more memory than a program may have, for one
                failed += 1
                continue
            us = (seconds - overhead) / (LONG * len(links)) * 1e6
            result = {"config": dataclasses.asdict(config), "us": us, "partial_bytes": sums.nbytes}
            results.append(result | {"difference": _largest_difference(sums, expected)})
        results.sort(key=lambda result: result["us"])
        case = self._prepared.case
        row = {**case.row, "bytes": case.num_bytes, "calls": len(links), "us_as_it_is": as_it_is * 1e6}
        return row | {"num_tried": len(results), "num_failed": failed, "results": results}


def _largest_difference(sums: jax.Array, expected: jax.Array) -> float:
    """Of two products in partial sums [S, T, N], beside the largest value: what another order of adding up changes."""
    actual, wanted = sums.sum(axis=0), expected.sum(axis=0)
    return float(abs(actual - wanted).max() / abs(wanted).max())
