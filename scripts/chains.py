"""What one call costs inside a program: chains of calls of two lengths, over different data, whose difference counts.

In a model a kernel follows another one of the same program and reads weights that no cache holds. So each call of a
chain has data of its own, more in all than a GPU's cache holds, and waits for the call before it; and what it costs to
start a program and to wait for it is in both chains, and not in the difference. Knows nothing of what is called.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax import lax

Links = Sequence[Any]  # for each call its arguments: a tuple of pytrees, of which the first comes from the call before

MIN_CALLS, MAX_CALLS = 12, 48  # of the long chain
_SHORT = 3  # the short chain is so many times shorter


def num_calls(num_bytes: int, distinct_bytes: int) -> int:
    """Calls of a long chain that read `num_bytes` each, and `distinct_bytes` together if it may be that long."""
    return max(MIN_CALLS, min(MAX_CALLS, -(-distinct_bytes // num_bytes)))


def lower_chain(function: Callable[..., jax.Array], links: Links, count: int) -> Any:
    """The program that calls `function` with the first `count` of `links` in turn; lowered, not compiled.

    It takes all of `links`, whatever it uses of them, so that programs of all lengths are equally hard to start.
    """
    call = jax.jit(function)  # is traced once, however often it is called

    def chain(links: Links) -> list[jax.Array]:
        results: list[jax.Array] = []
        for first, *rest in links[:count]:
            if results:
                first, results[-1] = lax.optimization_barrier((first, results[-1]))
            results.append(call(first, *rest))
        return results

    return jax.jit(chain, keep_unused=True).lower(links)


@dataclass(frozen=True, kw_only=True)
class Chains:
    """Both chains of one function, compiled."""

    short: Callable[[Links], list[jax.Array]]
    long: Callable[[Links], list[jax.Array]]

    @staticmethod
    def lengths(links: Links) -> tuple[int, int]:
        """Calls of the short and of the long chain."""
        return max(1, len(links) // _SHORT), len(links)

    def seconds_per_call(self, links: Links, *, repeats: int) -> float:
        """From the shortest time of each chain; they take turns, so that neither finds its data in a cache."""
        short, long = self.lengths(links)
        seconds = shortest([lambda: self.short(links), lambda: self.long(links)], repeats=repeats)
        return (seconds[1] - seconds[0]) / (long - short)


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
        """The compiled program, or the compiler's error, when it is done."""
        self._programs.append(self._pool.submit(lowered.compile))
        return self._programs[-1]

    def wait(self, advance: Callable[[int], None]) -> None:
        """Until all are done; `advance(1)` for each."""
        for _ in as_completed(self._programs):
            advance(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
