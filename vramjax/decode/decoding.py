"""From requests to tokens: plans sweeps, has an engine run them, and reads what was drawn.

Knows neither layers nor texts. The host runs ahead: while a sweep computes, the next ones are queued already, with rows
for all that had not ended when they were planned. Or it reads first, and then has drafts for the next one.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import jax
import numpy as np

from vramjax.config import ModelConfig
from vramjax.decode.acceptance import new_tokens
from vramjax.decode.depth import MAX_DEPTH
from vramjax.decode.drafting import Drafters
from vramjax.decode.sampler import GREEDY, sampling_of
from vramjax.decode.scheduler import Request, Scheduler
from vramjax.decode.speculation import SweepDrafts
from vramjax.decode.sweep_plan import SweepPlan
from vramjax.errors import ConfigError

if TYPE_CHECKING:
    from vramjax.decode.engine import Drawn, Engine


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """One token of one request."""

    request_idx: int
    id: int
    is_last: bool


@dataclass(frozen=True, kw_only=True)
class DecodingStats:
    """What a decoding has taken so far."""

    num_sweeps: int = 0  # that gave a token: not those that were queued behind the end of all sequences
    num_rows: int = 0  # of these sweeps, those in use
    num_tokens: int = 0  # new ones; a row that was planned before its sequence was known to end gives none
    num_prompt_tokens: int = 0  # of the sequences that have joined
    num_ended: int = 0  # sequences
    drafts_by_depth: tuple[int, ...] = (0,) * MAX_DEPTH  # how many were a sweep's first of their sequence, second, ...
    # How many of these were right, with all before them; those behind a sequence's end, too, which give no token.
    accepted_by_depth: tuple[int, ...] = (0,) * MAX_DEPTH
    seconds: float = 0.0  # from the beginning of work to the last tokens


@dataclass(frozen=True, kw_only=True)
class _Queued:
    """A plan whose tokens are not read yet."""

    plan: SweepPlan
    drawn: Drawn
    drafts: SweepDrafts | None  # that it was planned with, be there any or not; None: it ran ahead


@dataclass(frozen=True, kw_only=True)
class _Turn:
    """What one sweep gave."""

    num_rows: int  # in use
    tokens: list[NewToken]
    logits: list[tuple[int, np.ndarray]]  # whose, and float32 [V], of each token if asked for


class Decoding:
    """An iterator of the tokens of some requests, as they come: in each sweep one of every sequence that has a slot,
    and one more for each of its drafts that was right.

    Invariant: what a request gets is what it would get alone and without drafts; a request has its last token at a stop
    id or its limit, and then costs the rows of its drafts behind that, or one row of each sweep that is queued. Work is
    done as tokens are asked for.

    Example, two requests on two slots, of which request 0 draws a stop id as its second token, and one sweep ahead::

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
        self._read_at: float | None = None  # when the last tokens came
        self._ended: set[int] = set()
        # Of those that have joined and not ended.
        self._drafters: dict[int, Drafters] = {}
        self._last_ids: dict[int, int] = {}
        spec = engine.spec
        self._runs_ahead = on_logits is None and engine.speculation is None  # as far as the engine goes
        self._max_turns = engine.turns_per_call if self._runs_ahead else 1
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
        queued: deque[_Queued] = deque()
        last_ids = None
        while True:
            with self._engine.work(self, begins=last_ids is None):
                if last_ids is None:
                    self._began_at, last_ids = time.perf_counter(), self._engine.no_ids()
                # The next sweeps' work is queued before this one's tokens are read: the device never waits for the
                # host. First tokens alone are read at once: so they are not kept back by what is queued behind them.
                while self._may_queue_behind(queued):
                    drafts = None if queued else self._drafts()
                    known = None if drafts is None else self._known(drafts)
                    plan = self._scheduler.next_sweep(known, max_turns=self._max_turns)
                    if plan is None:
                        break
                    queued.append(_Queued(plan=plan, drawn=self._queue(plan, last_ids), drafts=drafts))
                    last_ids = queued[-1].drawn.last_ids
                while queued and self._has_ended(queued[0].plan):
                    queued.popleft()
                if not queued:
                    return
                turns = self._read(queued.popleft())
            # By now the engine is free: whoever is told may use it, and what goes wrong there is not its failure.
            for turn in turns:
                num_ended = sum(token.is_last for token in turn.tokens)
                self._count(num_sweeps=1, num_rows=turn.num_rows, num_tokens=len(turn.tokens), num_ended=num_ended)
                for request_idx, row in turn.logits:
                    assert self._on_logits is not None
                    self._on_logits(request_idx, row)
                yield from turn.tokens

    def _may_queue_behind(self, queued: Iterable[_Queued]) -> bool:
        """Whether one more may be queued before the tokens of these are read."""
        nums_ahead = [self._plans_ahead_of(each.plan) for each in queued]
        if len(nums_ahead) > min(nums_ahead, default=0):
            return False
        speculation = self._engine.speculation
        return not nums_ahead or speculation is None or not speculation.waits(list(self._drafters.values()))

    def _plans_ahead_of(self, plan: SweepPlan) -> int:
        """How many plans may be queued after this one before its tokens are read, at most.

        Logits of each would take memory; and a sweep of which drafts are left out is to be one, not four.
        """
        if not plan.num_decoded or plan.has_drafts:
            return 0
        return self._engine.plans_ahead_of(plan) if self._runs_ahead else 1

    def _drafts(self) -> SweepDrafts | None:
        """Of all sequences, whose sweeps were all read; None without speculation."""
        if (speculation := self._engine.speculation) is None:
            return None
        rooms = [self._requests[i].limit - self._num_drawn[i] - 1 for i in self._last_ids]
        return speculation.drafts([self._drafters[i] for i in self._last_ids], rooms, self._scheduler.num_joining)

    def _known(self, drafts: SweepDrafts) -> dict[int, list[int]]:
        """The last token of each sequence, and the drafts of those that follow it."""
        return {i: [last, *ids] for (i, last), ids in zip(self._last_ids.items(), drafts.ids, strict=True)}

    def _queue(self, plan: SweepPlan, last_ids: jax.Array) -> Drawn:
        rows = [[GREEDY] * self._engine.spec.tile_rows for _ in plan.tiles]
        for draw in plan.draws:
            rows[draw.tile_idx][draw.row] = self._requests[draw.request_idx].sampling or GREEDY
        sampling = [sampling_of(tuple(tile)) for tile in rows]
        drawn = self._engine.run(plan, last_ids, sampling, keep_logits=self._on_logits is not None)
        if (speculation := self._engine.speculation) is not None:
            # After the sweep was queued: so a first token does not wait for it.
            joined = [draw for draw in plan.draws if draw.request_idx not in self._drafters]
            for draw in joined:
                if (i := draw.request_idx) not in self._ended:
                    self._drafters[i] = speculation.begin(self._requests[i], draw.slot)
        self._count(num_prompt_tokens=sum(len(join.prompt_ids) for join in plan.joins))
        return drawn

    def _read(self, queued: _Queued) -> list[_Turn]:
        """What each sweep of a plan gave; waits for it."""
        plan, drawn = queued.plan, queued.drawn
        ids = drawn.read_ids()
        logits = [np.asarray(tile) for tile in drawn.logits]
        now, before = time.perf_counter(), self._read_at
        self._read_at = now
        seconds = None if plan.joins or before is None else now - before
        turns: list[_Turn] = []
        for i in range(plan.num_turns):
            if self._has_ended(plan):
                break
            turns.append(self._read_turn(queued, [tile[i] for tile in ids], logits, seconds))
        assert turns, "a sweep of sequences that have all ended is not read"
        self.stats = dataclasses.replace(self.stats, seconds=time.perf_counter() - self._began_at)
        return turns

    def _read_turn(
        self, queued: _Queued, ids: Sequence[np.ndarray], tiles: Sequence[np.ndarray], seconds: float | None
    ) -> _Turn:
        """What a sweep gave.

        Args:
          queued: what it is a turn of.
          ids: int32 [W] of each tile.
          tiles: float32 [W, V] of each tile, if logits are asked for.
          seconds: how long it took, if that says something of other sweeps.
        """
        plan = queued.plan
        tokens: list[NewToken] = []
        logits: list[tuple[int, np.ndarray]] = []
        depths: list[int] = []
        nums_accepted: list[int] = []
        for i, of_request in itertools.groupby(plan.draws, key=lambda draw: draw.request_idx):
            if i in self._ended:
                continue
            rows = [(draw.tile_idx, draw.row) for draw in of_request]
            drafts = [int(plan.tiles[tile_idx].ids[row]) for tile_idx, row in rows[1:]]
            new = new_tokens(drafts, [int(ids[tile_idx][row]) for tile_idx, row in rows])
            depths.append(len(drafts))
            nums_accepted.append(len(new) - 1)
            taken = self._take(i, new)
            tokens += taken
            if tiles:
                logits += [(i, tiles[tile_idx][row]) for tile_idx, row in rows[: len(taken)]]
        self._note(depths, nums_accepted)
        if self._engine.speculation is not None:
            nums_new = [1 + number for number in nums_accepted]
            num_tiles = len(plan.tiles)
            self._engine.speculation.record(depths, nums_new, queued.drafts, num_tiles=num_tiles, seconds=seconds)
        return _Turn(num_rows=len(plan.draws), tokens=tokens, logits=logits)

    def _has_ended(self, plan: SweepPlan) -> bool:
        """Whether all that it draws for have ended."""
        return self._ended.issuperset([draw.request_idx for draw in plan.draws])

    def _take(self, request_idx: int, new: Sequence[int]) -> list[NewToken]:
        """Adds new tokens to a sequence, up to the one in which it ends; those that it takes."""
        request, tokens = self._requests[request_idx], []
        for token_id in new:
            self._num_drawn[request_idx] += 1
            is_last = token_id in request.stop_ids or self._num_drawn[request_idx] == request.limit
            tokens.append(NewToken(request_idx=request_idx, id=token_id, is_last=is_last))
            if is_last:
                self._ended.add(request_idx)
                self._scheduler.finish(request_idx)
                self._drafters.pop(request_idx, None)
                self._last_ids.pop(request_idx, None)
                return tokens
        self._scheduler.accept(request_idx, len(new) - 1)
        if request_idx in self._drafters:
            self._drafters[request_idx].append(new)
            self._last_ids[request_idx] = new[-1]
        return tokens

    def _note(self, depths: Sequence[int], nums_accepted: Sequence[int]) -> None:
        """Counts drafts, by their place."""
        if not any(depths):
            return
        drafted, accepted = list(self.stats.drafts_by_depth), list(self.stats.accepted_by_depth)
        for counts, numbers in ((drafted, depths), (accepted, nums_accepted)):
            for number in numbers:
                for place in range(number):
                    counts[place] += 1
        self.stats = dataclasses.replace(self.stats, drafts_by_depth=tuple(drafted), accepted_by_depth=tuple(accepted))

    def _count(self, **more: int) -> None:
        self.stats = dataclasses.replace(
            self.stats, **{name: getattr(self.stats, name) + number for name, number in more.items()}
        )


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
