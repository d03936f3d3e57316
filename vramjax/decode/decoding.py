"""From requests to tokens: plans sweeps, has an engine run them, and reads what was drawn one sweep late.

Knows neither layers nor texts. The host runs ahead: while a sweep computes, the next one is queued already, with rows
for all that had not ended when it was planned.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import jax
import numpy as np

from vramjax.config import ModelConfig
from vramjax.decode.sampler import RowSampling, Sampling
from vramjax.decode.scheduler import Request, Scheduler
from vramjax.decode.sweep_plan import SweepPlan
from vramjax.errors import ConfigError

if TYPE_CHECKING:
    from vramjax.decode.engine import Drawn, Engine

GREEDY = Sampling()


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """One token of one request."""

    request_idx: int
    id: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class DecodingStats:
    """What a decoding has taken so far."""

    num_sweeps: int = 0  # that were queued
    num_rows: int = 0  # of all sweeps, those in use
    num_tokens: int = 0  # new ones; a row that was planned before its sequence was known to end gives none
    num_prompt_tokens: int = 0  # of the sequences that have joined
    num_ended: int = 0  # sequences
    seconds: float = 0.0  # from the beginning of work to the last tokens


class Decoding:
    """An iterator of the tokens of some requests, as they come: in each sweep one of every sequence that has a slot.

    Invariant: what a request gets is what it would get alone; a request has its last token at a stop id or its limit,
    and then costs one row more at most. Work is done as tokens are asked for.

    Example, two requests on two slots, of which request 0 draws a stop id as its second token::

        sweep 1: 0 and 1 join          read at once: nothing else was decoded that could wait
        sweep 2: rows of 0 and 1       sweep 3 is queued before this is read: a stop id
        sweep 3: rows of 0 and 1       sweep 4 is queued with a row of 1 alone; what 0 has drawn here is left out
    """

    def __init__(
        self,
        engine: Engine,
        requests: Sequence[Request],
        *,
        on_logits: Callable[[int, np.ndarray], None] | None = None,
    ) -> None:
        """See `Engine.decode`."""
        for request in requests:
            check_prompt(request.prompt_ids, engine.spec.config, engine.spec.context)
        self.stats = DecodingStats()
        self._engine, self._requests, self._on_logits = engine, list(requests), on_logits
        self._num_drawn = [0] * len(requests)
        self._began_at = 0.0
        self._ended: set[int] = set()
        spec = engine.spec
        self._scheduler = Scheduler(
            num_slots=spec.num_slots,
            tile_rows=spec.tile_rows,
            chunk_rows=spec.chunk_rows,
            max_chunks=spec.max_chunks,
        )
        for request in requests:
            self._scheduler.add(request)
        self._tokens = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> NewToken:
        return next(self._tokens)

    def _run(self) -> Iterator[NewToken]:
        queued: deque[tuple[SweepPlan, Drawn]] = deque()  # sweeps that are not read yet
        last_ids = None
        while True:
            with self._engine.work(self, begins=last_ids is None):
                if last_ids is None:
                    self._began_at, last_ids = time.perf_counter(), self._engine.no_ids()
                # The next sweep's work is queued before this one's tokens are read: the device never waits for the
                # host. First tokens alone are read at once: so they are not kept back by what is queued behind them.
                while not queued or (len(queued) == 1 and queued[0][0].num_decoded):
                    plan = self._scheduler.next_sweep()
                    if plan is None:
                        break
                    queued.append((plan, self._queue(plan, last_ids)))
                    last_ids = queued[-1][1].last_ids
                while queued and all(draw.request_idx in self._ended for draw in queued[0][0].draws):
                    queued.popleft()
                if not queued:
                    return
                tokens, logits = self._read(*queued.popleft())
            # By now the engine is free: whoever is told may use it, and what goes wrong there is not its failure.
            for request_idx, row in logits:
                assert self._on_logits is not None
                self._on_logits(request_idx, row)
            yield from tokens

    def _queue(self, plan: SweepPlan, last_ids: jax.Array) -> Drawn:
        rows = [[GREEDY] * self._engine.spec.tile_rows for _ in plan.tiles]
        for draw in plan.draws:
            rows[draw.tile_idx][draw.row] = self._requests[draw.request_idx].sampling or GREEDY
        sampling = [_sampling_of(tuple(tile)) for tile in rows]
        drawn = self._engine.run(plan, last_ids, sampling, keep_logits=self._on_logits is not None)
        self._count(
            num_sweeps=1,
            num_rows=len(plan.draws),
            num_prompt_tokens=sum(len(join.prompt_ids) for join in plan.joins),
        )
        return drawn

    def _read(self, plan: SweepPlan, drawn: Drawn) -> tuple[list[NewToken], list[tuple[int, np.ndarray]]]:
        """The tokens of a sweep, and whose logits are what, if they are asked for; waits for it."""
        ids, tiles = np.asarray(drawn.last_ids), [np.asarray(tile) for tile in drawn.logits]
        tokens, logits = [], []
        for draw in plan.draws:
            i = draw.request_idx
            if i in self._ended:
                continue
            token_id, request = int(ids[draw.slot]), self._requests[i]
            self._num_drawn[i] += 1
            is_last = token_id in request.stop_ids or self._num_drawn[i] == request.limit
            if is_last:
                self._ended.add(i)
                self._scheduler.finish(i)
            if tiles:
                logits.append((i, tiles[draw.tile_idx][draw.row]))
            tokens.append(NewToken(request_idx=i, id=token_id, is_last=is_last))
        self._count(num_tokens=len(tokens), num_ended=sum(token.is_last for token in tokens))
        self.stats = dataclasses.replace(self.stats, seconds=time.perf_counter() - self._began_at)
        return tokens, logits

    def _count(self, **more: int) -> None:
        self.stats = dataclasses.replace(
            self.stats, **{name: getattr(self.stats, name) + number for name, number in more.items()}
        )


@functools.lru_cache(maxsize=64)
def _sampling_of(rows: tuple[Sampling, ...]) -> RowSampling:
    """Mostly the same from sweep to sweep."""
    return RowSampling.of(rows)


def check_prompt(prompt_ids: Sequence[int], config: ModelConfig, context: int) -> None:
    """Refuses a prompt that cannot be decoded from, before anything is computed.

    Raises:
      ConfigError: it is empty, has an id out of range, or does not fit into `context` positions.
    """
    if not len(prompt_ids):
        raise ConfigError("the prompt has no tokens; expected at least one")
    for index, token_id in enumerate(prompt_ids):
        if not 0 <= token_id < config.vocab_size:
            raise ConfigError(
                f"token id {token_id} at index {index} of the prompt; expected 0 .. {config.vocab_size - 1}"
            )
    if len(prompt_ids) > context:
        limit = "the model's maximum: " if context >= config.max_positions else "the context: raise it or "
        raise ConfigError(f"the prompt has {len(prompt_ids)} tokens; expected at most {context}, {limit}cut the prompt")
