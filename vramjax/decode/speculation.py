"""Drafts for the sequences of an engine: whether to wait for the tokens that they follow, and how many each gets.

To draft what follows a token, the host must have read it, and so cannot have the next sweep queued before that. Whether
this is worth it, and how many rows a sweep takes for drafts, is decided from the times that sweeps were seen to take.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vramjax.decode.depth import MAX_DEPTH, DepthPlanner, SweepCost, expected_rate
from vramjax.decode.drafting import Drafter, Drafters, NgramDrafter
from vramjax.decode.scheduler import Request

if TYPE_CHECKING:  # which imports JAX
    from vramjax.decode.model_drafting import DraftModel

CHEAP_WAIT = 0.01  # of a sweep: for that it is always waited, as there may be something to draft then
_NUM_PLAIN = 5  # sweeps without drafts, whose time is to be known before there are others
_NUM_TRIES = 2  # times after which a number of tiles is known: the first may have been disturbed
_NUM_TIMES = 31  # the latest, of which the lower quartile counts
_LIFETIME = 256  # sweeps, after which a time is forgotten that no other one has confirmed
_PLAIN_EVERY = 8  # sweeps, one runs ahead at least, so that it is seen what that takes now: where nothing is drafted
_PLAIN_AT_LEAST_EVERY = 64  # and where there would be drafts
_NOTICEABLE = 1.05  # times what a sweep takes at least: what takes longer, says what more tiles than that may take


class _Times:
    """Seconds of sweeps of one kind, the latest ones."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMES)
        self.last_sweep = 0  # in which there was one

    def add(self, seconds: float, sweep: int) -> None:
        self._seconds.append(seconds)
        self.last_sweep = sweep

    def __len__(self) -> int:
        return len(self._seconds)

    @property
    def typical(self) -> float:
        """The lower quartile: whatever disturbs a sweep makes it longer."""
        return sorted(self._seconds)[len(self) // 4]


class SweepClock:
    """What sweeps have taken, by their number of tiles, and what others are believed to take.

    A number of tiles that was tried costs what it took, be it little more than one tile. As for others: where layers
    are streamed, tiles are computed while they come, and more of them cost nothing until the computing takes longer.
    Until that is seen, twice as many tiles as were tried are believed to be free.

    Invariant: a single time decides nothing, whatever it is; and what was believed long ago is tried again.

    Example, streamed: sweeps of one tile took 0.10 s with one queued ahead, and 0.11 s where that was not so; the cost
    is 0.10 s of streaming, 0.01 s of waiting, 0.05 s a tile. After two of two tiles that took 0.114 s, two tiles cost
    0.104 s and the waiting, and so do up to four, at 0.025 s a tile.
    """

    def __init__(self, *, tile_rows: int, is_streamed: bool) -> None:
        """A clock that has seen nothing."""
        self._tile_rows, self._is_streamed = tile_rows, is_streamed
        self._ahead: dict[int, _Times] = {}  # by number of tiles
        self._waited: dict[int, _Times] = {}
        self._num_noted = 0

    def note(self, num_tiles: int, seconds: float, *, has_waited: bool) -> None:
        """Adds the time from the tokens of one sweep to those of the next.

        Args:
          num_tiles: of the later one.
          seconds: that time.
          has_waited: whether the later one was queued after the tokens of the other had been read.
        """
        self._num_noted += 1
        (self._waited if has_waited else self._ahead).setdefault(num_tiles, _Times()).add(seconds, self._num_noted)
        for times in (self._ahead, self._waited):
            for old in [n for n, each in times.items() if self._num_noted - each.last_sweep > _LIFETIME]:
                del times[old]

    @property
    def sweeps_since_ahead(self) -> int:
        """How many were noted since one that ran ahead."""
        return self._num_noted - self._last_ahead

    @property
    def is_plain_due(self) -> bool:
        """Whether drafts are left out so that a sweep can run ahead: the more often, the less has been seen.

        The first sweeps may have been slow for a reason of their own, and drafts seem to cost nothing beside them.
        """
        return self.sweeps_since_ahead >= min(_PLAIN_AT_LEAST_EVERY, self._last_ahead)

    @property
    def _last_ahead(self) -> int:
        return max((times.last_sweep for times in self._ahead.values()), default=0)

    @property
    def cost(self) -> SweepCost | None:
        """What sweeps take; None while too little is known."""
        ahead = {n: times.typical for n, times in self._ahead.items() if len(times) >= _NUM_PLAIN}
        if not ahead:
            return None
        waited = {n: times.typical for n, times in self._waited.items() if len(times) >= _NUM_TRIES}
        common = ahead.keys() & waited.keys()
        # Who takes the tokens may be slow for a while: the least that waiting was seen to take, which all have in them.
        waiting_s = max(0.0, min((waited[n] - ahead[n] for n in common), default=0.0))
        waiting_s = min([waiting_s, *(seconds / 2 for seconds in waited.values())])
        known = {n: seconds - waiting_s for n, seconds in waited.items()}
        # To have waited takes no less: a sweep that says so is more recent.
        known |= {n: min(seconds, known.get(n, seconds)) for n, seconds in ahead.items()}
        # Fewer tiles take no longer: a time that says so is older, or was disturbed.
        numbers = sorted(known, reverse=True)
        measured_s = dict(zip(numbers, itertools.accumulate((known[n] for n in numbers), min), strict=True))
        fewest, most = numbers[-1], numbers[0]
        if self._is_streamed:
            streaming_s = measured_s[fewest]
            noticed = [seconds / n for n, seconds in measured_s.items() if seconds > _NOTICEABLE * streaming_s]
            tile_s = max(noticed, default=streaming_s / (2 * most))
        else:
            streaming_s, tile_s = 0.0, measured_s[fewest] / fewest
        return SweepCost(
            tile_rows=self._tile_rows,
            tile_s=tile_s,
            streaming_s=streaming_s,
            measured_s=measured_s,
            waiting_s=waiting_s,
        )


@dataclass(frozen=True, kw_only=True)
class SweepDrafts:
    """What the sequences of one sweep go on with, perhaps, and what it took to say so.

    Example: a model has drafted 3 tokens for one sequence and 1 for another, at 2 ms for a token of both, and has read
    a prompt of 10 ms before: `SweepDrafts(ids=[[6, 7, 8], [4]], seconds=0.016, token_s=0.002)`.
    """

    ids: Sequence[Sequence[int]]  # of each sequence
    seconds: float = 0.0  # that a model took for them; what is looked up takes none
    token_s: float = 0.0  # of these, what one more token for all sequences takes as a rule

    def more_s(self, depth: int) -> float:
        """What they took beyond so many tokens: prompts, for one."""
        return max(0.0, self.seconds - depth * self.token_s)


class Speculation:
    """Deals drafts out to sequences, and learns from what becomes of them.

    Invariant: with a fixed depth, every draft is so long, or as long as there is a guess and room for it. Without one,
    drafts are as long as pays by the clock, and all sweeps take at most 3 % longer than without any (`DepthPlanner`).
    Where a model drafts, a sweep has its drafts or those that are looked up, whichever promise more tokens a second.

    Example: `Speculation(tile_rows=16, max_rows=32, is_streamed=True)` has five sweeps run ahead, then drafts for one
    sequence up to 15 tokens a sweep, in a tile that costs the same with one row.
    """

    def __init__(
        self,
        *,
        tile_rows: int,
        max_rows: int,
        is_streamed: bool,
        depth: int | None = None,
        drafter: Callable[[Sequence[int]], Drafter] = NgramDrafter,
        model: DraftModel | None = None,
    ) -> None:
        """Nothing is known yet.

        Args:
          tile_rows: of a tile.
          max_rows: of a sweep with drafts.
          is_streamed: whether layers are uploaded for each sweep.
          depth: that of all drafts; None: what pays.
          drafter: makes one that begins with these ids.
          model: what drafts too, and alone if there is a depth.
        """
        assert depth is None or 0 < depth <= MAX_DEPTH
        self._drafter, self._model, self._depth = drafter, model, depth
        self._clock = SweepClock(tile_rows=tile_rows, is_streamed=is_streamed)
        self._planner = DepthPlanner(max_rows=max_rows)
        self._drafting = _Times()  # of one more token for all sequences
        if model is not None:
            self._drafting.add(model.draft_s, 0)

    def begin(self, request: Request, slot: int) -> Drafters:
        """What drafts for a sequence that has joined, of whose tokens only the prompt is known."""
        model = self._model and self._model.begin(request.prompt_ids, slot, request.sampling)
        return Drafters(lookup=self._drafter(request.prompt_ids), model=model)

    def waits(self, drafters: Sequence[Drafters]) -> bool:
        """Whether the next sweep is planned after the tokens of this one are read, which `drafters` do not know yet."""
        if self._depth is not None:
            return True
        cost = self._clock.cost
        if cost is None or not drafters:
            return False
        depths, _ = self._plan(drafters, [MAX_DEPTH] * len(drafters), 0, cost)
        if any(depths):
            return not self._clock.is_plain_due
        is_cheap = cost.waiting_s <= CHEAP_WAIT * cost.seconds(len(drafters), 0)
        return is_cheap and self._clock.sweeps_since_ahead < _PLAIN_EVERY

    def drafts(self, drafters: Sequence[Drafters], rooms: Sequence[int], num_joining: int) -> SweepDrafts:
        """Those of the next sweep, which is to be queued now; all tokens of the sequences are known.

        Args:
          drafters: of the sequences.
          rooms: how many drafts each has room for.
          num_joining: further rows of the sweep.
        """
        if self._depth is not None:
            depths, is_model = [min(self._depth, room) for room in rooms], self._model is not None
        elif (cost := self._clock.cost) is None or self._clock.is_plain_due or not drafters:
            return SweepDrafts(ids=[[] for _ in drafters])
        else:
            depths, is_model = self._plan(drafters, rooms, num_joining, cost)
        return self._draft(drafters, depths, is_model=is_model)

    def record(
        self,
        depths: Sequence[int],
        num_tokens: Sequence[int],
        drafts: SweepDrafts | None,
        *,
        num_tiles: int,
        seconds: float | None,
    ) -> None:
        """Takes note of a sweep that was read.

        Args:
          depths: how many drafts each sequence had.
          num_tokens: how many tokens it gave: one for each draft that was right, and one more.
          drafts: what was returned for this sweep; None: it was queued before the tokens of the one before were read.
          num_tiles: of the sweep.
          seconds: since the tokens of the one before, drafts included; None: it had more to do than tiles.
        """
        has_waited, drafts = drafts is not None, drafts or SweepDrafts(ids=[])
        if seconds is not None:
            self._clock.note(num_tiles, seconds - drafts.seconds, has_waited=has_waited)
        if self._depth is None and depths and (cost := self._clock.cost) is not None:
            cost = dataclasses.replace(cost, draft_s=drafts.token_s)
            more_s = drafts.more_s(max(depths))
            self._planner.record(depths, num_tokens, cost, has_waited=has_waited, more_s=more_s)

    @property
    def draft_s(self) -> float | None:
        """What one more token for all sequences takes the model that drafts; None if there is none."""
        return self._drafting.typical if self._model is not None else None

    def _plan(
        self, drafters: Sequence[Drafters], rooms: Sequence[int], num_joining: int, cost: SweepCost
    ) -> tuple[list[int], bool]:
        """The depth of each draft, and whether a model makes them: of both kinds the one of more tokens a second.

        `cost` is that of sweeps alone.
        """
        best, best_rate = ([0] * len(drafters), False), 0.0
        rooms = [min(MAX_DEPTH, room) for room in rooms]
        for is_model in (False, True) if self._model is not None else (False,):
            own_cost = dataclasses.replace(cost, draft_s=self._drafting.typical if is_model else 0.0)
            own = [each.model if is_model else each.lookup for each in drafters]
            chances = [each.chances(room) if each else [] for each, room in zip(own, rooms, strict=True)]
            depths = self._planner.plan([*chances, *[[]] * num_joining], own_cost)
            rate = expected_rate([*chances, *[[]] * num_joining], depths, own_cost)
            if rate > best_rate:
                best, best_rate = (depths[: len(drafters)], is_model), rate
        return best

    def _draft(self, drafters: Sequence[Drafters], depths: Sequence[int], *, is_model: bool) -> SweepDrafts:
        if self._model is None or not is_model:
            return SweepDrafts(ids=[each.lookup.draft(depth) for each, depth in zip(drafters, depths, strict=True)])
        if not any(depths):
            return SweepDrafts(ids=[[] for _ in drafters])
        began_at = time.perf_counter()
        ids = self._model.draft([each.model for each in drafters if each.model is not None], depths)
        seconds = time.perf_counter() - began_at
        self._drafting.add(seconds / max(depths), 0)
        return SweepDrafts(ids=ids, seconds=seconds, token_s=self._drafting.typical)
