"""What one call costs inside a program: a chain of calls over different data, run through a few times and many times.

In a model a kernel follows another one of the same program and reads weights that no cache holds. So each call of a
chain has data of its own, more in all than a GPU's cache holds, and waits for the call before it. On a GPU the first
turn is part of the program, and in the others a loop runs through the chain again, which is the same graph of kernels
at the same addresses: what the host has to do to queue it is far less than its kernels take. On a CPU, whose compiler
would compute once what is the same in all turns, each turn is a run of the program. What it costs to start a program
and to wait for it is in both numbers of turns on a GPU, and not in the difference. Knows nothing of what is called.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

Links = Sequence[Any]  # for each call its arguments: a tuple of pytrees, of which the first comes from the call before

MIN_CALLS, MAX_CALLS = 12, 48  # of a chain
SHORT, LONG = 3, 7  # turns: a loop of one would be no loop, and nothing that is computed twice
# XLA makes the kernels of a program branches of one graph where none reads what another one has written, and calls of a
# chain do not: they would run side by side, and each would seem to take less than it does.
_ONE_BY_ONE = {"xla_gpu_command_buffer_scheduling_mode": "SERIALIZE"}


def num_calls(num_bytes: int, distinct_bytes: int) -> int:
    """Calls of a chain that read `num_bytes` each, and `distinct_bytes` together if it may be that long."""
    return max(MIN_CALLS, min(MAX_CALLS, -(-distinct_bytes // num_bytes)))


def lower_chain(function: Callable[..., jax.Array], links: Links, turns: int) -> Any:
    """The program that calls `function` with each of `links`, so many turns; lowered, not compiled.

    Its results are those of all calls if there is one turn; else the first call's, and a sum of one number of each.
    """
    call = jax.jit(function)  # is traced once, however often it is called

    def turn(links: Links, before: jax.Array) -> list[jax.Array]:
        results: list[jax.Array] = []
        for link in links:
            # Nothing of a call can be done before the last one: not even what depends on its weights alone.
            link, before = lax.optimization_barrier((link, before))
            if results:
                results[-1] = before
            results.append(call(*link))
            before = results[-1]
        results[-1] = lax.optimization_barrier(before)  # all of it is needed, not just the number that is looked at
        return results

    def total(results: Sequence[jax.Array]) -> jax.Array:
        return functools.reduce(jnp.add, [jnp.ravel(result)[0] for result in results])

    def chain(links: Links) -> list[jax.Array]:
        results = turn(links, jnp.zeros(()))
        if turns == 1:
            return results
        return [results[0], lax.fori_loop(1, turns, lambda _, before: total(turn(links, before)), total(results))]

    return jax.jit(chain).lower(links)


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The chain of one function, compiled for both numbers of turns."""

    short: Callable[[Links], Any]
    long: Callable[[Links], Any]

    def seconds_per_call(self, links: Links, *, repeats: int) -> float:
        """From the shortest time of each program; they take turns, so that neither finds its data in a cache."""
        seconds = shortest([lambda: self.short(links), lambda: self.long(links)], repeats=repeats)
        return (seconds[1] - seconds[0]) / ((LONG - SHORT) * len(links))


def repeated(program: Callable[[Links], Any], turns: int) -> Callable[[Links], Any]:
    """Runs a chain of one turn so many times, one after the other."""

    def run(links: Links) -> Any:
        for _ in range(turns - 1):
            jax.block_until_ready(program(links))
        return program(links)

    return run


def shortest(programs: Sequence[Callable[[], Any]], *, repeats: int) -> list[float]:
    """The shortest time of each program, in seconds; they run in turns, and are waited for."""
    best = [float("inf")] * len(programs)
    for i in range(1 + repeats):
        for index, program in enumerate(programs):
            start = time.perf_counter()
            jax.block_until_ready(program())
            if i:  # the first run loads the program
                best[index] = min(best[index], time.perf_counter() - start)
    return best


def seconds_alone(program: Callable[..., Any], links: Links, *, repeats: int) -> float:
    """What one call costs as a program of its own, of many that are queued: the device's time or the host's."""
    (seconds,) = shortest([lambda: [program(*link) for link in links]], repeats=repeats)
    return seconds / len(links)


class CompilerPool:
    """Compiles many programs at once, by as many threads as there are processors. Lowering stays with the caller.

    Example: `with CompilerPool() as pool: futures = [pool.compile(jax.jit(f).lower(x)) for f in functions]`.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._programs: list[Future[Any]] = []

    @property
    def num_programs(self) -> int:
        """Programs that it was given."""
        return len(self._programs)

    def compile(self, lowered: Any) -> Future[Any]:
        """The compiled program, or the compiler's error, when it is done. Its kernels run one after the other."""
        self._programs.append(self._pool.submit(lowered.compile, _ONE_BY_ONE))
        return self._programs[-1]

    def wait(self, advance: Callable[[int], None]) -> None:
        """Until all are done; `advance(1)` for each."""
        for _ in as_completed(self._programs):
            advance(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
